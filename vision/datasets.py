"""Labelled images: where they come from, and how a pixel becomes a number.

digits comes with scikit-learn; what is missing of the others is fetched by torchvision, where there is a network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from vision import cifar


@dataclass(frozen=True)
class Examples:
    """Images and their classes."""

    images: Tensor
    """[n, channels * height * width] of uint8."""
    labels: Tensor
    """[n] of int64."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Tensor) -> "Examples":
        return Examples(self.images.index_select(0, which), self.labels.index_select(0, which))


@dataclass(frozen=True)
class Pixels:
    """How pixels become numbers: (pixel / largest - mean) / deviation.

    Raises:
        SettingError: not as many means as deviations.
    """

    largest: float
    mean: float | tuple[float, ...]
    """Of all channels, or one a channel."""
    deviation: float | tuple[float, ...]
    """As mean."""

    def __post_init__(self):
        if len(_by_channel(self.mean)) != len(_by_channel(self.deviation)):
            raise SettingError(f"mean={self.mean} and deviation={self.deviation} must have the same number of channels")

    def normalised(self, images: Tensor) -> Tensor:
        """Float of the same shape, [..., channels * height * width]."""
        x = images.float().div_(self.largest)
        means, deviations = _by_channel(self.mean), _by_channel(self.deviation)
        # Channel by channel with plain numbers, in place: nothing of the images' size, nor on their device, is made.
        channels = x.unflatten(-1, (len(means), -1)).unbind(-2)
        for channel, mean, deviation in zip(channels, means, deviations, strict=True):
            channel.sub_(mean).div_(deviation)
        return x


def _by_channel(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Dataset:
    """A training and a test set."""

    name: str
    image_shape: tuple[int, int, int]
    """(channels, height, width)."""
    num_classes: int
    pixels: Pixels
    training: Examples
    test: Examples


def load_dataset(name: str, data_root: str | Path, split: str = "balanced") -> Dataset:
    """The dataset of that name.

    Args:
        name: one of DATASETS.
        data_root: where its files lie, or are put.
        split: of emnist.

    Raises:
        SettingError: no such dataset; its files are missing and cannot be fetched, or are damaged.
    """
    if name not in DATASETS:
        raise SettingError(f"dataset={name!r} is not one of {', '.join(DATASETS)}")
    return DATASETS[name](Path(data_root).expanduser(), split)


def _digits(data_root: Path, split: str) -> Dataset:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # A fixed fifth is the test set. RandomState, because its numbers are promised never to change.
    order = np.random.RandomState(0).permutation(len(labels))
    examples = Examples(torch.from_numpy(images[order].astype(np.uint8)), torch.from_numpy(labels[order]).long())
    num_test = len(order) // 5
    # Mean and deviation of the training part, as mnist's.
    pixels = Pixels(16.0, 0.3058, 0.3764)
    which = torch.arange(len(order))
    return Dataset("digits", (1, 8, 8), 10, pixels, examples[which[num_test:]], examples[which[:num_test]])


def _mnist(data_root: Path, split: str) -> Dataset:
    folder = data_root / "MNIST" / "raw"
    names = [[f"{part}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")] for part in ("train", "t10k")]
    if not all((folder / name).is_file() for pair in names for name in pair):
        _fetch("mnist", "MNIST", data_root, "MNIST/raw", {})
    parts = [_read_pair(folder / images, folder / labels, range(10)) for images, labels in names]
    return Dataset("mnist", (1, 28, 28), 10, Pixels(255.0, 0.1307, 0.3081), *parts)


def _emnist(data_root: Path, split: str) -> Dataset:
    classes = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
    if split not in classes:
        raise SettingError(f"split={split!r} of emnist is not one of {', '.join(classes)}")
    folder = data_root / "EMNIST" / "raw"
    names = [
        [f"emnist-{split}-{part}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        for part in ("train", "test")
    ]
    if not all((folder / name).is_file() for pair in names for name in pair):
        _fetch("emnist", "EMNIST", data_root, "EMNIST/raw", {"split": split})
    first = 1 if split == "letters" else 0  # letters count from 1
    known = range(first, first + classes[split])
    parts = [_read_pair(folder / images, folder / labels, known) for images, labels in names]
    parts = [Examples(part.images, part.labels - first) for part in parts]
    return Dataset("emnist", (1, 28, 28), classes[split], Pixels(255.0, 0.1736, 0.3317), *parts)


def _cifar10(data_root: Path, split: str) -> Dataset:
    pixels = Pixels(255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _cifar("cifar10", "CIFAR10", data_root, cifar.CIFAR10, pixels)


def _cifar100(data_root: Path, split: str) -> Dataset:
    pixels = Pixels(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return _cifar("cifar100", "CIFAR100", data_root, cifar.CIFAR100, pixels)


def _cifar(name: str, kind: str, data_root: Path, layout: cifar.Layout, pixels: Pixels) -> Dataset:
    if not cifar.is_complete(data_root, layout):
        # Both parts are fetched with either; the test images are the fewer that torchvision then reads.
        _fetch(name, kind, data_root, layout.folder, {"train": False})
    parts = [cifar.read_files(data_root, layout, files) for files in (layout.training, layout.test)]
    examples = [Examples(torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in parts]
    return Dataset(name, (3, 32, 32), layout.num_classes, pixels, *examples)


DATASETS: dict[str, Callable[[Path, str], Dataset]] = {
    "digits": _digits,
    "mnist": _mnist,
    "emnist": _emnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
}


def _fetch(name: str, kind: str, data_root: Path, folder: str, arguments: dict[str, Any]) -> None:
    """Have torchvision fetch and unpack what is missing. Only then: importing it takes longer than training a stage."""
    import torchvision

    try:
        getattr(torchvision.datasets, kind)(data_root, download=True, **arguments)
    except Exception as error:
        # torchvision tells a missing network, a damaged archive and a short file by as many kinds of error.
        raise SettingError(
            f"dataset={name}: its files are not in {data_root / folder} and could not be fetched "
            f"({type(error).__name__}: {error}). Give data_root= the folder that holds {folder}/, or run once "
            f"where there is a network"
        ) from error


def _read_pair(images: Path, labels: Path, known: range) -> Examples:
    """Images and labels, of the classes that are known, in the format of MNIST.

    Raises:
        SettingError: a file is damaged, or the two do not belong together.
    """
    pixels, classes = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise SettingError(
            f"{images} holds {len(pixels)} images, {labels} {len(classes)} labels: remove both, they are fetched anew"
        )
    if int(classes.min()) not in known or int(classes.max()) not in known:
        raise SettingError(
            f"{labels} is damaged: its labels {classes.min()}..{classes.max()} do not lie in {known[0]}..{known[-1]}; "
            f"remove it, and it is fetched anew where there is a network"
        )
    return Examples(torch.from_numpy(pixels).flatten(1), torch.from_numpy(classes).long())


def _read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """A file of bytes in the idx format: 0, 0, 8 (unsigned bytes), dimensions; each size in 4 bytes; the values."""
    content = path.read_bytes()
    start = 4 + 4 * num_dimensions
    shape = tuple(np.frombuffer(content[4:start], dtype=">i4").tolist()) if len(content) >= start else ()
    if content[:4] != bytes([0, 0, 8, num_dimensions]) or len(content) != start + prod(shape) or not prod(shape):
        raise SettingError(
            f"{path} is damaged: {len(content)} bytes are not the {num_dimensions}-dimensional idx file that its "
            f"header tells; remove it, and it is fetched anew where there is a network"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
