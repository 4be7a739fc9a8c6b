"""Index entries, and the index file. An index entry gives the position and length of the text of a document or passage.

The text is in the spool, a folder of plain text files. A passage is a document, or a piece of a long document. Only
the index entries are kept in memory, not the text of the corpus.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# The index entry of one document or passage, 60 bytes.
ENTRY = np.dtype(
    [
        ("key", "V16"),  # pseudo-random sort key: hash(seed, hash of the document's text, passage number)
        ("document", "V16"),  # hash of the document's text, without the seed: equal only for equal documents
        ("offset", np.int64),  # start of the text in the spool file, in bytes
        ("shard", np.int32),  # number of the spool file
        ("num_bytes", np.int32),
        ("num_words", np.int32),
        ("source", np.int16),  # index of the source in the list of sources
        ("group", np.int16),  # index of the snapshot (point in time, see `dates`); 0 in a stream without snapshots
        ("passage", np.int32),  # index of the passage in its document; 0 if the document is not cut
    ]
)
# What the spool stores about a document, 68 bytes. It depends only on the document and its place in the spool file, so
# that text that was read once can be used with any seed, share or division into splits (see `read.make_entries`).
SPOOLED = np.dtype(
    [
        ("identity", "V32"),  # SHA-256 digest of the document's text
        ("offset", np.int64),  # start of the text in the spool file, in bytes
        ("part", np.int32),  # index of the part of a file that the document comes from, in the task that read it
        ("num_bytes", np.int32),
        ("num_words", np.int32),
        ("date", np.int64),  # date of the document, see `dates`
        ("id", np.uint64),  # hash of the id. It orders copies of a text whose dates and sources are equal
    ]
)
INDEX = "passages.npy"
"""Name of the index file, which contains the index entry of every passage."""
_WRITTEN_PASSAGES = 1 << 20
"""Number of index entries (one per passage) that are sorted and written at a time. Sorting copies the entries, so
sorting all entries at once would double the memory use."""


class Index(NamedTuple):
    """The passages of a stream in their final order, and the boundaries of the splits."""

    path: Path
    """Path of the index file. It contains the index entry (`ENTRY`) of every passage, in the order in which the stream
    stores the passages."""
    sha256: str
    """SHA-256 digest of the index file."""
    spool: Path
    """The spool folder, which contains the text of the passages."""
    cuts: list[int]
    """Split boundaries: split s consists of the passages cuts[s] (included) to cuts[s + 1] (excluded)."""
    splits: list[str]
    """Names of the splits, in the order of `cuts`."""
    unions: dict[str, list[str]] = {}  # noqa: RUF012, it is never changed
    """Splits that consist of neighbouring splits, by name. Only a chronological stream has them: its validation set and
    its test set consist of the held-out text of the periods (see `chronological`)."""

    @property
    def passages(self) -> np.ndarray:
        """The index entry (`ENTRY`) of every passage, memory-mapped from the index file."""
        return np.load(self.path, mmap_mode="r")

    def texts(self, start: int, end: int) -> "Texts":
        """Return the passages from `start` (included) to `end` (excluded), for a task."""
        return Texts(str(self.path), self.sha256, str(self.spool), start, end)

    def training(self, only_first: bool = False) -> tuple[int, int]:
        """Return the range (start, end) of the passages that belong to mega-batches, or only to the first of them.

        `end` is excluded.
        """
        # The validation set is stored first, then all mega-batches, then the test set. So the range begins with the
        # first passage of the first mega-batch, and ends with the last passage of the last mega-batch.
        which = [number for number, name in enumerate(self.splits) if is_training(name)]
        return self.cuts[which[0]], self.cuts[which[0 if only_first else -1] + 1]


class Texts(NamedTuple):
    """Some texts: every `step`-th entry from `start` (included) to `end` (excluded) of an index file."""

    path: str
    """Path of the index file, which contains an index entry (`ENTRY`) per text."""
    sha256: str
    """SHA-256 digest of the index file. If the file has changed, the tasks that read it have changed, and are done
    again."""
    spool: str
    """Path of the spool folder, which contains the texts."""
    start: int
    end: int
    step: int = 1

    def entries(self) -> np.ndarray:
        """Return the index entry of each text, memory-mapped."""
        return np.load(self.path, mmap_mode="r")[self.start : self.end : self.step]


def sortable(hashes: np.ndarray) -> np.ndarray:
    """Return 16-byte hashes (NumPy type V16) as texts of bytes, which NumPy can sort and compare. They are not copied.

    NumPy leaves out zeros at the end of such a text. This changes neither order nor equality of texts of one length.
    """
    return np.ascontiguousarray(hashes).view("S16")


def halves(hashes: np.ndarray) -> np.ndarray:
    """Return 16-byte hashes (NumPy type V16) as two integers each, [n, 2], which have the same order."""
    return np.ascontiguousarray(hashes).view(">u8").reshape(-1, 2)


def is_training(split: str) -> bool:
    """Return True if a split is a mega-batch, and not a validation set or a test set, or one of a period."""
    return split.startswith("mega_batch_") and "/" not in split


def write_index(path: Path, passages: np.ndarray, order: np.ndarray) -> None:
    """Write an index file (.npy): the index entries `passages[order]`."""
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(ENTRY), "fortran_order": False, "shape": (len(order),)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(order), _WRITTEN_PASSAGES):
            part = passages[order[start : start + _WRITTEN_PASSAGES]]
            # Set these two fields to 0. They were needed only to compute the order of the passages. If they stayed in
            # the index file, the file's digest could differ although the text of the stream is equal.
            part["source"] = part["group"] = 0
            file.write(part.data)


def order_key(seed: int, identity: bytes, passage_number: int) -> bytes:
    """Return the 16-byte sort key of a passage. Keys are pseudo-random, so sorting by key shuffles the passages.

    `identity` is the SHA-256 digest of the text of the complete document.
    """
    return hashlib.sha256(f"{seed} {passage_number} ".encode() + identity).digest()[:16]


def byte_ranges(num_bytes: np.ndarray, start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide the passages from `start` to `end` into ranges with about `most` bytes of text each.

    A range contains at least one passage, even if the passage is longer than `most` bytes. `num_bytes` is the length of
    every passage, int [n]. Each range is (first passage, index after the last passage).
    """
    ends = np.cumsum(num_bytes[start:end], dtype=np.int64)
    # `done` is the number of bytes from the passage `start` to the beginning of the current range. `ends` also counts
    # bytes from the passage `start`, so the current range ends where `ends` reaches about `done + most`.
    done, position = 0, start
    while position < end:
        stop = min(max(position + 1, start + int(np.searchsorted(ends, done + most))), end)
        yield position, stop
        done, position = int(ends[stop - start - 1]), stop
