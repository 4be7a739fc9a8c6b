"""The datasets of the Hugging Face hub, if the library `datasets` is installed."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_alma.core.errors import SettingError
from vision.datasets.arrays import dataset_from_arrays
from vision.datasets.examples import Dataset, ImageFiles
from vision.datasets.library_images import arrays_of, names_of

TEST_SPLITS = ("test", "validation", "valid", "val")
"""Names of the split with the test images. The first that exists is used."""
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")


def read_hugging_face(name: str, data_root: Path, image_size: int | None) -> Dataset:
    """Return a dataset of the Hugging Face hub. Missing files are downloaded to data_root/hugging_face.

    The split `train` is the training set, and the split `test` (or `validation`) the test set. Without such a split, a
    fixed random fifth of the training images is the test set. Columns of numbers, texts and dates become
    `Dataset.columns`. All images must fit into memory.

    Args:
        name: hf:NAME, where NAME is the name of the dataset on the hub, or the path of a folder with its files.
        data_root: the data folder.
        image_size: height and width to which images are resized; None if all have one size.

    Raises:
        SettingError: if the library is missing, if the dataset cannot be loaded, or if it has no column of images or
            labels.
    """
    where = f"dataset={name}"
    try:
        # Import the library here, because it is not part of the set-up.
        import datasets
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{where} needs the library `datasets` of Hugging Face, which is not installed: run pip install datasets"
        ) from error
    try:
        splits = datasets.load_dataset(name.removeprefix("hf:"), cache_dir=str(data_root / "hugging_face"))
    except Exception as error:
        # Catch every error, because the library raises many kinds of errors if a dataset does not exist or if there is
        # no internet connection.
        raise SettingError(f"{where} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(splits, Mapping) or "train" not in splits:
        found = ", ".join(splits) if isinstance(splits, Mapping) else type(splits).__name__
        raise SettingError(f"{where} has the splits {found}, but no split `train`: write a function, and give "
                           f"dataset=MODULE:FUNCTION")  # fmt: skip
    training = splits["train"]
    image, label = (
        _column(training, kind, names, where)
        for kind, names in (("Image", IMAGE_COLUMNS), ("ClassLabel", LABEL_COLUMNS))
    )
    test = next((splits[split] for split in TEST_SPLITS if split in splits), None)

    def read(row: Mapping[str, Any]) -> tuple[Any, Any]:
        return row[image], row[label]

    parts = [arrays_of(part, len(part), image_size, where, read) for part in (training, test) if part is not None]
    images_and_labels = [array for part in parts for array in part]
    columns = {one: _array(training[one][:]) for one in training.column_names if one not in (image, label)}
    columns = {one: values for one, values in columns.items() if values.ndim == 1 and values.dtype.kind in "biufU"}
    class_names = names_of(getattr(training.features[label], "names", None), parts[0][1])
    dataset = dataset_from_arrays(
        name, *images_and_labels, columns=columns, class_names=class_names, channels="last", where=where
    )
    return replace(dataset, files=ImageFiles())


def _array(values: Any) -> np.ndarray:
    """Return the values of a column as an array. Dates become texts, whose alphabetical order is that of the dates."""
    values = [value.isoformat() if isinstance(value, date) else value for value in values]
    try:
        return np.asarray(values)
    except ValueError:
        return np.empty(0, object)  # lists of different lengths, which cannot be sorted


def _column(training: Any, kind: str, names: tuple[str, ...], where: str) -> str:
    """Return the name of the column of images or labels: by its type in the library, otherwise by its name.

    Args:
        training: the training set.
        kind: name of the type of the column, "Image" or "ClassLabel".
        names: usual names of such a column.
        where: the dataset, for error messages.

    Raises:
        SettingError: if there is no such column, or if there are several.
    """
    typed = [name for name, feature in training.features.items() if type(feature).__name__ == kind]
    named = [name for name in names if name in training.column_names]
    if len(typed) == 1:
        return typed[0]
    if not (chosen := [name for name in named if not typed or name in typed]):
        what = "images" if kind == "Image" else "labels"
        raise SettingError(
            f"{where} has the columns {', '.join(training.column_names)}, and it is not clear which contains the "
            f"{what}: write a function that returns a Dataset, and give dataset=MODULE:FUNCTION"
        )
    return chosen[0]
