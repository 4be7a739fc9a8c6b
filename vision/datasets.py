"""Load datasets of labelled images, and normalise the pixels of images.

The digits dataset is part of scikit-learn. The other datasets are read from files; torchvision downloads missing files.
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
from vision.cifar import DOWNLOAD_AGAIN


@dataclass(frozen=True)
class Examples:
    """Images and their classes. `examples[indices]` returns the examples at the positions in the tensor `indices`."""

    images: Tensor
    """Pixels, uint8 [n, channels * height * width], stored channel by channel, and row by row within a channel."""
    labels: Tensor
    """Class indices, int64 [n]."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Tensor) -> "Examples":
        return Examples(self.images.index_select(0, which), self.labels.index_select(0, which))


@dataclass(frozen=True)
class Pixels:
    """Normalises pixel values: divides them by `largest`, subtracts `mean`, and divides by `deviation`.

    Raises:
        SettingError: if `mean` and `deviation` have different numbers of channels.
    """

    largest: float
    """The largest possible pixel value of the dataset, for example 255."""
    mean: float | tuple[float, ...]
    """Mean of the pixel values after division by `largest`: one number for all channels, or one number per channel."""
    deviation: float | tuple[float, ...]
    """Standard deviation of the pixel values after division by `largest`: one number for all channels, or a tuple with
    one number per channel."""

    def __post_init__(self):
        if len(_by_channel(self.mean)) != len(_by_channel(self.deviation)):
            raise SettingError(f"mean={self.mean} and deviation={self.deviation} must have the same number of channels")

    def normalise(self, images: Tensor) -> Tensor:
        """Return images as normalised floats of the same shape.

        Args:
            images: pixels, uint8 [..., channels * height * width].
        """
        x = images.float().div_(self.largest)
        means, deviations = _by_channel(self.mean), _by_channel(self.deviation)
        # Normalise channel by channel, in place and with Python numbers, so that no second tensor of the size of x is
        # allocated.
        channels = x.unflatten(-1, (len(means), -1)).unbind(-2)
        for channel, mean, deviation in zip(channels, means, deviations, strict=True):
            channel.sub_(mean).div_(deviation)
        return x


