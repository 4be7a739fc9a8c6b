"""The datasets CIFAR-10 and CIFAR-100.

Each file is a pickle that was written by Python 2. It contains a dictionary with n images and their labels:
{b"data": uint8 [n, 3072], b"labels" or b"fine_labels": [n], ...}. The names of the files and the MD5 sums of the
published files are those of torchvision.

A pickle file can call any function when it is read. For security, this module allows only the functions that numpy
needs to create an array, and refuses all other files. torchvision reads the same files without this restriction.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torchvision

from fairseq_alma.core.errors import SettingError
from vision.datasets.examples import Dataset, Examples, Pixels
from vision.datasets.known import DOWNLOAD_AGAIN, download

NUM_BYTES = 3 * 32 * 32
"""Number of bytes of an image. The bytes are stored channel by channel, and row by row within a channel."""
LABELS = {"CIFAR10": (b"labels", 10), "CIFAR100": (b"fine_labels", 100)}
"""Class of torchvision -> key of the labels in the pickled dictionary, and number of classes."""


def cifar10(data_root: Path) -> Dataset:
    """Return CIFAR-10."""
    pixels = Pixels(255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _cifar("cifar10", "CIFAR10", data_root, pixels)


def cifar100(data_root: Path) -> Dataset:
    """Return CIFAR-100 with its 100 fine labels."""
    pixels = Pixels(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return _cifar("cifar100", "CIFAR100", data_root, pixels)


def _cifar(name: str, kind: str, data_root: Path, pixels: Pixels) -> Dataset:
    layout = getattr(torchvision.datasets, kind)
    folder = data_root / layout.base_folder
    if not all((folder / file).is_file() for file, _ in layout.train_list + layout.test_list):
        # torchvision downloads both sets, and then reads one into memory. The test set is smaller.
        download(name, kind, data_root, layout.base_folder, train=False)
    training = _read_files(folder, layout.train_list, 50_000, *LABELS[kind])
    test = _read_files(folder, layout.test_list, 10_000, *LABELS[kind])
    return Dataset(name, (3, 32, 32), LABELS[kind][1], pixels, training, test)


def _read_files(
    folder: Path, files: Sequence[Sequence[str]], num_published: int, key: bytes, num_classes: int
) -> Examples:
    """Return the training set or the test set. `files` are pairs of a name and an MD5 sum."""
    parts = []
    for name, md5 in files:
        path, count = folder / name, num_published // len(files)
        # Only the MD5 sum can detect a changed pixel. A file that is too small for the published number of images was
        # made by the user, for example as a subset of the dataset, so its MD5 sum is unknown.
        if path.stat().st_size >= count * NUM_BYTES:
            found = torchvision.datasets.utils.calculate_md5(path)
            if found != md5:
                _refuse(path, f"its MD5 sum is {found}, but the published file of {count} images has {md5}")
        parts.append(_read(path, key, num_classes))
    images, labels = zip(*parts, strict=True)
    return Examples(torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels)))


def _read(path: Path, key: bytes, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [n, NUM_BYTES], and the labels, int64 [n], in one file."""
    content = _unpickled(path)
    for wanted in (b"data", key):
        if not isinstance(content, dict) or wanted not in content:
            _refuse(path, f"it lacks the key {wanted.decode()!r}, which all files of {path.parent.name} contain")
    images, labels = content[b"data"], content[key]
    if not isinstance(images, np.ndarray) or images.ndim != 2 or not len(images):
        _refuse(path, f"its data are not an array of bytes with shape [n, {NUM_BYTES}] and at least one image")
    if images.dtype != np.uint8 or images.shape[1] != NUM_BYTES:
        found = f"type {images.dtype} and shape {list(images.shape)}"
        _refuse(path, f"its data have {found}, but must have type uint8 and shape [n, {NUM_BYTES}]")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        _refuse(path, f"its {key.decode()} are not a list of whole numbers")
    if len(labels) != len(images):
        _refuse(path, f"it contains {len(images)} images, but {len(labels)} {key.decode()}")
    if min(labels) < 0 or max(labels) >= num_classes:
        found = f"{min(labels)}..{max(labels)}"
        _refuse(path, f"its {key.decode()} are in {found}, but must be in 0..{num_classes - 1}")
    return np.ascontiguousarray(images), np.array(labels, dtype=np.int64)


class _Unpickler(pickle.Unpickler):
    """An unpickler that allows only the functions that numpy needs to create an array of numbers."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 has renamed the module numpy.core to numpy._core. A file may contain the old or the new name.
        if (module.replace("numpy._core", "numpy.core"), name) == ("numpy.core.multiarray", "_reconstruct"):
            return _new_array
        if (module, name) == ("numpy", "ndarray"):
            return object  # only an argument of _new_array
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        raise pickle.UnpicklingError(
            f"loading this pickle file would call {module}.{name}, which a file of images does not need"
        )


def _new_array(*arguments: Any) -> np.ndarray:
    """Return an empty array, which the unpickler then fills. The arguments in the file are ignored."""
    return np.empty(0, np.uint8)


def _unpickled(path: Path) -> Any:
    """Return the content of a pickle file. No function that the file names is called, except numpy's for arrays."""
    with path.open("rb") as stream:
        try:
            # Python 2 stored the pixels as a string. With the encoding "bytes", Python 3 reads this string as bytes.
            return _Unpickler(stream, encoding="bytes").load()
        except Exception as error:  # a truncated file or a file of another kind can raise many different errors
            _refuse(path, f"it cannot be read as a pickle of images ({type(error).__name__}: {error})", error)


def _refuse(path: Path, found: str, cause: Exception | None = None) -> NoReturn:
    """Raise a SettingError that says what is wrong with a damaged file and what the user can do."""
    raise SettingError(f"{path} is damaged: {found}; {DOWNLOAD_AGAIN}") from cause
