"""Load the dataset that the setting `dataset` names, and register datasets of the user's own."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fairseq_alma.app.plugins import call_own_function, load_function
from fairseq_alma.core.datasets import DatasetEntry, add_dataset, entry_of
from fairseq_alma.core.errors import SettingError
from vision.dataset_names import kind_of
from vision.datasets.arrays import read_npz
from vision.datasets.checks import check_all_classes_are_trained, check_dataset
from vision.datasets.examples import Dataset, resized_dataset
from vision.datasets.folders import read_folder
from vision.datasets.libraries import read_hugging_face, read_torchvision

Load = TypeVar("Load", bound=Callable[..., Dataset])


def register_dataset(
    name: str, *, mega_batches: int | None = None, backbone: str | None = None
) -> Callable[[Load], Load]:
    """Return a decorator that makes a dataset available as `dataset=NAME`.

    The decorated function is load(data_root: Path) -> Dataset. It may use `dataset_from_arrays`.

    Args:
        mega_batches: default number of mega-batches. If None, the user must give `mega_batches=`.
        backbone: default network, a value of `backbone=`. If None, the user must give `backbone=`.

    Raises:
        SettingError: if the name belongs to another dataset, or if an argument is invalid.
    """

    def register(load: Load) -> Load:
        add_dataset(DatasetEntry(name, load, mega_batches, backbone))
        return load

    return register


def load_dataset(
    name: str,
    data_root: str | Path = "data",
    image_size: int | None = None,
    order: str = "random",
) -> Dataset:
    """Return a dataset. If the files of the dataset are missing, download them first, where this is possible.

    Args:
        name: a registered name, a folder of images, a .npz file, a class of torchvision, hf:NAME or MODULE:FUNCTION
            (see `kind_of`). A registered name comes first, even if there is a folder with this name.
        data_root: folder that contains the dataset's files. Missing files are downloaded to it.
        image_size: height and width to which images are resized; None to keep their size.
        order: the setting `order`. With order=folders, a folder of images contains one folder per mega-batch.

    Raises:
        SettingError: if the name is unknown, or if data are missing, damaged or invalid.
    """
    data_root = Path(data_root).expanduser()
    kind, path = kind_of(name), Path(name).expanduser()
    if kind == "given":
        raise SettingError(
            f"dataset={name} was given to vision.run as a Dataset object, and cannot be loaded by its name: call "
            f"vision.run with this object again"
        )
    if kind == "folder":
        return read_folder(path, name, data_root, image_size, order)
    if kind == "torchvision":
        return read_torchvision(name, data_root, image_size)
    if kind == "hugging face":
        return read_hugging_face(name, data_root, image_size)
    if kind == "npz":
        dataset = read_npz(path, name)
    else:
        entry = entry_of(name)
        load = entry.load if entry else name
        function = load_function("dataset", load) if isinstance(load, str) else load
        required = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
        dataset = call_own_function("dataset", function, *[data_root][: len(required)])
        if not isinstance(load, str) or kind == "function":  # it is the user's
            where = f"dataset={name}"
            check_all_classes_are_trained(check_dataset(dataset, where), where)
            dataset = replace(dataset, name=name)
    return resized_dataset(dataset, image_size) if image_size else dataset
