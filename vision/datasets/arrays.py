"""Datasets from arrays: `dataset_from_arrays` for functions of the user's own, and `.npz` files."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from vision.datasets.checks import check_all_classes_are_trained, check_dataset, check_finite, check_held_out
from vision.datasets.examples import Dataset, Examples, measured_pixels

MAX_CHANNELS = 16
"""An array of images with more channels than this is refused, because its axes are probably in another order."""
USUAL_CHANNELS = (1, 3)
"""Usual numbers of channels. An axis of such a length is taken for the channels before other short axes."""
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")


def split_off_test_set(num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the training examples and of the test examples. The test set is a random fifth.

    The fifth is the same on every machine and in every run, because the seed is fixed and numpy guarantees that
    RandomState returns the same numbers in all releases.
    """
    order = np.random.RandomState(0).permutation(num_examples)
    num_test = max(1, num_examples // 5)
    return order[num_test:], order[:num_test]


def dataset_from_arrays(
    name: str,
    x_train: Any,
    y_train: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    columns: Mapping[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
    channels: Literal["first", "last"] | None = None,
    where: str | None = None,
) -> Dataset:
    """Return a dataset of images and labels in arrays (or tensors). Its normalisation is measured on the images.

    Args:
        x_train: training images, uint8 or float: [n, height, width] for grey, [n, height, width, channels] or
            [n, channels, height, width].
        y_train: class of each training image, integers from 0 without gaps, [n].
        x_test: test images, in the same format. If None, a fixed random fifth of the training images is the test set.
        y_test: class of each test image.
        columns: further values of each training example, by name, [n] (see `Dataset.columns`).
        class_names: name of each class, if the classes have names.
        channels: which axis of an image contains the channels. By default, this is found by the shape: an axis of
            length 1 or 3 comes before one of another length up to 16. A shape in which both could be is refused.
        where: the origin of the arrays, for error messages. By default, the name of the dataset.

    Raises:
        SettingError: if shapes or types are wrong or unclear, if labels have gaps, or if pixels are NaN or infinite.
    """
    where = where or f"dataset={name}"
    images, shape = _flat_images(x_train, channels, f"{where}: x_train")
    labels = _labels(y_train, f"{where}: y_train")
    if len(images) != len(labels):
        raise SettingError(f"{where}: x_train has {len(images)} images, but y_train has {len(labels)} labels")
    arrays = {key: np.asarray(values) for key, values in (columns or {}).items()}
    if (x_test is None) != (y_test is None):
        raise SettingError(f"{where}: give both x_test and y_test, or none of them")
    if x_test is None:
        for key, values in arrays.items():
            if len(values) != len(labels):
                raise SettingError(f"{where}: the column {key!r} has {len(values)} values for {len(labels)} images")
        training, test = split_off_test_set(len(labels))
        check_held_out(labels, training, where, "x_train, y_train, x_test and y_test")
        test_images, test_labels = images[test], labels[test]
        images, labels, arrays = images[training], labels[training], {key: v[training] for key, v in arrays.items()}
    else:
        test_images, test_shape = _flat_images(x_test, channels, f"{where}: x_test")
        test_labels = _labels(y_test, f"{where}: y_test")
        if test_shape != shape or test_images.dtype != images.dtype:
            raise SettingError(
                f"{where}: the training images have the shape {shape} (channels, height, width) and type "
                f"{images.dtype}, but the test images {test_shape} and {test_images.dtype}: they must be equal"
            )
    num_classes = int(labels.max()) + 1 if len(labels) else 0
    if len(test_labels) and int(test_labels.max()) >= num_classes:
        raise SettingError(
            f"{where}: the test set has examples of class {int(test_labels.max())}, but the training set has only the "
            f"classes 0..{num_classes - 1}: remove these test examples, or add training examples of the class"
        )
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (images, labels, test_images, test_labels)]
    pixels = measured_pixels(tensors[0], shape[0])
    parts = Examples(*tensors[:2]), Examples(*tensors[2:])
    dataset = Dataset(name, shape, num_classes, pixels, *parts, arrays, class_names=class_names)
    return check_all_classes_are_trained(check_dataset(dataset, where), where)


def _flat_images(
    images: Any, channels: Literal["first", "last"] | None, where: str
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return images as an array, uint8 or float32 [n, channels * height * width], and the shape of an image."""
    array = np.asarray(images)
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise SettingError(
            f"{where} has the type {array.dtype}, but images must be uint8 (0 to 255) or floats: convert them, for "
            f"example with .astype('uint8')"
        )
    if array.ndim not in (3, 4) or not array.size:
        raise SettingError(
            f"{where} has the shape {list(array.shape)}, but images must have the shape [n, height, width], "
            f"[n, height, width, channels] or [n, channels, height, width]"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif (channels or _axis_of_channels(array.shape, where)) == "last":
        array = array.transpose(0, 3, 1, 2)
    array = array.astype(np.uint8 if array.dtype == np.uint8 else np.float32, copy=False)
    num, *shape = array.shape
    flat = array.reshape(num, -1)
    # Check here and not only at the end, because the test set may be separated first, which changes the positions.
    check_finite(torch.from_numpy(flat), where)
    return flat, (shape[0], shape[1], shape[2])


def _axis_of_channels(shape: tuple[int, ...], where: str) -> Literal["first", "last"]:
    """Return which axis of images with the shape [n, a, b, c] contains the channels: a ("first") or c ("last")."""
    first, last = shape[1], shape[3]
    for possible in (USUAL_CHANNELS, range(1, MAX_CHANNELS + 1)):
        if (first in possible) != (last in possible):
            return "first" if first in possible else "last"
        if first in possible:
            raise SettingError(
                f"{where} has the shape {list(shape)}, in which the channels may be the axis of length {first} or the "
                f"last one of length {last}: call dataset_from_arrays with channels='first' or channels='last'"
            )
    raise SettingError(
        f"{where} has the shape {list(shape)}, so {last} channels; at most {MAX_CHANNELS} are possible. Images must "
        f"have the shape [n, height, width, channels] or [n, channels, height, width]"
    )


def _labels(labels: Any, where: str) -> np.ndarray:
    """Return labels as an array, int64 [n]."""
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise SettingError(
            f"{where} has the type {array.dtype} and the shape {list(array.shape)}, but labels must be integers, [n]: "
            f"number the classes from 0"
        )
    if len(array) and array.min() < 0:
        raise SettingError(f"{where} has the label {array.min()}, but labels must be 0, 1, 2, ...")
    return array.astype(np.int64)


def read_npz(path: Path, name: str) -> Dataset:
    """Return the dataset in a `.npz` file with the arrays x_train, y_train, x_test, y_test, or only x and y.

    Other arrays with one value per training example become `Dataset.columns`.

    Raises:
        SettingError: if the file is missing or damaged, if arrays are missing, or if they are not images and labels.
    """
    where = f"dataset={name}"
    if not path.is_file():
        raise SettingError(
            f"{where}: the file {path.absolute()} does not exist: give the path of an existing .npz file"
        )
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {key: content[key] for key in content.files}
    # A TypeError: one array alone, which np.save has written.
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise SettingError(
            f"{where}: {path} cannot be read as a .npz file of numbers and texts ({error}): write it again with "
            f"numpy.savez"
        ) from error
    keys = NPZ_KEYS if "x_train" in arrays else ("x", "y")
    if missing := [key for key in keys if key not in arrays]:
        raise SettingError(
            f"{where}: {path} contains the arrays {', '.join(arrays) or 'none'}, but {', '.join(missing)} is missing: "
            f"it must contain {', '.join(NPZ_KEYS)}, or x and y"
        )
    images, labels, *test = [arrays.pop(key) for key in keys]
    num = len(labels) if labels.ndim else 0
    columns = {key: values for key, values in arrays.items() if values.ndim == 1 and len(values) == num}
    return dataset_from_arrays(name, images, labels, *test, columns=columns, where=f"{where}: {path}")
