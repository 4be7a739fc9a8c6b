"""Tasks that find pairs of documents that could be copies of each other, from the signatures of all documents.

Documents are numbered by priority: of two documents that are copies of each other, the one with the smaller number
stays. A pair is therefore (better, worse), with better < worse. No other order shows in the result.

A bucket consists of all documents that have an equal hash in one band (see `signatures`). Pages of one template can
fill buckets with millions of documents, so not all pairs of a bucket are compared, but a limited number per document:
with the documents of the bucket that have the best priority, and with documents that also have nearby hashes in the
next band. In buckets of up to NUM_REPRESENTATIVES + 1 documents, these are all pairs. In a larger bucket, a pair can be
missed, unless its hashes are also equal in the next band. With similarity 0.9, this is the case for at least one of the
bands with probability 0.99, with similarity 0.8 with probability 0.5. So near copies among pages of a template with
more than about a thousand pages are found less often than other near copies, but they cost no more time.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.reading.signatures import (
    ANCHOR,
    ANCHOR_RATE,
    NO_BAND,
    NUM_BANDS,
    SKETCH_BYTES,
    SignatureFiles,
    estimate_similarity,
)
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task, digests_of

NUM_REPRESENTATIVES = 16
"""Number of documents of a bucket, those with the best priority, that the other documents are compared with."""
NUM_NEIGHBOURS = 8
"""Number of further documents of a bucket that a document is compared with."""
NUM_CONTAINERS = 8
"""Number of documents with an anchor, those with the best priority, that a document with this anchor is paired with."""
ENOUGH_COPIES = 2
"""A document with this number of sure pairs in a bucket is not compared with the rest of the bucket. If it has as many
sure pairs in total, its text is not compared."""
POSSIBLE = 0.72
"""Estimated similarity below which two documents are no copies. It is 4 standard errors below 0.8."""
SURE = 0.9
"""Estimated similarity from which two documents are copies. It is 5 standard errors above 0.8."""
SURE_IN_STREAM = 0.76
"""The same for a document that is already in the stream, whose text cannot be read again. It is 2 standard errors below
0.8, so that 99% of the copies with similarity 0.8 or more are found."""
PAIR = np.dtype([("better", np.int64), ("worse", np.int64), ("sure", bool)])
MATCH = np.dtype([("better", np.int64), ("worse", np.int64), ("needed", np.uint8)])
"""Two documents with an equal anchor, and the number of equal anchors with which the texts are compared."""
_MAPPED_FILES = 256
"""Number of files with sketches that stay mapped into memory. Each takes a file descriptor, of which many systems allow
only 1024. Other files are mapped again in each call of `Corpus.sketches`, so it should get many documents at a time."""
_CORPUS, _PRIORITY, _BY_PRIORITY = "corpus.json", "priority.npy", "by_priority.npy"
_DOCUMENTS_PER_TASK = 1 << 23
"""Largest number of documents of which one task loads the keys. A document takes about 80 bytes."""
_ANCHORS_PER_TASK = 1 << 22
"""Largest number of anchors that one task loads, if hashes are evenly spread. An anchor takes about 50 bytes."""
_ROWS_OF_SMALL_TASK = 1 << 18
"""Number of documents, times bands, that is too small to be divided among several tasks."""
_MIN_MERGED = 1 << 20
"""Number of records, of about 20 bytes, from which it is worthwhile to sort them before all are there."""
_CHUNK_PAIRS = 1 << 15
"""Number of pairs whose sketches, 512 bytes, are compared at a time. The documents are in random order, so the larger
this number, the more sketches are read from a file each time that the file is opened."""


class Corpus:
    """The signature files of all documents, and the order of the documents, in a folder that `save_corpus` wrote."""

    def __init__(self, folder: Path):
        content = json.loads((folder / _CORPUS).read_text())
        self.folder = folder
        self.files = [SignatureFiles(Path(prefix)) for prefix in content["prefixes"]]
        """First the files of the stream to extend, then those of the new documents."""
        self.num_known: int = content["num_known"]
        """Number of documents in the stream to extend. They have the numbers 0 to num_known - 1 by priority."""
        self.priority = np.load(folder / _PRIORITY, mmap_mode="r")
        """Number of each document by priority; -1 for an exact copy of another document, which is left out."""
        self._by_priority = np.load(folder / _BY_PRIORITY, mmap_mode="r")
        self._offsets = np.cumsum([0, *(each.num_documents for each in self.files)])
        self._map = functools.lru_cache(_MAPPED_FILES)(lambda number: self.files[number].map_sketches())

    def place(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of the file, and the index in the file, of documents given by their numbers by priority."""
        documents = self._by_priority[numbers].astype(np.int64)
        file = np.searchsorted(self._offsets, documents, side="right") - 1
        return file, documents - self._offsets[file]

    def sketches(self, numbers: np.ndarray, beat: Callable[[], None] = lambda: None) -> np.ndarray:
        """Return the sketches of documents, given by their numbers by priority, uint8 [n, SKETCH_BYTES].

        `beat` is called for each file that is read.
        """
        file, row = self.place(numbers)
        # Read file by file, and each file from its start to its end.
        order = np.lexsort((row, file))
        file, row = file[order], row[order]
        found = np.empty((len(numbers), SKETCH_BYTES), np.uint8)
        starts = np.flatnonzero(np.diff(file, prepend=-1)).tolist()
        for start, end in itertools.pairwise([*starts, len(file)]):
            beat()
            found[order[start:end]] = self._map(int(file[start]))[row[start:end]]
        return found

    def numbers(self) -> Iterator[tuple[SignatureFiles, np.ndarray]]:
        """Yield each file with the numbers by priority of its documents."""
        for files, (start, end) in zip(self.files, itertools.pairwise(self._offsets), strict=True):
            yield files, self.priority[start:end]

    def digest(self) -> str:
        """Return a digest of everything that the pairs of similar documents depend on."""
        paths = [self.folder / name for name in (_CORPUS, _PRIORITY, _BY_PRIORITY)]
        digests = digests_of([*paths, *(files.bands for files in self.files)])
        return hashlib.sha256("".join(digests).encode()).hexdigest()


