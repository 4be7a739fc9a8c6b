"""Read the CIFAR-10 and CIFAR-100 files.

Each file is a pickle that was written by Python 2. It contains a dictionary with n images and their labels:
{b"data": uint8 [n, 3072], b"labels" or b"fine_labels": [n], ...}.

Unpickling normally can execute code that a file contains. The functions here do not execute such code. They check each
file, so that no network is trained on damaged data.
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
"""What the user can do about a damaged file. Every message about a damaged file ends with this text."""


@dataclass(frozen=True)
class File:
    """A file of a published dataset."""

    name: str
    num_examples: int
    md5: str
    """The MD5 sum of the published file, in hexadecimal."""


@dataclass(frozen=True)
class Layout:
    """The files of a dataset: their names, and what they contain."""

    folder: str
    """Name of the folder that contains the files."""
    labels: bytes
    """Key of the labels in the pickled dictionary."""
    num_classes: int
    training: tuple[File, ...]
    """Files of the training set. The examples of the first file come first."""
    test: tuple[File, ...]
    """Files of the test set. The examples of the first file come first."""


# The MD5 sums are those that torchvision also checks after a download.
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
    """Read some files of a dataset, and return their images, uint8 [n, NUM_BYTES], and labels, int64 [n].

    Args:
        data_root: the data folder.
        layout: describes the dataset.
        files: the files to read. The examples are returned in the order of this list.

    Raises:
        SettingError: if a file is damaged.
    """
    images, labels = zip(*(_read(data_root / layout.folder / file.name, file, layout) for file in files), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read(path: Path, file: File, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of one file.

    The array of images may be read-only, because it can share memory with the unpickled bytes object.
    """
    _check_md5(path, file)
    content = _unpickled(path)
    for key in (b"data", layout.labels):
        if not isinstance(content, dict) or key not in content:
            _refuse(path, f"it lacks the key {key.decode()!r}, which all files of {layout.folder} contain")
    images, labels = _images(path, content[b"data"]), content[layout.labels]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        _refuse(path, f"its {layout.labels.decode()} are not a list of whole numbers")
    if len(labels) != len(images):
        _refuse(path, f"it contains {len(images)} images, but {len(labels)} {layout.labels.decode()}")
    if min(labels) < 0 or max(labels) >= layout.num_classes:
        found = f"{min(labels)}..{max(labels)}"
        _refuse(path, f"its {layout.labels.decode()} are in {found}, but must be in 0..{layout.num_classes - 1}")
    return images, np.array(labels, dtype=np.int64)


def _check_md5(path: Path, file: File) -> None:
    """Raise SettingError if the MD5 sum of a file differs from the MD5 sum of the published file.

    Only the MD5 sum can detect a changed pixel or label. The other checks in this module look at types and shapes, and
    at the range of the labels.

    Exception: a file that is too small for the published number of examples is not checked. Such a file was made by
    the user, for example as a subset of the dataset, so its MD5 sum is unknown.
    """
    if path.stat().st_size < file.num_examples * NUM_BYTES:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != file.md5:
        _refuse(path, f"its MD5 sum is {found}, but the published file of {file.num_examples} images has {file.md5}")


class _Recorded:
    """Stand-in for numpy's functions and classes while a pickle file is read.

    When a pickle file contains the instruction to call a numpy function or class, the unpickler does not execute the
    call. Instead, it creates an object of this class, which only records the arguments of the call.
    """

    arguments: tuple = ()
    state: Any = None

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that does not execute code that a file contains.

    The pickle file of a numpy array names the numpy functions and classes that create the array. This unpickler uses
    `_Recorded` instead of them. It refuses a pickle file that names any other function or class.
    """

    known = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            # numpy 2 has renamed the module numpy.core to numpy._core. A file may contain the old or the new name, so
            # accept both.
            ("numpy._core.multiarray", "_reconstruct"),
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
    """Return the content of a pickle file. In it, a `_Recorded` object replaces each numpy array and dtype.

    A `_Recorded` object only records the arguments from which numpy would create the array or dtype. No code that the
    file names is executed.
    """
    with path.open("rb") as stream:
        try:
            # Python 2 stored the pixels as a string. With the encoding "bytes", Python 3 reads this string as bytes.
            return _Unpickler(stream, encoding="bytes").load()
        except Exception as error:
            # Catch every error, because unpickling a truncated file or a file of another kind can raise many
            # different errors.
            _refuse(path, f"it cannot be read as a pickle of images ({type(error).__name__}: {error})", error)


def _images(path: Path, data: Any) -> np.ndarray:
    """Return the images of a file, uint8 [n, NUM_BYTES].

    Args:
        path: the file, named in error messages.
        data: the `_Recorded` object that `_unpickled` returned in place of the array of images.
    """
    try:
        _, shape, dtype, by_column, values = data.state
        (kind, *_), (num_images, num_bytes) = dtype.arguments, shape
        if kind in (b"u1", "u1") and num_images and num_bytes == NUM_BYTES:
            return np.ascontiguousarray(np.frombuffer(values, np.uint8).reshape(shape, order="F" if by_column else "C"))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        # The file is damaged: `data` does not have the attributes that describe an array, or the number of bytes does
        # not fit the shape of the array.
        _refuse(path, f"its data are not an array of bytes with shape [n, {NUM_BYTES}] ({error})", error)
    required = f"type 'u1' (uint8) and shape [n, {NUM_BYTES}] with at least one image"
    _refuse(path, f"its data have type {kind!r} and shape {list(shape)}, but must have {required}")


def _refuse(path: Path, found: str, cause: Exception | None = None) -> NoReturn:
    """Raise a SettingError that says what is wrong with a damaged file and what the user can do.

    Args:
        path: the file.
        found: what is wrong with the file.
        cause: the exception that revealed the damage, if there was one.
    """
    raise SettingError(f"{path} is damaged: {found}; {DOWNLOAD_AGAIN}") from cause
