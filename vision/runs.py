"""Train and evaluate a learner on a stream of mega-batches, and write the run folder.

`vision.cli` is the command, and `vision.run` is the same for Python programs.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.app.plugins import call_own_function, load_function, load_plugin, plugin_digest, source_digest
from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tables import seed_text
from fairseq_alma.app.tracking import Tracker
from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.core.datasets import entry_of
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.printing import say
from fairseq_alma.core.protocol import run_stream
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.seed_record import SeedRecord
from vision.backbones import backbone_for
from vision.batches import Memory
from vision.dataset_names import kind_of
from vision.datasets import Dataset, check_dataset, load_dataset
from vision.datasets.folders import PART_NAMES
from vision.display import RunDisplay
from vision.evaluator import ErrorRateEvaluator
from vision.held_out import HeldOutEvaluator
from vision.image_format import ImageFormat
from vision.inputs import Inputs, Transformed
from vision.learners import LEARNERS
from vision.networks.architectures import find_architecture, is_ours
from vision.settings import VALIDATION_SHARE, VisionSettings
from vision.stream import Arrival, digest_of, line_of, partition, stacked_stream, what_was_read

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
    if settings.cuda_graphs is True and device.type != "cuda":
        raise SettingError(f"cuda_graphs=true needs a CUDA device, but device={device}: give cuda_graphs=false")
    if dataset is None:
        dataset = load_dataset(settings.dataset, settings.data_root, settings.image_size, settings.order)
    else:
        _check_given(dataset, settings)
    if settings.seeds > 1 and not LEARNERS[settings.learner].stacks_seeds:
        with Lease(Path(settings.out)):
            _refuse_other_seeds(settings)
            return [_run_stack(settings.of_one_seed(i), dataset, device)[0] for i in range(settings.seeds)]
    return _run_stack(settings, dataset, device)


def _check_given(dataset: Dataset, settings: VisionSettings) -> None:
    """Check a dataset that was given to `run`."""
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


def _run_stack(settings: VisionSettings, dataset: Dataset, device: torch.device) -> list[list[LedgerRow]]:
    """Train the networks of all seeds together, and return the ledger of each seed."""
    streams = _streams(settings, dataset)
    backbone, inputs = backbone_for(dataset, settings)
    if settings.transform:
        transform = call_own_function("transform", load_function("transform", settings.transform), dataset.image_shape)
        inputs = Transformed(inputs, dataset.image_shape, transform)
    _warn_if_it_never_grows(settings)
    scalars = [
        RunScalars(
            folder,
            settings.cer_from,
            tracker=Tracker(folder, settings.wandb, {**settings.to_json(), "seed": seed}) if settings.wandb else None,
        )
        for seed, folder in enumerate(settings.seed_folders, settings.seed)
    ]
    with ExitStack() as stack:
        stack.enter_context(_process_settings(settings.precision == "tf32"))
        for writer in scalars:
            stack.enter_context(closing(writer))
        stack.enter_context(Lease(Path(settings.out)))
        display = stack.enter_context(_display(settings, scalars))
        stack.enter_context(_torch_errors_as_run_errors(settings, device))
        _refuse_other_seeds(settings)
        records = _open(settings, dataset, streams, scalars)
        memory = Memory(inputs, dataset.num_classes, settings.seeds, device)
        learner = LEARNERS[settings.learner](settings, backbone, memory, device, display)
        held_out = HeldOutEvaluator(streams, dataset.num_classes, inputs, device)
        evaluate = _evaluator(settings, dataset, inputs, device, held_out)
        stream, record = stacked_stream(streams), RunRecord(records, SAVE_SECONDS, learner.delete_old)
        return run_stream(stream, learner, evaluate, settings.stream_settings(), record, held_out.prequential)


def _streams(settings: VisionSettings, dataset: Dataset) -> list[list[Arrival]]:
    """Return, for each seed, the list of mega-batches that arrive."""
    seeds = range(settings.seed, settings.seed + settings.seeds)
    cuts = (partition(dataset, settings.num_mega_batches, VALIDATION_SHARE, seed, settings.order) for seed in seeds)
    return [arrivals[: settings.num_arrivals] for arrivals in cuts]


def _open(
    settings: VisionSettings, dataset: Dataset, streams: Sequence[Sequence[Arrival]], scalars: Sequence[RunScalars]
) -> list[SeedRecord]:
    """Create the run folder of each seed, or open it to continue its run, and return the records of the runs."""
    identity = identity_of(settings, dataset)
    records = [
        SeedRecord(
            folder,
            {**settings.to_json(), **identity, "seed": settings.seed + number, "stacked_from": settings.seed},
            [arrival.digest for arrival in streams[number]],
            settings_that_are("free", "vision"),
            shared=Path(settings.out),
            durable=False,
            cer_from=settings.cer_from,
            on_rows=scalars[number].rows,
        )
        for number, folder in enumerate(settings.seed_folders)
    ]
    read = what_was_read(dataset, streams[0], settings.order)
    say(line_of(read, dataset), sys.stderr)
    for record in records:
        ImageFormat.of(dataset, settings.image_size).write(record.folder, read)
    return records


def identity_of(settings: VisionSettings, dataset: Dataset) -> dict[str, Any]:
    """Return what identifies a run besides its settings and its mega-batches, for settings.json.

    These are digests of the user's code and of the test set, and the normalisation of the pixels.
    """
    pixels = [dataset.pixels.largest, dataset.pixels.mean, dataset.pixels.deviation]
    identity: dict[str, Any] = {
        "test_digest": digest_of(dataset.test),
        "pixels": [_rounded(value) for value in pixels],
    }
    if settings.plugin:
        identity["plugin_digest"] = plugin_digest(settings.plugin)
    # The functions and classes that settings name. Some of them may be ours.
    code: dict[str, Callable[..., Any]] = {"learner": LEARNERS[settings.learner]}
    entry = entry_of(settings.dataset)
    if kind_of(settings.dataset) == "function":
        code["dataset"] = load_function("dataset", settings.dataset)
    elif entry is not None and not isinstance(entry.load, str):
        code["dataset"] = entry.load
    if settings.transform:
        code["transform"] = load_function("transform", settings.transform)
    if settings.network != "mlp":
        code["backbone"] = find_architecture(settings.network).function
    for name, one in code.items():
        if not is_ours(one):
            identity[f"{name}_digest"] = source_digest(one, name, str(getattr(settings, name)))
    return identity


def _rounded(value: float | tuple[float, ...]) -> float | list[float]:
    """Return numbers with seven digits, as a JSON value."""
    return [float(f"{one:.7g}") for one in value] if isinstance(value, tuple) else float(f"{value:.7g}")


def _evaluator(
    settings: VisionSettings, dataset: Dataset, inputs: Inputs, device: torch.device, held_out: HeldOutEvaluator
) -> ErrorRateEvaluator:
    """Return the function that scores the learner on the test set."""
    planned = settings.stream_settings().arrivals_of_stages
    # With wait=auto, it is not known yet whether a stage will train on the last mega-batch.
    last_arrival = settings.num_arrivals if settings.wait == "auto" or not planned else planned[-1]
    folders = [RunFolder(folder) for folder in settings.seed_folders]
    return ErrorRateEvaluator(dataset, inputs, device, folders, last_arrival, held_out, settings.order != "random")


def _warn_if_it_never_grows(settings: VisionSettings) -> None:
    """Log a warning if a growing learner never grows, because there are too few stages."""
    num_stages = settings.stream_settings().num_stages
    assert settings.learner_settings is not None  # it is None only while the settings are being created
    grow_every = settings.learner_settings.stages_between_growths
    if settings.wait != "auto" and grow_every is not None and num_stages <= grow_every:
        logger.warning(
            "the learner never grows, because the run has %d stage(s) and grow_every=%d. Set grow_every= to a smaller "
            "number",
            num_stages,
            grow_every,
        )


@contextmanager
def _process_settings(tf32: bool) -> Iterator[None]:
    """Compute in one CPU thread, and make cuDNN convolutions reproducible, inside a `with` block.

    More threads do not make the training of small networks faster. cuDNN uses deterministic algorithms, because
    training a stage again must give the same result. The settings affect the complete process. If `tf32` is True, a GPU
    may compute float32 products with the reduced precision of its tensor cores.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    previous = torch.get_num_threads(), cudnn.deterministic
    value: bool | str = tf32
    owners, name = [matmul, cudnn], "allow_tf32"
    try:
        precisions = [getattr(owner, name) for owner in owners]
    except RuntimeError:
        # The program has used torch's newer switches. Then torch refuses the older ones.
        owners = [matmul, *(getattr(cudnn, kind) for kind in ("conv", "rnn"))]
        name, value = "fp32_precision", "tf32" if tf32 else "ieee"
        precisions = [getattr(owner, name) for owner in owners]
    torch.set_num_threads(1)
    cudnn.deterministic = True
    for owner in owners:
        setattr(owner, name, value)
    try:
        yield
    finally:
        torch.set_num_threads(previous[0])
        cudnn.deterministic = previous[1]
        for owner, precision in zip(owners, precisions, strict=True):
            setattr(owner, name, precision)


