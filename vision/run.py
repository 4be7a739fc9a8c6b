"""alma-vision: a vision learner over a stream of mega-batches, from settings to ledger.

alma-vision                                                        a first result: SM and Ens on digits
alma-vision dataset=mnist learner=gmoe wait=10 width=32 seeds=3 out=RUN
alma-vision -m dataset=mnist learner=sm wait=1,10,50 width=4,32 out=SWEEP
alma-vision status RUN
"""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.app import command
from fairseq_alma.app.command import errors_told, run_job, setting_values
from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tables import ledger_table, wide_console
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import LedgerRow, mean_and_standard_error
from fairseq_alma.core.protocol import run_stream
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.stack_record import StackRecord
from vision.backbones import backbone_for
from vision.batches import Memory
from vision.datasets import Dataset, load_dataset
from vision.display import RunDisplay
from vision.evaluator import ErrorRateEvaluator
from vision.learners import LEARNERS, Firefly, GrowingMixture
from vision.process import keep_freed_memory
from vision.settings import CONVOLUTIONAL, DEFAULTS, FREE_SETTINGS, VisionSettings
from vision.stream import partition, stacked_stream

CONFIGS = Path(__file__).parent / "configs"
logger = logging.getLogger(__name__)


def run(settings: VisionSettings, dataset: Dataset | None = None) -> list[list[LedgerRow]]:
    """Run all seeds, or what is left of them. Returns the ledger of each.

    Args:
        settings: of the run.
        dataset: where it is at hand; read by its name otherwise.

    Raises:
        AlmaError: bad settings, missing data, a run folder of other settings.
    """
    if settings.seeds > 1 and not LEARNERS[settings.learner].stacks_seeds:
        dataset = dataset or load_dataset(settings.dataset, settings.data_root, settings.split)
        alone = [settings.of_one_seed(number) for number in range(settings.seeds)]
        with Lease(Path(settings.out)):
            _refuse_other_seeds(Path(settings.out), [Path(one.out) for one in alone])
            return [run(one, dataset)[0] for one in alone]
    device = _device(settings.device)
    # A stage that is repeated must come out the same, and float32 is not TF32.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    dataset = dataset or load_dataset(settings.dataset, settings.data_root, settings.split)
    seeds = range(settings.seeds)
    streams = [
        partition(
            dataset.training,
            settings.num_mega_batches,
            settings.validation_share,
            settings.seed_of("data") + number,
        )[: settings.num_arrivals]
        for number in seeds
    ]
    out = Path(settings.out)
    folders = [out] if settings.seeds == 1 else [out / f"seed_{settings.seed + number}" for number in seeds]
    backbone, inputs = backbone_for(dataset, settings)
    num_stages = -(-settings.num_arrivals // settings.wait)
    if issubclass(LEARNERS[settings.learner], GrowingMixture | Firefly) and num_stages <= settings.grow_every:
        logger.warning(
            "nothing ever grows: %d stage(s), and grow_every=%d: give a smaller one", num_stages, settings.grow_every
        )
    scalars = [RunScalars(folder, settings.tensorboard, settings.cer_from) for folder in folders]
    with ExitStack() as stack:
        for one in scalars:
            stack.enter_context(closing(one))
        stack.enter_context(Lease(out))
        display = stack.enter_context(_display(settings, scalars))
        stack.enter_context(_full_memory_told(settings, device))
        _refuse_other_seeds(out, folders)
        records = [
            RunRecord(
                folder,
                {**settings.to_json(), "seed": settings.seed + number, "stacked_from": settings.seed},
                [arrival.digest for arrival in streams[number]],
                FREE_SETTINGS,
                DEFAULTS,
                stages=out / "stages",
                durable=False,
                cer_from=settings.cer_from,
                on_rows=scalars[number].rows,
            )
            for number, folder in enumerate(folders)
        ]
        memory = Memory(inputs, dataset.num_classes, settings.seeds, device)
        learner = LEARNERS[settings.learner](settings, backbone, memory, device, display)
        stages = [folder / "stages" for folder in folders]
        evaluate = ErrorRateEvaluator(dataset, inputs, device, stages, num_stages, settings.routing_examples)
        return run_stream(stacked_stream(streams), learner, evaluate, settings.stream_settings(), StackRecord(records))


def run_and_show(settings: VisionSettings) -> float:
    """Run; print tables; write RUN/summary.json over seeds. Returns the final validation error rate, their mean."""
    console, out = wide_console(), Path(settings.out)
    ledgers = run(settings)
    title = f"{settings.out}: learner={settings.learner} wait={settings.wait}"
    if settings.seeds == 1:
        console.print(ledger_table(ledgers[0], title, at_most=20))
        summary = read_json(out / "summary.json")
        console.print(f"CER {summary['cer']:.3f}, final error rate {summary['final']:.2%}, {summary['comp']:.3g} FLOPs")
    else:
        folders = [out / f"seed_{settings.seed + number}" for number in range(settings.seeds)]
        whole = mean_and_standard_error([read_json(folder / "summary.json") for folder in folders])
        write_json(out / "summary.json", whole)
        summary, stderr = whole["mean"], whole["stderr"]
        console.print(
            f"{title}: {settings.seeds} seeds, CER {summary['cer']:.3f} +- {stderr['cer']:.3f}, final error rate "
            f"{summary['final']:.2%} +- {stderr['final']:.2%}, {summary['comp']:.3g} FLOPs each"
        )
    console.print(f"ledger {out}{'' if settings.seeds == 1 else '/seed_*'}/ledger.jsonl, summary {out}/summary.json")
    return summary["final_validation"]


def quickstart() -> None:
    """What `alma-vision` does without arguments: SM and Ens on digits, tables and a report."""
    from fairseq_alma.report.cli import make

    out = Path("runs/quickstart")
    for folder in (out / "sm", out / "ens"):
        settings = VisionSettings(out=str(folder), learner=folder.name, preset="quickstart")
        print(f"\n$ alma-vision preset=quickstart learner={settings.learner} out={folder}", flush=True)
        run_and_show(settings)
    print(f"\n$ alma-report {out} --out {out / 'report'}", flush=True)
    make([str(out)], out / "report")


@contextmanager
def _full_memory_told(settings: VisionSettings, device: torch.device) -> Iterator[None]:
    """Raises RunError: memory is full."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has a kind of error for a GPU's memory, and a sentence for the machine's.
        is_full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        raise RunError(
            f"the memory of {device} is full ({str(error).splitlines()[0][:200]}).\n"
            f"Stages that are finished are kept: the same command continues where there is more of it. In another out= "
            f"a smaller width={settings.width}, batch_size={settings.batch_size}, seeds={settings.seeds}, or fewer "
            f"members take less."
        ) from error


def _refuse_other_seeds(out: Path, folders: Sequence[Path]) -> None:
    """All seeds of a run share its stages: what they hold would be taken for the stages of other seeds."""
    held = [path.parent for path in [out / "settings.json", *sorted(out.glob("seed_*/settings.json"))] if path.exists()]
    if others := [folder for folder in held if folder not in folders]:
        raise RunError(
            f"{out} holds a run of other seeds ({', '.join(str(folder) for folder in others)}).\n"
            f"Give the same seed= and seeds= to continue it, or another out= for a new run."
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # which a device that only knows shapes cannot tell
    except Exception as error:  # torch has a kind of error for each way of not having a device
        raise SettingError(f"device={name!r} cannot be used here ({error}): give auto, cpu or cuda") from error
    return device


def _display(settings: VisionSettings, scalars: Sequence[RunScalars]) -> RunDisplay:
    title = f"{settings.learner} wait {settings.wait} width {settings.width}"
    return RunDisplay(title, settings.num_arrivals, settings.wait, settings.epochs, scalars=scalars)


def settings_of(values: dict[str, Any]) -> VisionSettings:
    """From resolved configuration values, after the import of a plugin that they may name.

    Raises:
        SettingError: no such module; a key that is no setting; a value out of range.
    """
    values = dict(values)
    if plugin := values.pop("plugin", None):
        sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(plugin)
        except ModuleNotFoundError as error:
            raise SettingError(f"plugin={plugin}: {error}; it is looked for here and where packages are") from error
        finally:
            sys.path.pop(0)
    return VisionSettings.from_mapping(values)


def of_backbone(perceptron: Any, vgg: Any, *, _root_: DictConfig) -> Any:
    """In a preset: what is so for perceptrons and otherwise for the VGG."""
    return vgg if _root_.dataset in CONVOLUTIONAL else perceptron


OmegaConf.register_new_resolver("of_backbone", of_backbone)


@hydra.main(version_base="1.1", config_path=str(CONFIGS), config_name="alma_vision")
def hydra_main(config: DictConfig) -> float:
    """One job of Hydra: a run, or one of a sweep."""
    return run_job("alma-vision", setting_values(config), lambda values: run_and_show(settings_of(values)))


def main() -> None:
    """The command alma-vision."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper())
    if "PYTHONWARNINGS" not in os.environ:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra|torch")
    if len(sys.argv) == 1:
        with errors_told("alma-vision"):
            try:
                quickstart()
            except KeyboardInterrupt:
                sys.exit("alma-vision: stopped; the same command continues")
        return
    command.main("alma-vision", __doc__, hydra_main, example="runs/mnist/sm")


if __name__ == "__main__":
    main()
