"""The datasets digits, MNIST and EMNIST.

The digits dataset is part of scikit-learn. The others are read from files; torchvision downloads missing files.
"""

from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from vision.datasets.arrays import split_off_test_set
from vision.datasets.examples import Dataset, Examples, Pixels

DOWNLOAD_AGAIN = "remove it, and the next run with an internet connection downloads it again"
"""What the user can do about a damaged file. Every message about a damaged file ends with this text."""


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and the labels of digits. The file is a text file, so reading it takes as long as a stage."""
    from sklearn.datasets import load_digits  # this import takes a second

    return load_digits(return_X_y=True)


def digits() -> Dataset:
    """Return the digits dataset of scikit-learn."""
    images, labels = _digits()
    examples = Examples(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels).long())
    training, test = (torch.from_numpy(positions) for positions in split_off_test_set(len(labels)))
    # 16 is the largest pixel value of digits. The other two numbers are the mean and the standard deviation of
    # pixel / 16 over the training images.
    pixels = Pixels(16.0, 0.3058, 0.3764)
    return Dataset("digits", (1, 8, 8), 10, pixels, examples[training], examples[test])


def mnist(data_root: Path) -> Dataset:
    """Return MNIST."""
    training, test = _read_files("mnist", "MNIST", data_root, ("train", "t10k"), range(10))
    return Dataset("mnist", (1, 28, 28), 10, Pixels(255.0, 0.1307, 0.3081), training, test)


def _emnist(split: str, num_classes: int, data_root: Path) -> Dataset:
    """Return one of the published divisions of EMNIST, which are called splits."""
    first = 1 if split == "letters" else 0  # in the files of the split "letters", the labels start at 1
    prefixes = (f"emnist-{split}-train", f"emnist-{split}-test")
    parts = _read_files("emnist", "EMNIST", data_root, prefixes, range(first, first + num_classes), split=split)
    training, test = (Examples(part.images, part.labels - first) for part in parts)
    name = "emnist" if split == "balanced" else f"emnist_{split}"
    return Dataset(name, (1, 28, 28), num_classes, Pixels(255.0, 0.1736, 0.3317), training, test)


emnist = partial(_emnist, "balanced", 47)
emnist_letters = partial(_emnist, "letters", 26)
emnist_digits = partial(_emnist, "digits", 10)
emnist_mnist = partial(_emnist, "mnist", 10)
emnist_byclass = partial(_emnist, "byclass", 62)
emnist_bymerge = partial(_emnist, "bymerge", 47)


def download(name: str, kind: str, data_root: Path, folder: str, **arguments: Any) -> None:
    """Download and unpack the files of a dataset with torchvision.

    Args:
        kind: name of the dataset's class in torchvision.datasets.
        folder: the dataset's folder in `data_root`. The error message names it.
        **arguments: further arguments of the class.

    Raises:
        SettingError: if the download fails.
    """
    import torchvision  # this import takes longer than the training of a stage

    try:
        getattr(torchvision.datasets, kind)(data_root, download=True, **arguments)
    except Exception as error:  # of many kinds: no connection, a damaged archive, a truncated file
        raise SettingError(
            f"dataset={name}: its files are not in {data_root / folder} and could not be downloaded "
            f"({type(error).__name__}: {error}). Set data_root= to the folder that contains {folder}/, or run the "
            f"command once on a machine with an internet connection"
        ) from error


def _read_files(
    name: str, kind: str, data_root: Path, prefixes: tuple[str, str], known: range, **arguments: Any
) -> list[Examples]:
    """Return the training set and the test set in files of the MNIST format. If they are missing, download them.

    Args:
        prefixes: how the names of the files with training examples and with test examples begin.
        known: the possible labels. For the other arguments, see `download`.
    """
    folder = data_root / kind / "raw"
    pairs = [[folder / f"{one}-{what}-ubyte" for what in ("images-idx3", "labels-idx1")] for one in prefixes]
    if not all(path.is_file() for pair in pairs for path in pair):
        download(name, kind, data_root, f"{kind}/raw", **arguments)
    return [_read_pair(images, labels, known) for images, labels in pairs]


def _read_pair(images: Path, labels: Path, known: range) -> Examples:
    """Return the examples in two files of the MNIST format: a file with images and a file with their labels."""
    pixels, classes = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise SettingError(
            f"{images} contains {len(pixels)} images, but {labels} contains {len(classes)} labels: remove both files, "
            f"and the next run with an internet connection downloads them again"
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

    Raises:
        SettingError: if the file is damaged, or has not the expected number of dimensions.
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
