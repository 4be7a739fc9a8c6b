"""Find n-grams that occur both in held-out text (validation set, test set, benchmarks) and in training text.

The work is divided into tasks:

1. NgramsTask    hashes the n-grams of a part of the held-out text.
2. MergeTask     combines the hashes of all parts into sorted files, one for each range of hashes.
3. ScanTask      looks up the n-grams of a part of the training text in these files. So the training text is read once.
4. CoverTask     counts the held-out words that are part of an n-gram that was found. Only for the report.

Memory: a task holds the hashes of its own text, and one of the sorted files at a time, which has up to 32 MB, or more
if more than 50 GB of text are held out. No process holds all hashes of the held-out text. `ngrams` defines words and
n-grams.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data_prep.accounts import count_documents
from data_prep.reading.index import Texts, byte_ranges
from data_prep.reading.ngrams import distinct, ngram_hashes, unit_hashes_of
from data_prep.reading.spool import READ_BYTES, read_texts
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task
from data_prep.running.work_folder import WorkFolder
from fairseq_alma.core.files import sha256_of

TASK_BYTES = 32 << 20
"""Approximate number of bytes of text that one task reads. It needs up to 6 times as much memory."""
_MAX_TASK_BYTES = 256 << 20
"""The same for a terabyte of text or more."""
_MANY_TASKS = 4000
"""Number of tasks from which each reads more than TASK_BYTES."""
_BATCH_BYTES = 1 << 16
"""Approximate number of bytes of text that are hashed together. Larger batches are not faster."""


def divided(texts: Texts, task_bytes: int | None = None) -> list[Texts]:
    """Divide texts into parts of about `task_bytes` bytes of text, one for each task; None: TASK_BYTES."""
    num_bytes = texts.entries()["num_bytes"]
    most = min(max(task_bytes or TASK_BYTES, int(num_bytes.sum(dtype=np.int64)) // _MANY_TASKS), _MAX_TASK_BYTES)
    # Each part begins at a multiple of `step`, so that together the parts contain the same texts.
    return [
        texts._replace(start=texts.start + first * texts.step, end=min(texts.start + last * texts.step, texts.end))
        for first, last in byte_ranges(num_bytes, 0, len(num_bytes), most)
    ]


def range_of(sorted_hashes: np.ndarray, part: int, num_parts: int) -> slice:
    """Return the slice of sorted hashes that belongs to one of `num_parts` equal ranges of hashes."""
    last = np.uint64(2**64 * (part + 1) // num_parts - 1)
    start = np.searchsorted(sorted_hashes, np.uint64(2**64 * part // num_parts))
    return slice(int(start), int(np.searchsorted(sorted_hashes, last, side="right")))


def contains_ordered(sorted_hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return a bool array: True for each element of `ordered` that is in `sorted_hashes`. Both are sorted."""
    if not len(sorted_hashes):
        return np.zeros(len(ordered), bool)
    position = np.searchsorted(sorted_hashes, ordered)
    return sorted_hashes[np.minimum(position, len(sorted_hashes) - 1)] == ordered


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

    See `ngrams_of` for the arguments.
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


K = TypeVar("K")

_MERGED_NGRAMS = 1 << 22
"""Approximate number of hashes in a sorted file, unless there would be more than _MAX_PARTS files."""
_MAX_PARTS = 2000
_TABLE_BITS = 25
"""Number of bits of a hash that are looked up first. The table takes 32 MB. Each sorted file fills up to an eighth of
it."""
_TABLE_PARTS = 8
"""Number of sorted files up to which a table is made. Of more files, it would leave out few hashes."""
_TABLE_SHIFT = np.uint64(64 - _TABLE_BITS)


class Found(NamedTuple):
    """The result of `find_overlaps`."""

    ngrams: np.ndarray
    """Hashes of the held-out n-grams that occur in training text, sorted, uint64. Empty if they were not asked for."""
    texts: np.ndarray
    """bool: True for each training text that contains a held-out n-gram, in the order of the training texts."""
    too_short: list[int]
    """For each of the arguments `held_out`, the number of its texts that have no n-gram, because they are too short."""


