"""Labelled images: where they come from, and how a pixel becomes a number.

digits comes with scikit-learn; mnist and emnist are read by torchvision, which fetches them where there is a network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError


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
        return Examples(self.images[which], self.labels[which])


@dataclass(frozen=True)
class Pixels:
    """How pixels become numbers: (pixel / largest - mean) / deviation."""

    largest: float
    mean: float
    deviation: float

    def normalised(self, images: Tensor) -> Tensor:
        """Float of the same shape."""
        return images.float().div_(self.largest).sub_(self.mean).div_(self.deviation)


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
    from torchvision.datasets import MNIST

    parts = [_from_torchvision("mnist", data_root, MNIST, {"train": train}) for train in (True, False)]
    return Dataset("mnist", (1, 28, 28), 10, Pixels(255.0, 0.1307, 0.3081), *parts)


def _emnist(data_root: Path, split: str) -> Dataset:
    from torchvision.datasets import EMNIST

    if split not in EMNIST.splits:
        raise SettingError(f"split={split!r} of emnist is not one of {', '.join(EMNIST.splits)}")
    parts = [
        _from_torchvision("emnist", data_root, EMNIST, {"train": train, "split": split}) for train in (True, False)
    ]
    first = 1 if split == "letters" else 0  # letters count from 1
    parts = [Examples(part.images, part.labels - first) for part in parts]
    num_classes = int(max(part.labels.max() for part in parts)) + 1
    return Dataset("emnist", (1, 28, 28), num_classes, Pixels(255.0, 0.1736, 0.3317), *parts)


DATASETS: dict[str, Callable[[Path, str], Dataset]] = {"digits": _digits, "mnist": _mnist, "emnist": _emnist}


def _from_torchvision(name: str, data_root: Path, kind: type, arguments: dict) -> Examples:
    try:
        dataset = kind(data_root, download=True, **arguments)  # fetches nothing that is there
    except Exception as error:
        # torchvision tells a missing network, a damaged archive and a short file by as many kinds of error.
        raise SettingError(
            f"dataset={name}: its files are not in data_root={data_root}, or are damaged, and could not be fetched "
            f"({type(error).__name__}: {error}). Give data_root= the folder that holds "
            f"{kind.__name__}/raw/, or run once where there is a network"
        ) from error
    images, labels = dataset.data, torch.as_tensor(dataset.targets).long()
    if len(images) != len(labels) or not len(images):
        raise SettingError(
            f"dataset={name}: {len(images)} images and {len(labels)} labels in {data_root}: remove {kind.__name__}/ "
            f"and run where there is a network"
        )
    return Examples(torch.as_tensor(images).reshape(len(images), -1), labels)
