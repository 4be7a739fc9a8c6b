"""Held-out and training texts, and their n-grams. `ngrams` defines words and n-grams."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.reading.index import byte_ranges, read_index
from data_prep.reading.ngrams import ngram_hashes, unit_hashes_of
from data_prep.reading.spool import READ_BYTES, read_texts
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task

TASK_BYTES = 32 << 20
"""Approximate number of bytes of text that one task reads. It needs up to 6 times as much memory."""
_MAX_TASK_BYTES = 256 << 20
"""The same for a terabyte of text or more."""
_MANY_TASKS = 4000
"""Number of tasks from which each reads more than TASK_BYTES."""
_BATCH_BYTES = 1 << 16
"""Approximate number of bytes of text that are hashed together. Larger batches are not faster."""


class Texts(NamedTuple):
    """Some texts: every `step`-th entry from `start` (included) to `end` (excluded) of an index file."""

    path: str
    """Path of the index file, which contains an index entry (`index.ENTRY`) per text."""
    sha256: str
    """SHA-256 digest of the index file."""
    spool: str
    """Path of the spool folder, which contains the texts."""
    start: int
    end: int
    step: int = 1

    def entries(self) -> np.ndarray:
        """Return the index entry of each text."""
        return read_index(Path(self.path))[self.start : self.end : self.step]

    def divided(self) -> list["Texts"]:
        """Divide the texts into parts, one for each task."""
        num_bytes = self.entries()["num_bytes"]
        most = min(max(TASK_BYTES, int(num_bytes.sum(dtype=np.int64)) // _MANY_TASKS), _MAX_TASK_BYTES)
        # Each part begins at a multiple of `step`, so that together the parts contain the same texts.
        ranges = byte_ranges(num_bytes, 0, len(num_bytes), most)
        return [
            self._replace(start=self.start + first * self.step, end=min(self.start + last * self.step, self.end))
            for first, last in ranges
        ]


class TextsTask(Task):
    """A task whose field `texts` is a `Texts` object."""

    @classmethod
    def from_fields(cls, values: dict) -> "TextsTask":
        return cls(**values | {"texts": Texts(*values["texts"])})


def range_of(sorted_hashes: np.ndarray, part: int, num_parts: int) -> slice:
    """Return the slice of sorted hashes that belongs to one of `num_parts` equal ranges of hashes."""
    start = np.searchsorted(sorted_hashes, np.uint64(2**64 * part // num_parts))
    if part + 1 == num_parts:
        return slice(int(start), len(sorted_hashes))
    return slice(int(start), int(np.searchsorted(sorted_hashes, np.uint64(2**64 * (part + 1) // num_parts))))


def contains_ordered(sorted_hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return a bool array: True for each element of `ordered` that is in `sorted_hashes`. Both are sorted."""
    if not len(sorted_hashes):
        return np.zeros(len(ordered), bool)
    position = np.searchsorted(sorted_hashes, ordered)
    return sorted_hashes[np.minimum(position, len(sorted_hashes) - 1)] == ordered


def load_part(folder: str, part: int) -> np.ndarray:
    """Return the sorted hashes of the held-out n-grams that are in one range of hashes (see `overlap.MergeTask`)."""
    return np.fromfile(Path(folder) / f"{part:06d}.ngrams", np.uint64)


def ngrams_of(
    texts: Texts, size: int, heartbeat: Heartbeat, wanted: Callable[[np.ndarray], np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all n-grams of some texts, uint64, and the index of the text of each n-gram, int32.

    Args:
        texts: the texts.
        size: number of words of an n-gram, n.
        heartbeat: the heartbeat of the task.
        wanted: returns for an array of hashes a bool array, which says which hashes to return; None: all.
    """
    hashes, text_of = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
    for batch in batches(texts, size, heartbeat):
        chosen = slice(None) if wanted is None else np.flatnonzero(wanted(batch.hashes))
        hashes.append(batch.hashes[chosen])
        text_of.append(batch.text_of[chosen])
    return np.concatenate(hashes), np.concatenate(text_of)


class Batch(NamedTuple):
    """The n-grams of some of the texts."""

    num_units: int
    """Number of words of these texts."""
    hashes: np.ndarray
    """Hash of each n-gram, uint64."""
    starts: np.ndarray
    """Index of the first word of each n-gram, in the sequence of the words of these texts."""
    text_of: np.ndarray
    """Index of the text of each n-gram, in the sequence of all texts, int32."""


def batches(texts: Texts, size: int, heartbeat: Heartbeat) -> Iterator[Batch]:
    """Yield the n-grams of all texts, in order. Short texts are hashed together, because that is several times as fast.

    Args:
        texts: the texts.
        size: number of words of an n-gram, n.
        heartbeat: the heartbeat of the task.
    """
    entries = texts.entries()
    for start, end in byte_ranges(entries["num_bytes"], 0, len(entries), READ_BYTES):
        read = read_texts(Path(texts.spool), entries[start:end], heartbeat.beat)
        for first, last in byte_ranges(entries["num_bytes"], start, end, _BATCH_BYTES):
            units, counts = unit_hashes_of(read[first - start : last - start])
            text_of = np.repeat(np.arange(first, last, dtype=np.int32), counts)
            # An n-gram that begins in one text and ends in the next is none.
            starts = np.flatnonzero(text_of[: max(0, len(units) - size + 1)] == text_of[size - 1 :])
            heartbeat.beat()
            yield Batch(len(units), ngram_hashes(units, size)[starts], starts, text_of[starts])
        del read  # before the next texts are read
