"""alma-lm: a language-model learner over a stream of mega-batches, from settings to ledger.

alma-lm stream=STREAM out=RUN learner=sm wait=1 experts=4 updates=1000 arch=switch_lm_tiny
alma-lm -m stream=STREAM out=SWEEP updates=1000 lr=0.001,0.002 dropout=0,0.1
alma-lm status RUN
"""

import errno
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.core.errors import AlmaError, RunError, StageError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Ledger, LedgerRow, mean_and_standard_error
from fairseq_alma.core.protocol import run_stream
from fairseq_alma.core.run_record import RunRecord, find_runs
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.display import ledger_table, wide_console
from fairseq_alma.settings import DEFAULTS, FREE_SETTINGS, LanguageModelSettings
from fairseq_alma.stage_processes import LocalProcesses

CONFIGS = Path(__file__).parent / "configs" / "alma_lm"

NO_SETTINGS = ("hydra", "table_updates")
"""Keys of the configuration that only other keys are made from."""


def run(settings: LanguageModelSettings) -> list[LedgerRow]:
    """Run one seed, or what is left of it. Returns its ledger.

    Raises:
        AlmaError: bad settings, a bad stream, a run folder of other settings, a failed stage.
    """
    # Here, because they import fairseq and torch: a bad setting should not wait for them.
    from fairseq_alma.evaluator import PerplexityEvaluator
    from fairseq_alma.learner import make_learner

    stream_folder = StreamFolder.open(settings.stream)
    stream = stream_folder.stream(settings.mega_batches)
    stream_settings = settings.stream_settings(len(stream))

    learner = make_learner(settings, stream_folder, LocalProcesses(len(stream), settings.parallel))
    evaluated_on = [stream_folder.digest(split) for split in ("valid", "test")]
    identity = {
        **settings.to_json(),
        "evaluated_on": evaluated_on,
        "dictionary": stream_folder.dictionary_digest,
    }
    with Lease(settings.out):
        record = RunRecord(settings.out, identity, stream.digests, FREE_SETTINGS, DEFAULTS)
        evaluator = PerplexityEvaluator(stream_folder, Path(settings.out) / "evaluated")
        return run_stream(stream, learner, evaluator, stream_settings, record)


def run_seeds(settings: LanguageModelSettings) -> float:
    """Run every seed; print ledgers; write RUN/summary.json over seeds. Returns the final validation perplexity."""
    console = wide_console()
    if settings.seeds == 1:
        rows = run(settings)
        console.print(ledger_table(rows, title=f"{settings.out}: learner={settings.learner} wait={settings.wait}"))
        console.print(f"ledger {settings.out}/ledger.jsonl, summary {settings.out}/summary.json")
        return rows[-1].scores.validation_perplexity
    out, summaries = Path(settings.out), []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        one = {**settings.to_json(), "seed": seed, "seeds": 1, "out": str(out / f"seed_{seed}")}
        run_seeds(LanguageModelSettings.from_mapping(one))
        summaries.append(read_json(out / f"seed_{seed}" / "summary.json"))
        write_json(out / "summary.json", mean_and_standard_error(summaries))
    return read_json(out / "summary.json")["mean"]["final_validation"]


def status(folder: Path) -> int:
    """Print where a run stands."""
    console = wide_console()
    runs = [folder] if (folder / "settings.json").exists() else find_runs(folder)
    if not runs:
        raise RunError(f"no run at {folder} (settings.json is missing)")
    for one in runs:
        settings = read_json(one / "settings.json")
        digests = read_json(one / "arrivals.json")["digests"]
        rows = Ledger(one / "ledger.jsonl").rows()
        console.print(ledger_table(rows, title=f"{one}: learner={settings['learner']} wait={settings['wait']}"))
        left = len(digests) - (len(rows) - 1)
        console.print("finished" if left <= 0 else f"{left} of {len(digests)} mega-batches are left: run it again")
    return 0


def setting_values(config: DictConfig) -> dict[str, Any]:
    """What a composed configuration says of the settings, every reference resolved."""
    resolved = OmegaConf.to_container(config, resolve=True)
    return {key: value for key, value in resolved.items() if key not in NO_SETTINGS}


@hydra.main(version_base="1.1", config_path=str(CONFIGS), config_name="alma_lm")
def hydra_main(config: DictConfig) -> float | None:
    """One job of Hydra: a run, or one of a sweep."""
    values = setting_values(config)
    try:
        # In a sweep each job has a folder of its own below out=.
        values["out"] = str(Path(HydraConfig.get().runtime.output_dir))
        return run_seeds(LanguageModelSettings.from_mapping(values))
    except AlmaError as error:
        print(f"alma-lm: {error}", file=sys.stderr)
        if isinstance(error, StageError) and HydraConfig.get().mode == RunMode.MULTIRUN:
            return float("inf")  # while tuning, a setting that diverges is a result: the sweep goes on
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"alma-lm: {error}: make room or give access, then run the same command: it continues", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """The command alma-lm."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper())
    if "PYTHONWARNINGS" not in os.environ:
        # fairseq and fairscale use what torch and Hydra have since deprecated: nothing a user can mend.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra|torch|fairseq")
    arguments = sys.argv[1:]
    if arguments[:1] == ["status"]:
        if len(arguments) != 2:
            sys.exit("alma-lm: usage: alma-lm status RUN")
        try:
            sys.exit(status(Path(arguments[1])))
        except AlmaError as error:
            sys.exit(f"alma-lm: {error}")
    # Hydra needs out= to place its job, and without it fails in a way that helps nobody.
    flags = {"--help", "-h", "--hydra-help", "--info", "-i", "--cfg", "-c", "--version"}
    if not flags & set(arguments) and not any(a.startswith(("out=", "hydra.sweep.dir=")) for a in arguments):
        print(f"alma-lm: out= is missing: the folder of the run, e.g. out=runs/sm_w1\n\n{__doc__}", file=sys.stderr)
        sys.exit(2)
    try:
        hydra_main()
    except KeyboardInterrupt:
        sys.exit("alma-lm: stopped; the same command continues")


if __name__ == "__main__":
    main()