def save_corpus(
    folder: Path, files: Sequence[SignatureFiles], num_known: int, priority: np.ndarray, by_priority: np.ndarray
) -> Corpus:
    """Write a folder for `Corpus`. See its attributes. `by_priority` is the document of each number by priority."""
    folder.mkdir(exist_ok=True)
    np.save(folder / _PRIORITY, priority)
    np.save(folder / _BY_PRIORITY, by_priority)
    content = {"prefixes": [str(each.prefix) for each in files], "num_known": num_known}
    (folder / _CORPUS).write_text(json.dumps(content))
    return Corpus(folder)


@functools.lru_cache(maxsize=1)
def load_corpus(folder: str, sha256: str) -> Corpus:
    """Load a corpus, or return it from the cache. `sha256` is its digest, which only the cache uses."""
    return Corpus(Path(folder))


@dataclass(frozen=True)
class BandTask(Task):
    """Task that finds pairs of documents with an equal hash in one of some bands, and estimates their similarity.

    It writes PREFIX.pairs.npy: the pairs (`PAIR`) whose estimated similarity is at least POSSIBLE, sorted.
    """

    corpus: str
    sha256: str
    first_band: int
    num_bands: int
    part: int
    """The task looks at hashes h with h * num_parts // 2^32 == part, to limit its memory."""
    num_parts: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        corpus = load_corpus(self.corpus, self.sha256)
        finder = _Finder(corpus, heartbeat)
        for band in range(self.first_band, self.first_band + self.num_bands):
            self._search(finder, *self._load(corpus, band, heartbeat))
        np.save(f"{prefix}.pairs.npy", finder.found())
        return {"compared": finder.num_compared}

    def _search(self, finder: "_Finder", hashes: np.ndarray, nearby: np.ndarray, documents: np.ndarray) -> None:
        """Compare documents with equal hashes in one band. The arguments are the result of `_load`."""
        order = np.lexsort((documents, hashes))
        hashes, nearby, documents = hashes[order], nearby[order], documents[order]
        start_of, size_of = _buckets(hashes)
        pending = np.flatnonzero(size_of > 1)
        num_sure = np.zeros(len(hashes), np.int8)
        for number in range(NUM_REPRESENTATIVES):
            pending = pending[(pending - start_of[pending] > number) & (num_sure[pending] < ENOUGH_COPIES)]
            if len(pending):
                num_sure[pending] += finder.compare(documents[start_of[pending] + number], documents[pending])
        large = np.flatnonzero(size_of > NUM_REPRESENTATIVES + 1)
        large = large[np.lexsort((documents[large], nearby[large], start_of[large]))]
        for distance in range(1, NUM_NEIGHBOURS + 1):
            left, right = large[:-distance], large[distance:]
            chosen = (start_of[left] == start_of[right]) & (num_sure[np.maximum(left, right)] < ENOUGH_COPIES)
            left, right = left[chosen], right[chosen]
            if len(left):
                # Documents of a bucket are sorted by priority, so the smaller position has the better priority.
                better, worse = np.minimum(left, right), np.maximum(left, right)
                np.add.at(num_sure, worse, finder.compare(documents[better], documents[worse]))

    def _load(self, corpus: Corpus, band: int, heartbeat: Heartbeat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the hashes in a band, the hashes in the next band, and the numbers of the documents of this part."""
        found = []
        for files, documents in corpus.numbers():
            heartbeat.beat()
            hashes = files.load_band(band)
            part = hashes.astype(np.uint64) * np.uint64(self.num_parts) >> np.uint64(32)
            chosen = (hashes != NO_BAND) & (documents >= 0) & (part == self.part)
            nearby = files.load_band((band + 1) % NUM_BANDS)[chosen]
            found.append((hashes[chosen], nearby, documents[chosen].astype(np.int64)))
        hashes, nearby, documents = (np.concatenate(column) for column in zip(*found, strict=True))
        return hashes, nearby, documents


class _Finder:
    """Estimates the similarity of pairs, and collects the pairs that could be copies."""

    def __init__(self, corpus: Corpus, heartbeat: Heartbeat):
        self._corpus, self._heartbeat = corpus, heartbeat
        self._found: list[np.ndarray] = []
        self.num_compared = 0

    def compare(self, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
        """Estimate the similarity of pairs of documents. Return a bool array: True for pairs that are sure copies."""
        is_sure = np.zeros(len(better), bool)
        for start in range(0, len(better), _CHUNK_PAIRS):
            self._heartbeat.beat()
            chunk = slice(start, start + _CHUNK_PAIRS)
            new = np.flatnonzero(worse[chunk] >= self._corpus.num_known)
            left, right = better[chunk][new], worse[chunk][new]
            sketches = self._corpus.sketches(np.concatenate([left, right]), self._heartbeat.beat)
            similarity = estimate_similarity(sketches[: len(left)], sketches[len(left) :])
            in_stream = left < self._corpus.num_known
            sure = similarity >= np.where(in_stream, SURE_IN_STREAM, SURE)
            possible = sure | ((similarity >= POSSIBLE) & ~in_stream)
            self._found.append(_pairs(left[possible], right[possible], sure[possible]))
            is_sure[start + new] = sure
            self.num_compared += len(new)
        return is_sure

    def found(self) -> np.ndarray:
        """Return all pairs (`PAIR`) that could be copies, sorted and without repetitions."""
        return sorted_unique(np.concatenate([np.empty(0, PAIR), *self._found]))[0]


@dataclass(frozen=True)
class AnchorTask(Task):
    """Task that finds pairs of documents with equal anchors: the worse one could be contained in the better one.

    It writes PREFIX.matches.npy: pairs (`MATCH`), once for each anchor that both documents have.
    """

    corpus: str
    sha256: str
    part: int
    num_parts: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        corpus = load_corpus(self.corpus, self.sha256)
        found = []
        limit = 2**64 // ANCHOR_RATE
        lowest, highest = (limit * part // self.num_parts for part in (self.part, self.part + 1))
        for files, numbers in corpus.numbers():
            heartbeat.beat()
            if files.anchors.is_file():
                anchors = files.load_anchors(lowest, highest)
                documents = numbers[anchors["row"]].astype(np.int64)
                chosen = documents >= 0
                found.append((anchors["hash"][chosen], documents[chosen], anchors["needed"][chosen]))
        hashes, documents, needed = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((documents, hashes))
        hashes, documents, needed = hashes[order], documents[order], needed[order]
        start_of, _ = _buckets(hashes)
        queries = np.flatnonzero(needed)
        matches = [np.empty(0, MATCH)]
        for number in range(NUM_CONTAINERS):
            queries = queries[queries - start_of[queries] > number]
            match = np.empty(len(queries), MATCH)
            match["better"], match["worse"] = documents[start_of[queries] + number], documents[queries]
            match["needed"] = needed[queries]
            matches.append(match)
        np.save(f"{prefix}.matches.npy", np.concatenate(matches))
        return {}


def possible_containers(matches: Iterable[np.ndarray]) -> np.ndarray:
    """Return the pairs (`PAIR`) with enough equal anchors, sorted. `matches` are the results of all AnchorTasks."""
    found, counts = merged(matches, MATCH)
    found = found[counts >= found["needed"]]
    return _pairs(found["better"], found["worse"], False)


def candidate_tasks(corpus: Corpus, sha256: str) -> tuple[Sequence[BandTask], Sequence[AnchorTask]]:
    """Return the tasks that find all candidate pairs of a corpus."""
    num_parts = max(1, -(-len(corpus.priority) // _DOCUMENTS_PER_TASK))
    sizes = [files.anchors.stat().st_size for files in corpus.files if files.anchors.is_file()]
    num_anchor_parts = max(1, -(-sum(sizes) // ANCHOR.itemsize // _ANCHORS_PER_TASK))
    where = (str(corpus.folder), sha256)
    # A task has its own costs. So if there are few documents, a task processes several bands.
    step = min(NUM_BANDS, max(1, _ROWS_OF_SMALL_TASK // len(corpus.priority)))
    bands = [
        BandTask(*where, band, min(step, NUM_BANDS - band), part, num_parts)
        for band in range(0, NUM_BANDS, step)
        for part in range(num_parts)
    ]
    return bands, [AnchorTask(*where, part, num_anchor_parts) for part in range(num_anchor_parts)]


def merged(arrays: Iterable[np.ndarray], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the different records of several structured arrays of a type, sorted, and how often each occurs.

    The arrays are taken one by one. The memory that is needed is a small multiple of that of the result.
    """
    found, counts, waiting = np.empty(0, dtype), np.empty(0, np.int32), [np.empty(0, dtype)]

    def add() -> tuple[np.ndarray, np.ndarray]:
        new = np.concatenate(waiting)
        return sorted_unique(np.concatenate([found, new]), np.concatenate([counts, np.ones(len(new), np.int32)]))

    for array in arrays:
        waiting.append(array)
        # Sorting everything after each array would take time that grows with the square of the number of arrays. So
        # wait for as many records as were found before: then each record is sorted about twice.
        if sum(map(len, waiting)) >= max(len(found), _MIN_MERGED):
            found, counts = add()
            waiting = [np.empty(0, dtype)]
    return add()


def sorted_unique(records: np.ndarray, counts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the different records of a structured array, sorted, and how often each occurs.

    This is numpy.unique, but ten times as fast, because it compares one field at a time.

    Args:
        records: the records.
        counts: how often each of them occurs; None: once.
    """
    names = records.dtype.names
    assert names is not None
    order = np.lexsort([records[name] for name in reversed(names)])
    records = records[order]
    is_new = np.ones(len(records), bool)
    is_new[1:] = np.any([records[name][1:] != records[name][:-1] for name in names], axis=0)
    starts = np.flatnonzero(is_new)
    if counts is None:
        return records[starts], np.diff(starts, append=len(records))
    return records[starts], np.add.reduceat(counts[order], starts)


def _buckets(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position where the run of equal hashes of each hash starts, and the length of this run, int64 [n]."""
    is_start = np.ones(len(hashes), bool)
    is_start[1:] = hashes[1:] != hashes[:-1]
    starts = np.flatnonzero(is_start)
    sizes = np.diff(starts, append=len(hashes))
    return np.repeat(starts, sizes), np.repeat(sizes, sizes)


def _pairs(better: np.ndarray, worse: np.ndarray, sure: np.ndarray | bool) -> np.ndarray:
    found = np.empty(len(better), PAIR)
    found["better"], found["worse"], found["sure"] = better, worse, sure
    return found
