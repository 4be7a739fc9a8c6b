"""Train and evaluate a learner on a stream of mega-batches, and write the run folder.

`vision.cli` is the command, and `vision.run` is the same for Python programs.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from fairseq_alma.app.plugins import call_own_function, load_function, load_plugin
from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tables import seed_text
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.printing import say
from fairseq_alma.core.protocol import run_stream
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.seed_record import SeedRecord
from vision.backbones import backbone_for
from vision.batches import Memory
from vision.datasets import Dataset, check_dataset, load_dataset
from vision.display import RunDisplay
from vision.evaluator import ErrorRateEvaluator
from vision.held_out import HeldOutEvaluator
from vision.identity import identity_of
from vision.image_format import ImageFormat
from vision.inputs import Transformed
from vision.learners import LEARNERS
from vision.process import process_settings
from vision.settings import VisionSettings
from vision.stream import Arrival, line_of, partition, stacked_stream, what_was_read

logger = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
"""Minimum time between two saves of the networks, in seconds (see `RunRecord`). A stage may take only milliseconds."""


def run_learner(settings: VisionSettings, dataset: Dataset | None = None) -> list[list[LedgerRow]]:
    """Train and evaluate the learner for each seed of the settings, and return the ledger of each seed.

    If `settings.out` contains an interrupted run with the same settings, continue that run from its last save. A save
    is at most about a second older than the last finished step.

    Args:
        settings: settings of the runs. There is one run per seed.
        dataset: the data. Its name must be `settings.dataset`. By default, the dataset named in the settings is loaded.

    Raises:
        AlmaError: if the settings are invalid, if data are missing or invalid, or if `settings.out` contains a run
            with other settings.
    """
    if settings.plugin:
        load_plugin(settings.plugin)
    device = _device(settings.device)
    if settings.cuda_graphs and device.type != "cuda":
        raise SettingError(f"cuda_graphs=true needs a CUDA device, but device={device}: give cuda_graphs=false")
    dataset = _given(dataset, settings) if dataset is not None else _loaded(settings)
    if settings.seeding.seeds > 1 and not LEARNERS[settings.learner].stacks_seeds:
        seeds = [settings.of_one_seed(number) for number in range(settings.seeding.seeds)]
        with Lease(Path(settings.out)):
            _refuse_other_seeds(Path(settings.out), [Path(one.out) for one in seeds])
            return [_run_stack(one, dataset, device)[0] for one in seeds]
    return _run_stack(settings, dataset, device)


def _loaded(settings: VisionSettings) -> Dataset:
    """Load the dataset that the settings name."""
    return load_dataset(settings.dataset, settings.data_root, settings.split, settings.image_size, settings.order)


def _given(dataset: Dataset, settings: VisionSettings) -> Dataset:
    """Check a dataset that was given to `run`, and return it.

    Raises:
        SettingError: if its name is not the one in the settings, which the run folder records, or if it is invalid.
    """
    check_dataset(dataset, f"dataset={settings.dataset}")
    if dataset.name != settings.dataset:
        raise SettingError(
            f"the dataset has the name {dataset.name!r}, but the settings have dataset={settings.dataset!r}: give both "
            f"the same name, because the run folder records it"
        )
    if settings.image_size is not None and set(dataset.image_shape[1:]) != {settings.image_size}:
        raise SettingError(
            f"image_size={settings.image_size} does not fit the Dataset that was given, whose images have the shape "
            f"(channels, height, width) = {dataset.image_shape}: leave image_size= out, or resize the images, for "
            f"example by vision.load_dataset(..., image_size={settings.image_size})"
        )
    return dataset


def _run_stack(settings: VisionSettings, dataset: Dataset, device: torch.device) -> list[list[LedgerRow]]:
    """Train the networks of all seeds together, and return the ledger of each seed."""
    first_seed, num_seeds = settings.seeding.seed, settings.seeding.seeds
    out = Path(settings.out)
    folders = [out] if num_seeds == 1 else [out / f"seed_{first_seed + number}" for number in range(num_seeds)]
    streams = _streams(settings, dataset)
    backbone, inputs = backbone_for(dataset, settings)
    if settings.transform:
        transform = call_own_function("transform", load_function("transform", settings.transform), dataset.image_shape)
        inputs = Transformed(inputs, dataset.image_shape, transform)
    planned = settings.stream_settings().arrivals_of_stages
    _warn_if_it_never_grows(settings, len(planned))
    scalars = [RunScalars(folder, settings.tensorboard, settings.cer_from) for folder in folders]
    with ExitStack() as stack:
        stack.enter_context(process_settings(settings.threads, settings.precision == "tf32"))
        for writer in scalars:
            stack.enter_context(closing(writer))
        stack.enter_context(Lease(out))
        display = stack.enter_context(_display(settings, scalars))
        stack.enter_context(_full_memory_as_run_error(settings, device))
        _refuse_other_seeds(out, folders)
        identity = identity_of(settings, dataset)
        records = [
            SeedRecord(
                folder,
                {**settings.to_json(), **identity, "seed": first_seed + number, "stacked_from": first_seed},
                [arrival.digest for arrival in streams[number]],
                settings.not_identity(settings.learner),
                # Runs of earlier versions lack some keys of the identity.
                {**settings.defaults_for(settings.learner), **identity},
                stages=out / "stages",
                durable=False,
                cer_from=settings.cer_from,
                on_rows=scalars[number].rows,
            )
            for number, folder in enumerate(folders)
        ]
        image_format = ImageFormat.of(dataset, settings.image_size)
        read = what_was_read(dataset, streams[0], settings.order)
        say(line_of(read, dataset), sys.stderr)
        for folder in folders:
            image_format.write(folder, read)
        first = settings.seeding.first("data")
        memory = Memory(inputs, dataset.num_classes, num_seeds, device, reservoir_seeds=range(first, first + num_seeds))
        learner = LEARNERS[settings.learner](settings, backbone, memory, device, display)
        stages = [folder / "stages" for folder in folders]
        held_out = HeldOutEvaluator(streams, dataset.num_classes, inputs, device)
        # With wait=auto, it is not known yet whether a stage will train on the last mega-batch.
        last_arrival = settings.num_arrivals if settings.wait == "auto" or not planned else planned[-1]
        files = (stages, last_arrival, settings.routing_examples)
        evaluate = ErrorRateEvaluator(dataset, inputs, device, *files, held_out, settings.has_error_matrix)
        stream, record = stacked_stream(streams), RunRecord(records, SAVE_SECONDS, learner.delete_old)
        return run_stream(stream, learner, evaluate, settings.stream_settings(), record, held_out.prequential)


def _streams(settings: VisionSettings, dataset: Dataset) -> list[list[Arrival]]:
    """Return, for each seed, the list of mega-batches that arrive."""
    first = settings.seeding.first("data")
    cut = (settings.num_mega_batches, settings.validation_share)
    return [
        partition(dataset, *cut, first + number, settings.order, settings.drift_overlap)[: settings.num_arrivals]
        for number in range(settings.seeding.seeds)
    ]


def _warn_if_it_never_grows(settings: VisionSettings, num_stages: int) -> None:
    """Log a warning if a growing learner never grows, because there are too few stages."""
    # `own` may be None only while a VisionSettings object is being created. This assert tells the type checker so.
    assert settings.own is not None
    grow_every = settings.own.stages_between_growths
    is_known = settings.wait != "auto"
    if is_known and grow_every is not None and num_stages <= grow_every:
        logger.warning(
            "the learner never grows, because the run has %d stage(s) and grow_every=%d. Set grow_every= to a smaller "
            "number",
            num_stages,
            grow_every,
        )


@contextmanager
def _full_memory_as_run_error(settings: VisionSettings, device: torch.device) -> Iterator[None]:
    """If the `with` block raises an out-of-memory error, raise a RunError that says what the user can do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has an error class for full GPU memory. For full main memory, torch raises a RuntimeError that can only
        # be recognised by its message.
        is_full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        raise RunError(
            f"the memory of {device} is full ({str(error).splitlines()[0][:200]}).\n"
            f"To continue from the last save, run the same command on a machine with more memory. Or start a "
            f"new run that needs less memory: set out= to a new folder, and use fewer members or a smaller value of "
            f"width= (now {settings.width}), batch_size= (now {settings.recipe.batch_size}) or seeds= (now "
            f"{settings.seeding.seeds})."
        ) from error


