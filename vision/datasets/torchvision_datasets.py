"""The datasets of torchvision, by the name of their class."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torchvision

from fairseq_alma.core.errors import SettingError
from vision.datasets.arrays import dataset_from_arrays
from vision.datasets.examples import Dataset, ImageFiles
from vision.datasets.library_images import arrays_of, names_of

SPLITS = (("train", "trainval"), ("test", "val", "valid"))
"""Names of the split with the training images and of the split with the test images, the preferred name first."""


def read_torchvision(name: str, data_root: Path, image_size: int | None) -> Dataset:
    """Return a dataset of torchvision. Missing files are downloaded, if torchvision can do so.

    All images must fit into memory.

    Args:
        name: name of the class in torchvision.datasets, for example "FashionMNIST".
        data_root: the data folder.
        image_size: height and width to which images are resized; None if all have one size.

    Raises:
        SettingError: if torchvision has no such class, if the class has neither of the arguments `train` and `split`,
            if it cannot be created or downloaded, or if its examples are not images with one class each.
    """
    where = f"dataset={name}"
    kind = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(kind):
        raise SettingError(f"{where}: torchvision.datasets has no class {name}, and there is no folder {name}")
    parts = [_created(kind, data_root, number, where) for number in (0, 1)]
    arrays = [arrays_of(part, len(part), image_size, where) for part in parts]
    class_names = names_of(getattr(parts[0], "classes", None), arrays[0][1])
    dataset = dataset_from_arrays(name, *arrays[0], *arrays[1], class_names=class_names, channels="last", where=where)
    return replace(dataset, files=ImageFiles())


def _created(kind: type, data_root: Path, part: int, where: str) -> Any:
    """Return an instance of a class of torchvision: the training set (part 0) or the test set (part 1)."""
    known = inspect.signature(kind).parameters
    if "train" in known:
        choices: list[dict[str, Any]] = [{"train": part == 0}]
    elif "split" in known:
        choices = [{"split": split} for split in SPLITS[part]]
    else:
        raise SettingError(
            f"{where}: the class in torchvision has neither train= nor split=, so its test set is unknown: write a "
            f"function that returns a Dataset, and give dataset=MODULE:FUNCTION"
        )
    download = {"download": True} if "download" in known else {}
    errors = []
    for choice in choices:
        try:
            return kind(data_root, **choice, **download)
        except Exception as error:
            # Catch every error, because torchvision raises different kinds of errors if there is no internet
            # connection, if an archive is damaged, if the split does not exist, or if an argument is missing.
            errors.append(error)
    raise SettingError(
        f"{where}: torchvision could not read it from {data_root} or download it ({type(errors[0]).__name__}: "
        f"{errors[0]}). Set data_root= to the folder that contains its files, or run the command once on a machine "
        f"with an internet connection"
    ) from errors[0]
