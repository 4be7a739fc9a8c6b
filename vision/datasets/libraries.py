"""The datasets of torchvision, and those of the Hugging Face hub if the library `datasets` is installed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fairseq_alma.core.errors import SettingError
from vision.datasets.arrays import dataset_from_arrays
from vision.datasets.decoding import as_shown, image_values
from vision.datasets.examples import Dataset, ImageFiles

TEST_SPLITS = ("test", "validation", "valid", "val")
"""Names of the split with the test images. The first that exists is used."""
WRITE_A_FUNCTION = "write a function that returns a Dataset, and give dataset=MODULE:FUNCTION"
"""What the user can do with data that cannot be read here, for error messages."""
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")


def read_hugging_face(name: str, data_root: Path, image_size: int | None) -> Dataset:
    """Return a dataset of the Hugging Face hub. Missing files are downloaded to data_root/hugging_face.

    The split `train` is the training set, and the split `test` (or `validation`) the test set. Without such a split, a
    fixed random fifth of the training images is the test set. Columns of numbers, texts and dates become
    `Dataset.columns`. All images must fit into memory.

    Args:
        name: hf:NAME, where NAME is the name of the dataset on the hub, or the path of a folder with its files.
        image_size: as for `arrays_of`.

    Raises:
        SettingError: if the library is missing, if the dataset cannot be loaded, or if it has no column of images or
            labels.
    """
    where = f"dataset={name}"
    try:
        import datasets  # it is not part of the set-up
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{where} needs the library `datasets` of Hugging Face, which is not installed: run pip install datasets"
        ) from error
    try:
        splits = datasets.load_dataset(name.removeprefix("hf:"), cache_dir=str(data_root / "hugging_face"))
    except Exception as error:  # the library raises many kinds of errors for missing datasets and connections
        raise SettingError(f"{where} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(splits, Mapping) or "train" not in splits:
        found = ", ".join(splits) if isinstance(splits, Mapping) else type(splits).__name__
        raise SettingError(f"{where} has the splits {found}, but no split `train`: {WRITE_A_FUNCTION}")
    training = splits["train"]
    image, label = (
        _column(training, kind, names, where)
        for kind, names in (("Image", IMAGE_COLUMNS), ("ClassLabel", LABEL_COLUMNS))
    )
    test = next((splits[split] for split in TEST_SPLITS if split in splits), None)
    given = [part for part in (training, test) if part is not None]
    parts = [arrays_of(part, image_size, where, lambda row: (row[image], row[label])) for part in given]
    images_and_labels = [array for part in parts for array in part]
    columns = {one: _array(training[one][:]) for one in training.column_names if one not in (image, label)}
    columns = {one: values for one, values in columns.items() if len(values) == len(training) and _is_sortable(values)}
    class_names = names_of(getattr(training.features[label], "names", None), parts[0][1])
    dataset = dataset_from_arrays(
        name, *images_and_labels, columns=columns, class_names=class_names, channels="last", where=where
    )
    return replace(dataset, files=ImageFiles())


def _is_sortable(values: np.ndarray) -> bool:
    """Return whether values can be sorted, except that some may be missing (None)."""
    if values.ndim != 1 or values.dtype.kind != "O":
        return values.ndim == 1 and values.dtype.kind in "biufU"
    return all(one is None or isinstance(one, str | int | float) for one in values)


def _array(values: Any) -> np.ndarray:
    """Return the values of a column as an array. Dates become texts, whose alphabetical order is that of the dates."""
    values = [value.isoformat() if isinstance(value, date) else value for value in values]
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty(0, object)  # lists of different lengths, which cannot be sorted


def _column(training: Any, kind: str, names: tuple[str, ...], where: str) -> str:
    """Return the name of the column of images or labels: by its type in the library, otherwise by its name."""
    typed = [name for name, feature in training.features.items() if type(feature).__name__ == kind]
    named = [name for name in names if name in training.column_names]
    if len(typed) == 1:
        return typed[0]
    if not (chosen := [name for name in named if not typed or name in typed]):
        what = "images" if kind == "Image" else "labels"
        raise SettingError(
            f"{where} has the columns {', '.join(training.column_names)}, and it is not clear which contains the "
            f"{what}: {WRITE_A_FUNCTION}"
        )
    return chosen[0]


SPLITS = (("train", "trainval"), ("test", "val", "valid"))
"""Names of the split with the training images and of the split with the test images, the preferred name first."""


def read_torchvision(name: str, data_root: Path, image_size: int | None) -> Dataset:
    """Return a dataset of torchvision. Missing files are downloaded, if torchvision can do so.

    All images must fit into memory.

    Args:
        name: name of the class in torchvision.datasets, for example "FashionMNIST".
        image_size: as for `arrays_of`.

    Raises:
        SettingError: if torchvision has no such class, if the class has neither of the arguments `train` and `split`,
            if it cannot be created or downloaded, or if its examples are not images with one class each.
    """
    import torchvision  # this import takes longer than the training of a stage

    where = f"dataset={name}"
    kind = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(kind):
        raise SettingError(f"{where}: torchvision.datasets has no class {name}, and there is no folder {name}")
    parts = [_created(kind, data_root, number, where) for number in (0, 1)]
    arrays = [arrays_of(part, image_size, where) for part in parts]
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
            f"{where}: the class in torchvision has neither train= nor split=, so its test set is unknown: "
            f"{WRITE_A_FUNCTION}"
        )
    download = {"download": True} if "download" in known else {}
    errors = []
    for choice in choices:
        try:
            return kind(data_root, **choice, **download)
        except Exception as error:  # of many kinds: no connection, a damaged archive, an unknown split
            errors.append(error)
    raise SettingError(
        f"{where}: torchvision could not read it from {data_root} or download it ({type(errors[0]).__name__}: "
        f"{errors[0]}). Set data_root= to the folder that contains its files, or run the command once on a machine "
        f"with an internet connection"
    ) from errors[0]


def names_of(class_names: Any, labels: np.ndarray) -> list[str] | None:
    """Return the names of the classes from 0 to the largest label; None if the library has no names for all of them."""
    num_classes = int(labels.max()) + 1 if len(labels) else 0
    if not isinstance(class_names, list | tuple) or len(class_names) < num_classes:
        return None
    names = list(class_names[:num_classes])
    return names if all(isinstance(one, str) for one in names) else None


def arrays_of(
    examples: Any, image_size: int | None, where: str, read: Callable[[Any], Sequence[Any]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [n, height, width, channels], and the labels, int64 [n], of a sequence of examples.

    Args:
        examples: object with a length, whose elements are examples. It need not be iterable.
        image_size: height and width to which images are resized; None if all have one size.
        read: function from an element to the image, as a PIL image, and its class. By default, the element is a tuple
            of both.

    Raises:
        SettingError: if an element is no image with a whole number as its class, or if images have different sizes.
    """
    count, images = len(examples), list[np.ndarray]()
    labels, mode, size = np.empty(count, np.int64), "L", (0, 0)
    for index in range(count):
        element = examples[index]
        image, label = (element if read is None else read(element))[:2]
        if not isinstance(image, Image.Image) or not isinstance(label, int | np.integer):
            raise SettingError(
                f"{where}: example {index} is {type(image).__name__} with the class {label!r}, but must be an image "
                f"with a whole number as its class: {WRITE_A_FUNCTION}"
            )
        name = f"{where}: example {index}"
        image = as_shown(image, name)
        if image.mode != mode and mode == "L":
            # The first colour image: convert the grey images before it to colour.
            mode, images = "RGB", [np.tile(one, 3) for one in images]
        if image_size is None and index and image.size != size:
            raise SettingError(
                f"{where}: images have different sizes: example 0 has {size[0]} x {size[1]} pixels, but example "
                f"{index} has {image.size[0]} x {image.size[1]} (width x height). Give image_size=N to scale all "
                f"images to N x N pixels"
            )
        size = image.size
        images.append(image_values(image, mode, image_size, name))
        labels[index] = label
    width, height = (image_size, image_size) if image_size else size
    stacked = np.stack(images).reshape(count, -1, height, width)
    return stacked.transpose(0, 2, 3, 1), labels
