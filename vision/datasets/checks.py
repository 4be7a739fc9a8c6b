"""Checks of datasets. A dataset that is loaded must fit its description, so that no run trains on damaged data."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from vision.datasets.examples import Dataset, Examples, Pixels, image_parts


def check_dataset(dataset: Any, where: str) -> Dataset:
    """Check a dataset, and return it.

    Args:
        dataset: the dataset, or any other object that a user's function returned by mistake.
        where: the origin of the dataset, for messages, for example "dataset=images.npz".

    Raises:
        SettingError: if it is not a `Dataset`, if shapes or types do not fit together, if labels are not in 0..C-1, if
            pixels are NaN or infinite, or if `columns` or `folder_of_example` does not have one value per training
            example.
    """
    if not isinstance(dataset, Dataset):
        raise SettingError(
            f"{where}: found {type(dataset).__name__}, expected a vision.datasets.Dataset: the function must return one"
        )
    shape = dataset.image_shape
    if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise SettingError(f"{where}: image_shape={shape!r} must be three integers above 0: channels, height, width")
    if not isinstance(dataset.num_classes, int) or dataset.num_classes < 2:
        raise SettingError(f"{where}: there must be at least two classes, but num_classes={dataset.num_classes!r}")
    if not isinstance(dataset.pixels, Pixels):
        raise SettingError(f"{where}: pixels must be a vision.datasets.Pixels, not {type(dataset.pixels).__name__}")
    _check_channels(dataset.pixels, shape[0], where)
    for part, examples in (("training", dataset.training), ("test", dataset.test)):
        _check_examples(examples, dataset, f"{where}: the {part} set")
    if dataset.class_names is not None and len(dataset.class_names) != dataset.num_classes:
        raise SettingError(
            f"{where}: class_names has {len(dataset.class_names)} names, but there are {dataset.num_classes} classes"
        )
    folders = dataset.folder_of_example
    if folders is not None and not (
        isinstance(folders, np.ndarray) and folders.shape == (len(dataset.training),) and folders.dtype.kind in "iu"
        and (folders >= 0).all()
    ):  # fmt: skip
        raise SettingError(
            f"{where}: folder_of_example must be an array of {len(dataset.training)} integers from 0 on, one for each "
            f"training example"
        )
    for name, values in dataset.columns.items():
        if len(values) != len(dataset.training):
            raise SettingError(
                f"{where}: the column {name!r} has {len(values)} values, but there are {len(dataset.training)} "
                f"training examples"
            )
    return dataset


def check_all_classes_are_trained(dataset: Dataset, where: str, class_names: Sequence[str] | None = None) -> Dataset:
    """Return the dataset. Raise SettingError if a class has no training example.

    The arguments `where`, the origin of the dataset, and `class_names` are for the message.
    """
    counts = dataset.training.labels.bincount(minlength=dataset.num_classes)
    if missing := (counts == 0).nonzero().flatten().tolist():
        named = ", ".join(str(class_names[one]) if class_names else str(one) for one in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise SettingError(
            f"{where}: the training set has no example of class {named}{more}. Labels must be 0, 1, ... "
            f"{dataset.num_classes - 1} without gaps: add examples, or renumber the classes"
        )
    return dataset


def check_held_out(labels: np.ndarray | Sequence[Any], training: np.ndarray, where: str, parts: str) -> None:
    """Raise SettingError if all examples of a class are in the test set, a random fifth that was held out.

    Args:
        labels: class of each example, a number or a name.
        training: positions of the training examples.
        parts: how the user can give both parts, for messages.
    """
    classes, counts = np.unique(labels, return_counts=True)
    lost = ~np.isin(classes, np.asarray(labels)[training])
    if lost.any():
        raise SettingError(
            f"{where}: the class {classes[lost][0]} has {counts[lost][0]} example(s), and the random fifth of all "
            f"examples that becomes the test set contains all of them: add examples of this class, or give the test "
            f"set yourself ({parts})"
        )


def _check_channels(pixels: Pixels, num_channels: int, where: str) -> None:
    """Raise SettingError if a normalisation is for another number of channels, or divides by zero."""
    deviation = pixels.deviation if isinstance(pixels.deviation, tuple) else (pixels.deviation,)
    if len(deviation) not in (1, num_channels):
        raise SettingError(
            f"{where}: the normalisation has {len(deviation)} channels (mean={pixels.mean}), but the images have "
            f"{num_channels}: give one number, or one per channel"
        )
    if not all(value > 0 for value in (*deviation, pixels.largest)):
        raise SettingError(
            f"{where}: largest={pixels.largest} and deviation={pixels.deviation} of the normalisation must be above 0"
        )


def _check_examples(examples: Any, dataset: Dataset, where: str) -> None:
    """Raise SettingError if the training set or the test set does not fit the description of the dataset."""
    if not isinstance(examples, Examples):
        raise SettingError(f"{where} is {type(examples).__name__}, but must be vision.datasets.Examples")
    images, labels, num_values = examples.images, examples.labels, prod(dataset.image_shape)
    if not isinstance(images, torch.Tensor) or images.dtype not in (torch.uint8, torch.float32):
        found = str(images.dtype) if isinstance(images, torch.Tensor) else type(images).__name__
        raise SettingError(f"{where} has images of type {found}, but they must be a tensor of uint8 or float32")
    if images.dim() != 2 or images.shape[1] != num_values:
        raise SettingError(
            f"{where} has images of shape {list(images.shape)}, but the image shape (channels, height, width) = "
            f"{dataset.image_shape} needs [n, {num_values}]: flatten each image, channel by channel"
        )
    if not isinstance(labels, torch.Tensor) or labels.dtype != torch.int64 or labels.dim() != 1:
        found = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise SettingError(f"{where} has labels of type {found}, but they must be a tensor of int64, [n]")
    if len(labels) != len(images) or not len(labels):
        raise SettingError(
            f"{where} has {len(images)} images and {len(labels)} labels: there must be as many labels as images, and "
            f"at least one"
        )
    first, last = int(labels.min()), int(labels.max())
    if first < 0 or last >= dataset.num_classes:
        raise SettingError(f"{where} has labels in {first}..{last}, but they must be in 0..{dataset.num_classes - 1}")
    check_finite(images, where)


def check_finite(images: torch.Tensor, where: str) -> None:
    """Raise SettingError if a pixel is NaN or infinite, and name the image."""
    if not images.is_floating_point():
        return
    start = 0
    for part in image_parts(images):
        # The sum of a part is finite if all its pixels are, unless it overflows. Look closer only if it is not.
        if not bool(part.sum().isfinite()):
            bad = (~part.isfinite()).any(1).nonzero().flatten()
            if len(bad):
                raise SettingError(
                    f"{where} has pixels that are NaN or infinite, first in image {start + int(bad[0])}: replace these "
                    f"pixels by numbers, or remove the image"
                )
        start += len(part)
