"""Run the protocol from Python, for example in a notebook: `vision.run` and the object that it returns."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from fairseq_alma.app.finished_run import FinishedRun, chosen_settings
from fairseq_alma.app.plugins import function_name
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.metrics import write_mean
from vision.dataset_names import GIVEN, kind_of
from vision.datasets import Dataset
from vision.predictor import Predictor, load
from vision.presets import settings_from
from vision.runs import run_learner
from vision.settings import VisionSettings


class Run(FinishedRun):
    """A finished run, or the runs of several seeds."""

    settings: VisionSettings

    @cached_property
    def predictor(self) -> Predictor:
        """The trained networks of the first seed: `run.predictor(images)` returns probabilities.

        For the networks of another seed, call `vision.load` with one of the `folders`.
        """
        return load(self.folders[0], backbone=self.settings.backbone)


def run(
    settings: VisionSettings | None = None,
    /,
    *,
    dataset: str | PathLike | Dataset | Callable[..., Dataset] | None = None,
    backbone: str | Callable[..., Any] | None = None,
    **values: Any,
) -> Run:
    """Train and evaluate a learner on a stream of mega-batches, as the command `alma-vision` does.

    The settings have the same names as on the command line: `run(out="runs/sm", dataset="mnist", wait=10)`. If the
    folder `out` contains an interrupted run with the same settings, the run is continued. If it contains a finished
    run, its results are returned at once.

    The settings of the process, such as the number of threads, are restored at the end.

    Args:
        settings: all settings, as an object. Then give no setting by name. Exception: `dataset` may be a `Dataset`
            whose name is `settings.dataset`, without or with the prefix "given:".
        dataset: as on the command line, or a `Dataset`, or a function that returns one. A function must be defined at
            the top level of a module, a script or a notebook. Its source code is part of the identity of the run.
        backbone: as on the command line, or a function or class that returns a torch.nn.Module, defined as above. Its
            arguments can be image_shape, num_classes and width. It is called with those in its signature.
        **values: the other settings (see `alma-vision --help`).

    Raises:
        AlmaError: if the settings are invalid, if data are missing or invalid, or if `out` contains a run with other
            settings.
    """
    given = None
    if isinstance(dataset, Dataset):
        given = _named(dataset)
        dataset = given.name if settings is None else None
    elif callable(dataset):
        dataset = function_name("dataset", dataset)
    elif not isinstance(dataset, str | PathLike | None):
        raise SettingError(
            f"dataset= is of type {type(dataset).__name__}, but must be a text, a Dataset or a function. For arrays, "
            f"give vision.dataset_from_arrays(NAME, images, labels)"
        )
    if backbone is not None and not isinstance(backbone, str):
        backbone = function_name("backbone", backbone)
    named = {name: value for name, value in (("dataset", dataset), ("backbone", backbone)) if value is not None}
    settings = chosen_settings(settings, {**values, **named}, settings_from)
    folder = Path(settings.out).absolute()
    ledgers = run_learner(settings, given)
    result = Run(settings, folder, ledgers)
    if len(ledgers) > 1:
        write_mean(result.folder, result.folders)
    return result


def _named(dataset: Dataset) -> Dataset:
    """Return the dataset with a name that is valid for the setting `dataset`."""
    try:
        kind_of(dataset.name)
    except SettingError:
        return replace(dataset, name=f"{GIVEN}{dataset.name}")
    return dataset