@contextmanager
def _torch_errors_as_run_errors(settings: VisionSettings, device: torch.device) -> Iterator[None]:
    """If memory is full, or a batch is too small for the network, raise a RunError that says what the user can do."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise RunError(
            f"the network normalises each batch, but a batch has one image ({error}): give batch_size= of at least 2, "
            f"and each mega-batch at least three images, one of which validates. Set out= to a new folder, or "
            f"join mega-batches with wait="
        ) from error
    except (MemoryError, RuntimeError) as error:
        # For full main memory, torch raises a RuntimeError that can only be recognised by its message.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise RunError(
            f"the memory of {device} is full ({str(error).splitlines()[0][:200]}).\n"
            f"To continue from the last save, run the same command on a machine with more memory. Or start a "
            f"new run that needs less memory: set out= to a new folder, and use fewer members or a smaller value of "
            f"width= (now {settings.width}), batch_size= (now {settings.batch_size}) or seeds= (now {settings.seeds})."
        ) from error


def _refuse_other_seeds(settings: VisionSettings) -> None:
    """Raise RunError if the folder given by `out=` contains run folders of seeds that the user does not ask for now.

    Raise SettingError if it is in the folder of images, where its folders would count as classes.
    """
    out = RunFolder(Path(settings.out))
    images = Path(settings.dataset).expanduser()
    parts = [images / name for name in PART_NAMES] if (images / "train").is_dir() else [images]
    is_inside = any(Path(settings.out).resolve().is_relative_to(part.resolve()) for part in parts)
    if kind_of(settings.dataset) == "folder" and is_inside:
        raise SettingError(f"out={settings.out} is in the folder of images {images}: choose another out=")
    out.refuse_runs_in(run for run in (out, *out.of_seeds()) if run.path not in settings.seed_folders)
    for folder in settings.seed_folders:
        RunFolder(folder).refuse_nested()


def _device(name: str) -> torch.device:
    """Return the torch device with this name. The name "auto" means the GPU if there is one, otherwise the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # reading fails on a device that stores no data, such as meta
    except Exception as error:  # torch raises many kinds of errors for a missing device
        raise SettingError(
            f"device={name!r} cannot be used on this machine ({error}): give device=auto, cpu or cuda"
        ) from error
    return device


def _display(settings: VisionSettings, scalars: Sequence[RunScalars]) -> RunDisplay:
    last = settings.seed + settings.seeds - 1
    seeds = f"seeds {settings.seed} to {last}  " if settings.seeds > 1 else seed_text(Path(settings.out))
    title = f"{seeds}{settings.learner} wait {settings.wait} width {settings.width}"
    epochs = [settings.epochs_at(t) for t in settings.stream_settings().arrivals_of_stages]
    return RunDisplay(title, settings.num_arrivals, epochs, settings.wait != "auto", scalars=scalars)