def _refuse_other_seeds(out: Path, folders: Sequence[Path]) -> None:
    """Raise RunError if `out` contains run folders of seeds that the user does not ask for now.

    The networks of seeds that are trained together are stored in the same files. So the seeds of a run cannot be
    changed later.

    Args:
        out: the folder given by `out=`.
        folders: the run folders of the seeds that the user asks for now.
    """
    settings_files = [out / "settings.json", *sorted(out.glob("seed_*/settings.json"))]
    if others := [path.parent for path in settings_files if path.exists() and path.parent not in folders]:
        raise RunError(
            f"{out} contains a run of other seeds ({', '.join(str(folder) for folder in others)}).\n"
            f"To continue that run, set seed= and seeds= to the values with which it was started. For a new run, set "
            f"out= to a different folder."
        )


def _device(name: str) -> torch.device:
    """Return the torch device with this name. The name "auto" means the GPU if there is one, otherwise the CPU.

    Raises:
        SettingError: if the device cannot be used on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Check that torch can compute on the device: create a tensor there and read its number. Reading fails on a
        # device that stores no data, such as meta.
        torch.ones(1, device=device).item()
    # Catch all exceptions, because torch raises many kinds of errors for a missing device.
    except Exception as error:
        raise SettingError(
            f"device={name!r} cannot be used on this machine ({error}): give device=auto, cpu or cuda"
        ) from error
    return device


def _display(settings: VisionSettings, scalars: Sequence[RunScalars]) -> RunDisplay:
    first, num_seeds = settings.seeding.seed, settings.seeding.seeds
    seeds = f"seeds {first} to {first + num_seeds - 1}  " if num_seeds > 1 else seed_text(Path(settings.out))
    title = f"{seeds}{settings.learner} wait {settings.wait} width {settings.width}"
    epochs = [settings.recipe.epochs_at(t) for t in settings.stream_settings().arrivals_of_stages]
    return RunDisplay(title, settings.num_arrivals, epochs, settings.wait != "auto", scalars=scalars)
