"""The catalogue of image datasets. It lists the defaults of each dataset that has a name.

Settings, `--help` and reports read the catalogue, so this module imports neither torch nor numpy. The functions that
load the datasets are in `vision.datasets`. A plugin adds its datasets with `vision.datasets.register_dataset`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq_alma.core.errors import SettingError


@dataclass(frozen=True)
class DatasetEntry:
    """Catalogue entry of a dataset: its name, the function that loads it, and the defaults of its runs."""

    name: str
    """Name of the dataset, as given in `dataset=`."""
    load: str | Callable[..., Any]
    """The function that loads the dataset, load(data_root) -> vision.datasets.Dataset. For the datasets of this
    project, it is a text MODULE:FUNCTION, so that the catalogue can be read without importing torch."""
    mega_batches: int | None = None
    """Default number of mega-batches, B. None: the user must give `mega_batches=`."""
    backbone: str | None = None
    """Default network, a value of the setting `backbone`. None: the user must give `backbone=`."""


_ENTRIES: dict[str, DatasetEntry] = {}


def add_dataset(entry: DatasetEntry) -> None:
    """Add a dataset to the catalogue.

    Raise SettingError if the name belongs to a dataset of another module, or if the number of mega-batches is invalid.
    """
    known = _ENTRIES.get(entry.name)
    # A module that is imported again registers its datasets again, with new function objects.
    if known and _module_of(known) != _module_of(entry):
        raise SettingError(f"the name {entry.name!r} belongs to another dataset: choose a different name")
    if entry.mega_batches is not None and (type(entry.mega_batches) is not int or entry.mega_batches < 1):
        raise SettingError(f"dataset {entry.name!r}: mega_batches={entry.mega_batches!r} must be an integer above 0")
    _ENTRIES[entry.name] = entry


def _module_of(entry: DatasetEntry) -> str:
    """Return the name of the module that contains the function that loads a dataset."""
    return entry.load.partition(":")[0] if isinstance(entry.load, str) else entry.load.__module__


def entry_of(dataset: str) -> DatasetEntry | None:
    """Return the catalogue entry of a dataset; None if the catalogue does not contain it, for example for a folder."""
    return _ENTRIES.get(dataset)


def dataset_names() -> list[str]:
    """Return the names of all datasets in the catalogue. The datasets of plugins come last."""
    return list(_ENTRIES)


for _entry in (
    DatasetEntry("digits", "vision.datasets.known:digits", 20, "mlp"),
    DatasetEntry("mnist", "vision.datasets.known:mnist", 500, "mlp"),
    *(
        DatasetEntry(name, f"vision.datasets.known:{name}", 500, "mlp")
        for name in ("emnist", "emnist_letters", "emnist_digits", "emnist_mnist", "emnist_byclass", "emnist_bymerge")
    ),
    DatasetEntry("cifar10", "vision.datasets.cifar:cifar10", 100, "vgg"),
    DatasetEntry("cifar100", "vision.datasets.cifar:cifar100", 100, "vgg"),
):
    add_dataset(_entry)
