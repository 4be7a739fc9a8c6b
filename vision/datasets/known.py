"""The datasets digits, MNIST and EMNIST.

The digits dataset is part of scikit-learn. The others are read from files; torchvision downloads missing files.
"""

from functools import cache, partial
from math import prod
from pathlib import Path

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError
from vision.datasets.arrays import split_off_test_set
from vision.datasets.downloading import DOWNLOAD_AGAIN, download
from vision.datasets.examples import Dataset, Examples, Pixels


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and the labels of digits. The file is a text file, so reading it takes as long as a stage."""
    # Import scikit-learn only when it is needed, because the import takes a second.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


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
    folder = data_root / "MNIST" / "raw"
    names = [[f"{part}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")] for part in ("train", "t10k")]
    if not all((folder / name).is_file() for pair in names for name in pair):
        download("mnist", "MNIST", data_root, "MNIST/raw", {})
    training, test = (_read_pair(folder / images, folder / labels, range(10)) for images, labels in names)
    return Dataset("mnist", (1, 28, 28), 10, Pixels(255.0, 0.1307, 0.3081), training, test)


def _emnist(split: str, num_classes: int, data_root: Path) -> Dataset:
    """Return one of the published divisions of EMNIST, which are called splits."""
    folder = data_root / "EMNIST" / "raw"
    names = [
        [f"emnist-{split}-{part}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        for part in ("train", "test")
    ]
    if not all((folder / name).is_file() for pair in names for name in pair):
        download("emnist", "EMNIST", data_root, "EMNIST/raw", {"split": split})
    # In the files of the split "letters", the labels start at 1.
    first = 1 if split == "letters" else 0
    known = range(first, first + num_classes)
    parts = [_read_pair(folder / images, folder / labels, known) for images, labels in names]
    training, test = (Examples(part.images, part.labels - first) for part in parts)
    name = "emnist" if split == "balanced" else f"emnist_{split}"
    return Dataset(name, (1, 28, 28), num_classes, Pixels(255.0, 0.1736, 0.3317), training, test)


emnist = partial(_emnist, "balanced", 47)
emnist_letters = partial(_emnist, "letters", 26)
emnist_digits = partial(_emnist, "digits", 10)
emnist_mnist = partial(_emnist, "mnist", 10)
emnist_byclass = partial(_emnist, "byclass", 62)
emnist_bymerge = partial(_emnist, "bymerge", 47)


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
