"""The index: one entry per document or passage. It is all that a run holds in memory of a corpus."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# 56 bytes per entry.
ENTRY = np.dtype(
    [
        ("key", "V16"),  # its place in the seeded order: hash(seed, identity, passage number)
        ("document", "V16"),  # hash of its document's text, whatever the seed: equal only for equal documents
        ("offset", np.int64),  # where it begins in the spool file, in bytes
        ("shard", np.int32),  # number of the spool file
        ("num_bytes", np.int32),
        ("num_words", np.int32),
        ("source", np.int16),  # number of the --source
        ("group", np.int16),  # number of the snapshot, in a stream that drifts
    ]
)
INDEX = "passages.npy"


class Index(NamedTuple):
    """The file with the ENTRY of every passage, in the order in which passages are written, and the splits."""

    path: Path
    sha256: str
    """Digest of the file: tasks that read another index are other tasks."""
    spool: Path
    cuts: list[int]
    """Where splits begin and end among the passages: split number s is cuts[s] to cuts[s + 1]."""
    splits: list[str]
    """Names of the splits."""

    @property
    def passages(self) -> np.ndarray:
        """ENTRY of every passage."""
        return read_index(self.path)

    def training(self) -> tuple[int, int]:
        """Return where the passages of all mega-batches begin and end."""
        which = [number for number, name in enumerate(self.splits) if name not in ("valid", "test")]
        return self.cuts[which[0]], self.cuts[which[-1] + 1]


def read_index(path: Path) -> np.ndarray:
    """Return the ENTRY of every passage in a file of numpy. The file is mapped into memory, not loaded."""
    return np.load(path, mmap_mode="r")


def byte_ranges(num_bytes: np.ndarray, start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of the passages start..end with about `most` bytes of text, or one passage, each.

    Args:
        num_bytes: int [n], the length of every passage in bytes.
        start: the first passage.
        end: the passage after the last one.
        most: bytes per range.
    """
    ends = np.cumsum(num_bytes[start:end], dtype=np.int64)
    done, position = 0, start
    while position < end:
        stop = max(position + 1, start + int(np.searchsorted(ends, done + most)))
        stop = min(stop, end)
        yield position, stop
        done, position = int(ends[stop - start - 1]), stop
