"""Read the CIFAR-10 and CIFAR-100 files.

Reading a file executes no code from it. Every file is checked, so that no network is trained on damaged data. Each file
is a pickle, written by Python 2, of a dictionary {b"data": uint8 [n, 3072], b"labels" or b"fine_labels": [n], ...}.
"""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fairseq_alma.core.errors import SettingError

NUM_BYTES = 3 * 32 * 32
"""Number of bytes of an image. The bytes are stored channel by channel, and row by row within a channel."""
DOWNLOAD_AGAIN = "remove it, and the next run with network access downloads it again"
"""The remedy with which every message about a damaged file ends."""


@dataclass(frozen=True)
class File:
    """A file of a published dataset."""

    name: str
    num_examples: int
    md5: str
    """The MD5 sum of the published file, in hexadecimal."""


@dataclass(frozen=True)
class Layout:
    """The names and contents of the files of a dataset."""

    folder: str
    """Name of the folder that contains the files."""
    labels: bytes
    """Key of the labels in the pickled dictionary."""
    num_classes: int
    training: tuple[File, ...]
    """Files of the training set. The examples of the first file come first."""
    test: tuple[File, ...]
    """Files of the test set. The examples of the first file come first."""


# torchvision checks the same MD5 sums after a download.
CIFAR10 = Layout(
    "cifar-10-batches-py",
    b"labels",
    10,
    training=(
        File("data_batch_1", 10_000, "c99cafc152244af753f735de768cd75f"),
        File("data_batch_2", 10_000, "d4bba439e000b95fd0a9bffe97cbabec"),
        File("data_batch_3", 10_000, "54ebc095f3ab1f0389bbae665268c751"),
        File("data_batch_4", 10_000, "634d18415352ddfa80567beed471001a"),
        File("data_batch_5", 10_000, "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    test=(File("test_batch", 10_000, "40351d587109b95175f43aff81a1287e"),),
)
CIFAR100 = Layout(
    "cifar-100-python",
    b"fine_labels",
    100,
    training=(File("train", 50_000, "16019d7e3df5f24257cddd939b257f8d"),),
    test=(File("test", 10_000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
)


def is_complete(data_root: Path, layout: Layout) -> bool:
    """Return True if all files of the dataset exist."""
    return all((data_root / layout.folder / file.name).is_file() for file in layout.training + layout.test)


def read_files(data_root: Path, layout: Layout, files: Sequence[File]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [n, NUM_BYTES], and labels, int64 [n], of some files, concatenated.

    Args:
        data_root: the data folder.
        layout: describes the dataset.
        files: the files of the dataset to read, in this order.

    Raises:
        SettingError: if a file is damaged.
    """
    images, labels = zip(*(_read(data_root / layout.folder / file.name, file, layout) for file in files), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read(path: Path, file: File, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of one file.

    The array of images may be read-only, because it shares memory with the bytes object that was read from the file.
    """
    _check_md5(path, file)
    content = _unpickled(path)
    for key in (b"data", layout.labels):
        if not isinstance(content, dict) or key not in content:
            _refuse(path, f"it does not contain the key {key.decode()!r}, as all files of {layout.folder} do")
    images, labels = _images(path, content[b"data"]), content[layout.labels]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        _refuse(path, f"its {layout.labels.decode()} are not a list of whole numbers")
    if len(labels) != len(images):
        _refuse(path, f"it contains {len(images)} images, but {len(labels)} {layout.labels.decode()}")
    if min(labels) < 0 or max(labels) >= layout.num_classes:
        found = f"{min(labels)}..{max(labels)}"
        _refuse(path, f"its {layout.labels.decode()} {found} are not all in 0..{layout.num_classes - 1}")
    return images, np.array(labels, dtype=np.int64)


def _check_md5(path: Path, file: File) -> None:
    """Raise SettingError if the MD5 sum of a file differs from that of the published file.

    A changed pixel or label can only be detected with the MD5 sum. A file that is too small for the published number of
    examples is not checked: it is a file that the user made, for example a subset, so its MD5 sum is unknown.
    """
    if path.stat().st_size < file.num_examples * NUM_BYTES:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != file.md5:
        _refuse(
            path, f"its MD5 sum is {found}, but that of the published file of {file.num_examples} images is {file.md5}"
        )


class _Recorded:
    """Stands in for numpy's functions and classes while a pickle is read.

    The pickle calls this class instead of them, and the new object only records the arguments of the call.
    """

    arguments: tuple = ()
    state: Any = None

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that cannot execute code from a file.

    It accepts only the functions and classes that a pickled numpy array needs, and replaces each by `_Recorded`.
    """

    known = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),  # since numpy 2
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module: str, name: str) -> type[_Recorded]:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(
                f"loading this pickle file would call {module}.{name}, which a file of images does not need"
            )
        return _Recorded


def _unpickled(path: Path) -> Any:
    """Return the content of a pickle file, with a `_Recorded` object in place of each array and array type."""
    with path.open("rb") as stream:
        try:
            # Python 2 stored pixels as strings. The encoding "bytes" makes Python 3 read these strings as bytes.
            return _Unpickler(stream, encoding="bytes").load()
        except Exception as error:
            # A file that is not a pickle, or that is truncated, can raise many kinds of errors.
            _refuse(path, f"it cannot be read as a pickle of images ({type(error).__name__}: {error})", error)


def _images(path: Path, data: Any) -> np.ndarray:
    """Return the images that `data`, the `_Recorded` form of a numpy array, describes, uint8 [n, NUM_BYTES]."""
    try:
        _, shape, dtype, by_column, values = data.state
        (kind, *_), (num_images, num_bytes) = dtype.arguments, shape
        if kind in (b"u1", "u1") and num_images and num_bytes == NUM_BYTES:
            return np.ascontiguousarray(np.frombuffer(values, np.uint8).reshape(shape, order="F" if by_column else "C"))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # not an array, or wrong length
        _refuse(path, f"its data are not an array of bytes [n, {NUM_BYTES}] ({error})", error)
    required = f"'u1' [n, {NUM_BYTES}] with at least one image"
    _refuse(path, f"its data are {kind!r} {list(shape)}, but must be {required}")


def _refuse(path: Path, found: str, cause: Exception | None = None) -> NoReturn:
    """Raise a SettingError that reports a damaged file and the remedy.

    Args:
        path: the file.
        found: what is wrong with the file.
        cause: the exception that revealed the damage, if there was one.
    """
    raise SettingError(f"{path} is damaged: {found}; {DOWNLOAD_AGAIN}") from cause
