"""The files of CIFAR-10 and CIFAR-100: read without executing anything, and checked, so that damage never trains.

They are pickles of Python 2: {b"data": uint8 [n, 3072], b"labels" or b"fine_labels": [n], ...}.
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
"""Of an image: channel after channel, row after row."""


@dataclass(frozen=True)
class File:
    """A file as it was published."""

    name: str
    num_examples: int
    md5: str


@dataclass(frozen=True)
class Layout:
    """Where a dataset's images and labels lie."""

    folder: str
    labels: bytes
    """Their key."""
    num_classes: int
    training: tuple[File, ...]
    test: tuple[File, ...]


# The md5 sums are those that torchvision checks after a download.
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
    """Whether all its files are there."""
    return all((data_root / layout.folder / file.name).is_file() for file in layout.training + layout.test)


def read_files(data_root: Path, layout: Layout, files: Sequence[File]) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 [n, NUM_BYTES], and labels, int64 [n], of the files one after the other.

    Raises:
        SettingError: a file is damaged.
    """
    images, labels = zip(*(_read(data_root / layout.folder / file.name, file, layout) for file in files), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read(path: Path, file: File, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Images (read-only, a view of what was read) and labels of a file."""
    _check_md5(path, file)
    content = _unpickled(path)
    for key in (b"data", layout.labels):
        if not isinstance(content, dict) or key not in content:
            _refuse(path, f"it does not hold {key.decode()!r}, as a file of {layout.folder} does")
    images, labels = _images(path, content[b"data"]), content[layout.labels]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        _refuse(path, f"its {layout.labels.decode()} are not a list of whole numbers")
    if len(labels) != len(images):
        _refuse(path, f"it holds {len(images)} images, but {len(labels)} {layout.labels.decode()}")
    if min(labels) < 0 or max(labels) >= layout.num_classes:
        found = f"{min(labels)}..{max(labels)}"
        _refuse(path, f"its {layout.labels.decode()} {found} do not lie in 0..{layout.num_classes - 1}")
    return images, np.array(labels, dtype=np.int64)


def _check_md5(path: Path, file: File) -> None:
    """A flipped byte of a pixel or a label can be told by nothing else.

    Smaller files cannot hold as many examples as the published one: they are somebody's own, with sums of their own.
    """
    if path.stat().st_size < file.num_examples * NUM_BYTES:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != file.md5:
        _refuse(path, f"its md5 is {found}, that of the published file of {file.num_examples} images {file.md5}")


class _Recorded:
    """Stands in for whatever of numpy a file calls: keeps what it is given, does nothing."""

    arguments: tuple = ()
    state: Any = None

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Only what an array needs, and even that as _Recorded: no file can execute anything."""

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
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which no file of images needs")
        return _Recorded


def _unpickled(path: Path) -> Any:
    with path.open("rb") as stream:
        try:
            # Of Python 2: its text are bytes, pixels among them.
            return _Unpickler(stream, encoding="bytes").load()
        except Exception as error:
            # What is no pickle, or the half of one, ends in as many kinds of error as there are places to cut it.
            _refuse(path, f"it cannot be read as a pickle of images ({type(error).__name__}: {error})", error)


def _images(path: Path, data: Any) -> np.ndarray:
    """What numpy would make of the recorded array: uint8 [n, NUM_BYTES]."""
    try:
        _, shape, dtype, by_column, values = data.state
        (kind, *_), (num_images, num_bytes) = dtype.arguments, shape
        if kind in (b"u1", "u1") and num_images and num_bytes == NUM_BYTES:
            return np.ascontiguousarray(np.frombuffer(values, np.uint8).reshape(shape, order="F" if by_column else "C"))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # no array, or not as long as it tells
        _refuse(path, f"its data are not an array of bytes [n, {NUM_BYTES}] ({error})", error)
    _refuse(path, f"its data are {kind!r} {list(shape)}, not 'u1' [n, {NUM_BYTES}] with at least one image")


def _refuse(path: Path, found: str, cause: Exception | None = None) -> NoReturn:
    raise SettingError(f"{path} is damaged: {found}; remove it, and it is fetched anew where there is a network") from (
        cause
    )