def _by_channel(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set of labelled images."""

    name: str
    """Name of the dataset, for example "mnist" (see `DATASETS`)."""
    image_shape: tuple[int, int, int]
    """Shape of an image, (channels, height, width)."""
    num_classes: int
    """Number of classes, C."""
    pixels: Pixels
    """The normalisation of the pixels of this dataset."""
    training: Examples
    """The training set. It is cut into the mega-batches of the stream."""
    test: Examples
    """The test set. Only the evaluator reads it."""


def load_dataset(name: str, data_root: str | Path, split: str = "balanced") -> Dataset:
    """Return a dataset. If the files of the dataset are missing, download them first.

    Args:
        name: name of the dataset, a key of `DATASETS`.
        data_root: folder that contains the dataset's files. Missing files are downloaded to it.
        split: name of the EMNIST split (one of the published divisions of EMNIST). Other datasets ignore it.

    Raises:
        SettingError: if the name is unknown, if a file is damaged, or if a file is missing and cannot be downloaded.
    """
    if name not in DATASETS:
        raise SettingError(f"dataset={name!r} is not one of {', '.join(DATASETS)}")
    return DATASETS[name](Path(data_root).expanduser(), split)


def _digits(data_root: Path, split: str) -> Dataset:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    # Use a random fifth of the images as the test set. The test set is the same on every machine, because the seed is
    # fixed and numpy guarantees that RandomState returns the same numbers in all releases.
    order = np.random.RandomState(0).permutation(len(labels))
    examples = Examples(torch.from_numpy(images[order].astype(np.uint8)), torch.from_numpy(labels[order]).long())
    num_test = len(order) // 5
    # 16 is the largest pixel value of digits. The other two numbers are the mean and the standard deviation of
    # pixel / 16 over the training images.
    pixels = Pixels(16.0, 0.3058, 0.3764)
    which = torch.arange(len(order))
    return Dataset("digits", (1, 8, 8), 10, pixels, examples[which[num_test:]], examples[which[:num_test]])


def _mnist(data_root: Path, split: str) -> Dataset:
    folder = data_root / "MNIST" / "raw"
    names = [[f"{part}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")] for part in ("train", "t10k")]
    if not all((folder / name).is_file() for pair in names for name in pair):
        _download("mnist", "MNIST", data_root, "MNIST/raw", {})
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
        _download("emnist", "EMNIST", data_root, "EMNIST/raw", {"split": split})
    # In the files of the split "letters", the labels start at 1.
    first = 1 if split == "letters" else 0
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
        # torchvision downloads the training set and the test set, and then reads one of them into memory. With
        # {"train": False} it reads the test set, which is smaller, so less time is lost.
        _download(name, kind, data_root, layout.folder, {"train": False})
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
"""The function that loads each dataset, by name of the dataset. Its arguments are the data folder and the name of the
split. Add new datasets here."""


def _download(name: str, kind: str, data_root: Path, folder: str, arguments: dict[str, Any]) -> None:
    """Download and unpack the files of a dataset with torchvision.

    Args:
        name: name of the dataset, a key of `DATASETS`.
        kind: name of the dataset's class in torchvision.datasets.
        data_root: the data folder.
        folder: the dataset's folder in `data_root`. The error message names it.
        arguments: further keyword arguments for the class in torchvision.datasets.

    Raises:
        SettingError: if the download fails.
    """
    # Import torchvision only when it is needed, because the import takes longer than the training of a stage.
    import torchvision

    try:
        getattr(torchvision.datasets, kind)(data_root, download=True, **arguments)
    except Exception as error:
        # Catch every error, because torchvision raises different kinds of errors if there is no network, if an archive
        # is damaged, or if a file is truncated.
        raise SettingError(
            f"dataset={name}: its files are not in {data_root / folder} and could not be downloaded "
            f"({type(error).__name__}: {error}). Set data_root= to the folder that contains {folder}/, or run the "
            f"command once on a machine with network access"
        ) from error


def _read_pair(images: Path, labels: Path, known: range) -> Examples:
    """Return the examples in two files of the MNIST format: a file with images and a file with their labels.

    Args:
        images: path of the image file.
        labels: path of the label file.
        known: the valid labels.

    Raises:
        SettingError: if a file is damaged, or if the files contain different numbers of examples.
    """
    pixels, classes = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise SettingError(
            f"{images} contains {len(pixels)} images, but {labels} contains {len(classes)} labels: remove both files, "
            f"and the next run with network access downloads them again"
        )
    if int(classes.min()) not in known or int(classes.max()) not in known:
        raise SettingError(
            f"{labels} is damaged: its labels are in {classes.min()}..{classes.max()}, but must be in "
            f"{known[0]}..{known[-1]}; {DOWNLOAD_AGAIN}"
        )
    return Examples(torch.from_numpy(pixels).flatten(1), torch.from_numpy(classes).long())


def _read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Return the array stored in an idx file, the file format of MNIST.

    The first four bytes of the file are 0, 0, 8 (the code for unsigned bytes) and the number of dimensions. Then the
    size of each dimension follows, as a big-endian integer of 4 bytes. Then the values of the array follow.

    Args:
        path: the file.
        num_dimensions: the expected number of dimensions.

    Raises:
        SettingError: if the file is damaged.
    """
    content = path.read_bytes()
    start = 4 + 4 * num_dimensions
    shape = tuple(np.frombuffer(content[4:start], dtype=">i4").tolist()) if len(content) >= start else ()
    if content[:4] != bytes([0, 0, 8, num_dimensions]) or len(content) != start + prod(shape) or not prod(shape):
        raise SettingError(
            f"{path} is damaged: its header does not describe a {num_dimensions}-dimensional idx file of "
            f"{len(content)} bytes; {DOWNLOAD_AGAIN}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
