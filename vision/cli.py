"""alma-vision: train a vision learner over a stream of mega-batches and write its ledger.

alma-vision                                                        a first result: SM and Ens on digits
alma-vision dataset=mnist learner=gmoe wait=10 width=32 seeds=3 out=RUN
alma-vision -m dataset=mnist learner=sm wait=1,10,50 width=4,32 out=SWEEP    a sweep, ordered by validation error
alma-vision status RUN                                             the ledger so far, and what remains to be done
alma-vision --help                                                 every setting
"""

import logging
import os
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.app.command import Command, print_errors, run_job, store_settings
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.app.sweep import score_key
from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.allocator import keep_freed_memory
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.ledger import mean_and_standard_error
from vision.runs import run
from vision.settings import VisionSettings

CONFIGS = Path(__file__).parent / "configs"


def run_and_show(settings: VisionSettings) -> float:
    """Call `run`, print the results and write summary.json.

    Return the score by which runs are compared (see `score_key`), averaged over the seeds: the prequential error rate,
    or the final validation error rate if only one mega-batch arrived.

    This function also changes how the process frees memory (see `keep_freed_memory`). So only the command alma-vision
    calls `run_and_show`. Other code calls `run`.
    """
    keep_freed_memory()
    console, out = wide_console(), Path(settings.out)
    ledgers = run(settings)
    title = f"{settings.out}: learner={settings.learner} wait={settings.wait}"
    seeding = settings.seeding
    if seeding.seeds == 1:
        console.print(ledger_table(ledgers[0], title, at_most=20))
        summary = read_json(out / "summary.json")
        console.print(f"CER {summary['cer']:.3f}, final error rate {summary['final']:.2%}, {summary['comp']:.3g} FLOPs")
    else:
        folders = [out / f"seed_{seeding.seed + number}" for number in range(seeding.seeds)]
        whole = mean_and_standard_error([read_json(folder / "summary.json") for folder in folders])
        write_json(out / "summary.json", whole)
        summary, stderr = whole["mean"], whole["stderr"]
        console.print(
            f"{title}: {seeding.seeds} seeds, CER {summary['cer']:.3f} +- {stderr['cer']:.3f}, final error rate "
            f"{summary['final']:.2%} +- {stderr['final']:.2%} (mean +- standard error), {summary['comp']:.3g} FLOPs "
            f"per seed"
        )
    console.print(f"ledger {out}{'' if seeding.seeds == 1 else '/seed_*'}/ledger.jsonl, summary {out}/summary.json")
    return summary[score_key([summary])]


def quickstart() -> None:
    """Train SM and Ens on digits and write a report. `alma-vision` without arguments calls this function."""
    # Import the report code only when it is needed, because it imports matplotlib, and that import takes a second.
    from fairseq_alma.report.cli import make

    out = Path("runs/quickstart")
    for folder in (out / "sm", out / "ens"):
        settings = VisionSettings(out=str(folder), learner=folder.name, preset="quickstart")
        print(f"\n$ alma-vision preset=quickstart learner={settings.learner} out={folder}", flush=True)
        run_and_show(settings)
    print(f"\n$ alma-report {out} --out {out / 'report'}", flush=True)
    make([str(out)], out / "report")


def settings_of(values: Mapping[str, Any], given: Collection[str] | None = None) -> VisionSettings:
    """Return a settings object with the given values.

    If the values name a plugin, import the plugin first, because it may register the learner that the values name.

    Args:
        values: setting name -> value.
        given: names of the settings that the user typed (see `RunSettings.from_mapping`).

    Raises:
        SettingError: if the plugin does not exist, a name is unknown, or a value is invalid.
    """
    if plugin := values.get("plugin"):
        load_plugin(str(plugin))
    return VisionSettings.from_mapping(values, given)


def by_backbone(perceptron: Any, vgg: Any, *, _root_: DictConfig) -> Any:
    """Return `perceptron` if the network of the run is a perceptron, otherwise `vgg`.

    A preset is a YAML file of settings. In it, ${by_backbone:A,B} calls this function with the values A and B.

    Args:
        perceptron: value of a setting for runs with multilayer perceptrons.
        vgg: value of the same setting for runs with the reduced VGG19 or another network for images.
        _root_: all settings of the run. OmegaConf, the library that reads the preset, passes this argument.
    """
    # Only presets for datasets of the paper call this function. If another dataset has no default network, the settings
    # raise an error later.
    entry = entry_of(_root_.dataset)
    return perceptron if (_root_.backbone or (entry and entry.backbone)) == "mlp" else vgg


OmegaConf.register_new_resolver("by_backbone", by_backbone)
store_settings(VisionSettings)


@hydra.main(version_base="1.1", config_path=str(CONFIGS), config_name="alma_vision")
def hydra_main(config: DictConfig) -> float:
    """Train with the settings given on the command line, or with one combination of settings of a sweep.

    Hydra, the library that reads the command line, calls this function once for each combination.

    Return the prequential error rate, averaged over the seeds (see `run_and_show`). Return infinity if a job of a sweep
    failed.
    """
    return run_job("alma-vision", config, lambda values, given: run_and_show(settings_of(values, given)))


def main() -> None:
    """Entry point of the command alma-vision."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper())
    if "PYTHONWARNINGS" not in os.environ:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra|torch")
    if len(sys.argv) == 1:
        with print_errors("alma-vision"):
            try:
                quickstart()
            except KeyboardInterrupt:
                sys.exit("alma-vision: stopped; run the same command again to continue")
        return
    assert __doc__ is not None
    Command("alma-vision", __doc__, VisionSettings, CONFIGS, hydra_main, example_out="runs/mnist/sm").main()


if __name__ == "__main__":
    main()