def find_overlaps(work: WorkFolder, size: int, held_out: Sequence[Texts], training: Texts, keep_ngrams: bool) -> Found:
    """Find the n-grams that occur both in held-out and in training texts.

    Args:
        work: the work folder, or a part of it, for the output of the tasks.
        size: number of words of an n-gram, n.
        held_out: the held-out texts.
        training: the training texts.
        keep_ngrams: whether to return the hashes of the n-grams, which are kept in memory.
    """
    held_out_parts = [divided(part) for part in held_out]
    hashing = [NgramsTask(texts, size) for parts in held_out_parts for texts in parts]
    step = work.run("ngrams", hashing)
    results = step.results()
    of_tasks = iter(results)
    too_short = [sum(next(of_tasks)["too_short"] for _ in parts) for parts in held_out_parts]
    num_ngrams = sum(result["ngrams"] for result in results)
    num_parts = min(max(1, -(-num_ngrams // _MERGED_NGRAMS)), _MAX_PARTS)
    # The hashes of a task are determined by its description, so this digest stands for the hashes of all tasks.
    stamp = hashlib.sha256("".join(task.description() for task in hashing).encode()).hexdigest()
    merging = [MergeTask(str(step.folder), len(hashing), stamp, part, num_parts) for part in range(num_parts)]
    merge = work.run("merge", merging)
    # Each task reads all sorted files. So the more files there are, the more text a task compares.
    parts = divided(training, TASK_BYTES * max(1, num_parts // _TABLE_PARTS))
    scanning = [ScanTask(texts, size, str(merge.folder), num_parts, stamp) for texts in parts]
    scan = work.run("scan", scanning, "search for held-out text")
    found = (np.fromfile(scan.path(number, "found"), np.uint64) for number in range(len(scanning)))
    overlaps = [np.load(scan.path(number, "overlaps.npy")) for number in range(len(scanning))]
    ngrams = _merged(found) if keep_ngrams else np.empty(0, np.uint64)
    return Found(ngrams, np.concatenate([np.empty(0, bool), *overlaps]), too_short)


def _merged(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return the different hashes of several arrays, sorted."""
    found, waiting = np.empty(0, np.uint64), [np.empty(0, np.uint64)]
    for array in arrays:
        waiting.append(array)
        # Sorting everything after each array would take time that grows with the square of the number of arrays.
        if sum(map(len, waiting)) > len(found):
            found, waiting = distinct(np.concatenate([found, *waiting])), waiting[:1]
    return distinct(np.concatenate([found, *waiting]))


@dataclass(frozen=True)
class NgramsTask(Task):
    """Task that writes the hashes of all n-grams of some texts, sorted, uint64, to PREFIX.ngrams."""

    texts: Texts
    size: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        hashes, text_of = ngrams_of(self.texts, self.size, heartbeat)
        with heartbeat.computing():  # sorting takes long
            hashes = distinct(hashes)
        hashes.tofile(f"{prefix}.ngrams")
        return {"ngrams": len(hashes), "too_short": len(self.texts.entries()) - len(np.unique(text_of))}


@dataclass(frozen=True)
class MergeTask(Task):
    """Task that combines the results of all NgramsTasks, for one range of hashes, and writes them to PREFIX.ngrams."""

    folder: str
    count: int
    stamp: str
    """Digest of the descriptions of all NgramsTasks. If one of them has changed, this task is done again."""
    part: int
    num_parts: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        found = []
        for number in range(self.count):
            heartbeat.beat()
            path = Path(self.folder) / f"{number:06d}.ngrams"
            if path.stat().st_size:
                hashes = np.memmap(path, np.uint64, "r")
                found.append(np.array(hashes[range_of(hashes, self.part, self.num_parts)]))
        with heartbeat.computing():  # sorting takes long
            merged = distinct(np.concatenate([np.empty(0, np.uint64), *found]))
        merged.tofile(f"{prefix}.ngrams")
        return {}


@dataclass(frozen=True)
class ScanTask(Task):
    """Task that looks for held-out n-grams in some training texts.

    It writes two files. PREFIX.found: the hashes of the held-out n-grams that occur in these texts, sorted, uint64.
    PREFIX.overlaps.npy: bool, True for each text that contains at least one of them.
    """

    texts: Texts
    size: int
    folder: str
    """Folder with the output of the MergeTasks."""
    num_parts: int
    stamp: str

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        hashes, text_of = ngrams_of(self.texts, self.size, heartbeat, self._is_possible(heartbeat))
        with heartbeat.computing():  # sorting takes long
            order = np.argsort(hashes)
        hashes, text_of = hashes[order], text_of[order]
        overlaps = np.zeros(len(self.texts.entries()), bool)
        with open(f"{prefix}.found", "wb") as file:
            for part in range(self.num_parts):
                heartbeat.beat()
                of_part = range_of(hashes, part, self.num_parts)
                is_found = contains_ordered(self._load(part), hashes[of_part])
                overlaps[text_of[of_part][is_found]] = True
                distinct(hashes[of_part][is_found]).tofile(file)
        np.save(f"{prefix}.overlaps.npy", overlaps)
        return {}

    def _is_possible(self, heartbeat: Heartbeat) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return a function that says which hashes can be in the held-out text; None: it would leave out few.

        Hashes that it leaves out take no memory and are not sorted.
        """
        if self.num_parts > _TABLE_PARTS:
            return None
        # A table says which first bits occur among the held-out hashes.
        is_possible = np.zeros(1 << _TABLE_BITS, bool)
        for part in range(self.num_parts):
            heartbeat.beat()
            is_possible[self._load(part) >> _TABLE_SHIFT] = True
        return lambda found: is_possible[found >> _TABLE_SHIFT]

    def _load(self, part: int) -> np.ndarray:
        """Return the sorted hashes of the held-out n-grams that are in one range of hashes (see `MergeTask`)."""
        return np.fromfile(Path(self.folder) / f"{part:06d}.ngrams", np.uint64)


@dataclass(frozen=True)
class CoverTask(Task):
    """Task that counts the words of held-out texts that are part of an n-gram in a file.

    It writes the documents of all texts, and of the texts with such n-grams (the entry `document` in `index.ENTRY`),
    to PREFIX.documents and PREFIX.overlapping_documents. Its result contains the numbers of words.
    """

    texts: Texts
    size: int
    ngrams: str
    """Path of the file with the sorted hashes of n-grams."""
    ngrams_sha256: str

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        ngrams, entries = np.fromfile(self.ngrams, np.uint64), self.texts.entries()
        num_words = num_covered = 0
        overlapping = np.zeros(len(entries), bool)
        for batch in batches(self.texts, self.size, heartbeat):
            num_words += batch.num_units
            order = np.argsort(batch.hashes)  # the search is faster if neighbouring elements are close to each other
            found = order[contains_ordered(ngrams, batch.hashes[order])]
            covered = np.zeros(batch.num_units, bool)
            covered[(batch.starts[found][:, None] + np.arange(self.size)).ravel()] = True
            num_covered += int(covered.sum())
            overlapping[batch.text_of[found]] = True
        for ending, chosen in (("documents", entries), ("overlapping_documents", entries[overlapping])):
            Path(f"{prefix}.{ending}").write_bytes(np.ascontiguousarray(chosen["document"]).tobytes())
        return {"words": num_words, "overlapping_words": num_covered}


def count_overlaps(
    work: WorkFolder, size: int, held_out: Mapping[K, Texts], ngrams: np.ndarray
) -> dict[K, dict[str, int]]:
    """Return how many documents and words of held-out texts have n-grams that occur in training text, by name.

    Args:
        work, size: see `find_overlaps`.
        held_out: the held-out texts, by name.
        ngrams: `Found.ngrams`.
    """
    path = work.folder / "found.ngrams"
    ngrams.tofile(path)
    parts = {name: divided(texts) for name, texts in held_out.items()}
    sha256 = sha256_of(path)
    tasks = [CoverTask(texts, size, str(path), sha256) for name in parts for texts in parts[name]]
    step = work.run("cover", tasks)
    results = step.results()
    found, first = {}, 0
    for name, texts in parts.items():
        numbers = range(first, first + len(texts))
        first = numbers.stop
        counts = {word: sum(results[number][word] for number in numbers) for word in ("words", "overlapping_words")}
        for ending in ("documents", "overlapping_documents"):
            documents = [np.fromfile(step.path(number, ending), "V16") for number in numbers]
            counts[ending] = count_documents(np.concatenate([np.empty(0, "V16"), *documents]))
        found[name] = counts
    return found
