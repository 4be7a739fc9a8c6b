"""Find pairs of documents that are near copies of each other.

1. `candidates` finds pairs that could be copies, and estimates their similarity from signatures.
2. For pairs whose estimate is not clear, and for pairs in which one document could be contained in the other, both
   texts are read from the spool, and compared exactly.

Both steps consist of tasks, so they run in parallel, and an interrupted run continues with the unfinished tasks.
"""

import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from data_prep.copies.candidates import (
    ENOUGH_COPIES,
    PAIR,
    Corpus,
    candidate_tasks,
    load_corpus,
    merged,
    possible_containers,
    sorted_unique,
)
from data_prep.reading.facts import documents_path
from data_prep.reading.index import sortable
from data_prep.reading.ngrams import distinct, ngram_hashes, unit_hashes
from data_prep.reading.signatures import CONTAINED_NGRAM_UNITS, MIN_CONTAINED_NGRAMS, NGRAM_UNITS
from data_prep.reading.spool import read_range
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task
from data_prep.running.work_folder import WorkFolder
from fairseq_alma.core.files import sha256_of

_ROWS = 1 << 20
"""Number of documents whose keys (hashes of the text) are compared at a time. A limit is needed because the keys are
copied for the comparison, which takes memory."""
_PAIRS = 1 << 14
"""Number of pairs that are converted to Python numbers at a time."""

FindPairs = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Function that finds pairs of near copies.

Its arguments are the number of each document by priority (-1 for exact copies), and the document of each number. It
returns the numbers of the better and of the worse documents of all pairs."""


class Duplicates(NamedTuple):
    """The documents to remove, among all n documents, and those that are kept in their place."""

    exact: np.ndarray
    """bool [n]: True for a document to remove because it is an exact copy of a document that is kept."""
    near: np.ndarray
    """bool [n]: True for a document to remove because it is a near copy, but not an exact copy, of a document that is
    kept."""
    kept: np.ndarray
    """int [n]: for a near copy, the index of the document that is kept in its place. Other documents have their own
    index."""


def find_duplicates(
    keys: np.ndarray, rank: np.ndarray, num_words: np.ndarray, find_pairs: FindPairs | None, num_known: int = 0
) -> Duplicates:
    """Find the copies to remove.

    Documents are ordered by rank. Among documents with equal ranks, the one with the most words comes first. Among
    documents with equal ranks and numbers of words, the one with the smallest key comes first.

    Args:
        keys: 16-byte hash of each text, NumPy type V16, shape [n]. Equal texts have equal keys. n is the number of
            documents.
        rank: int [n], -1 for documents already in the stream, else the index of the document's snapshot, or its date.
        num_words: int [n], number of words of each document.
        find_pairs: finds the pairs of near copies; None: find exact copies only.
        num_known: number of documents that are already in the stream. They are the first elements of `keys`, `rank`,
            and `num_words`. They are never removed.
    """
    count, texts = len(keys), sortable(keys)
    # Documents that are equal in all sort keys have equal text, so it does not matter which of them is kept.
    index_type = np.int32 if count < 2**31 else np.int64
    by_priority = np.lexsort((texts, -num_words, rank)).astype(index_type)
    priority = np.empty(count, index_type)
    priority[by_priority] = np.arange(count, dtype=index_type)

    by_key = np.lexsort((priority, texts))
    exact = np.zeros(count, bool)
    for start in range(0, count - 1, _ROWS):
        these = by_key[start : start + _ROWS + 1]
        # Mark all documents with equal keys as exact copies, except the first of them, which is kept.
        exact[these[1:][texts[these[1:]] == texts[these[:-1]]]] = True
    del by_key, texts
    # Never remove documents already in the stream, because existing mega-batches must not change.
    exact[:num_known] = False
    near = np.zeros(count, bool)
    kept = np.arange(count, dtype=index_type)
    if find_pairs is not None and count:
        priority[exact] = -1
        removed, instead = removed_copies(*find_pairs(priority, by_priority))
        near[by_priority[removed]] = True
        kept[by_priority[removed]] = by_priority[instead]
    return Duplicates(exact, near, kept)


def removed_copies(better: np.ndarray, worse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents to remove: those that are a copy of a better document that is kept.

    Also return, for each of them, the number of the best document that is kept and of which it is a copy. `better` and
    `worse` are the numbers of the documents of each pair, int64 [pairs]; that of the worse one is larger.
    """
    order = np.lexsort((better, worse))
    found = array("q", [-1]) * (int(worse.max(initial=-1)) + 1)
    # The pairs are sorted by the worse document. So it is known already which of the better documents are kept. This is
    # a loop over pairs, because with NumPy a chain of copies of copies needs a round for each of its documents.
    for start in range(0, len(order), _PAIRS):
        some = order[start : start + _PAIRS]
        for one, other in zip(better[some].tolist(), worse[some].tolist(), strict=True):
            if found[one] < 0 and found[other] < 0:
                found[other] = one
    instead = np.array(found, np.int64)
    removed = np.flatnonzero(instead >= 0)
    return removed, instead[removed]


SIMILAR = 0.8
"""Jaccard similarity of word 5-grams from which a document is a near copy of another document."""
CONTAINED = 0.9
"""A document is also a near copy of another one that contains at least this share of its different 13-grams."""
_TASK_PAIRS = 1 << 13
"""Number of pairs that one task compares by their texts."""


def find_near_copies(work: WorkFolder, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers by priority of the better and of the worse documents of all near copies, int64 [pairs]."""
    sha256 = corpus.digest()
    bands, anchors = candidate_tasks(corpus, sha256)
    step = work.run("find_pairs", [*bands, *anchors], "find similar documents")
    pairs, _ = merged((np.load(step.path(number, "pairs.npy")) for number in range(len(bands))), PAIR)
    matches = (np.load(step.path(number, "matches.npy")) for number in range(len(bands), len(step.tasks)))
    sure = pairs[pairs["sure"]]
    containers = possible_containers(matches)
    unsure, _ = sorted_unique(np.concatenate([pairs[~pairs["sure"]], containers]))
    # The text of documents that are already in the stream cannot be read again.
    unsure = unsure[unsure["better"] >= corpus.num_known]
    # A document with enough sure pairs is compared further only if these pairs do not remove it, so that large groups
    # of copies take little time.
    names, num_sure = np.unique(sure["worse"], return_counts=True)
    is_skipped = np.isin(unsure["worse"], names[num_sure >= ENOUGH_COPIES])
    copies, now, number = sure, unsure[~is_skipped], 0
    skipped = unsure[is_skipped]
    while number == 0 or len(now):
        copies = np.concatenate([copies, _compared(work, number, corpus, sha256, now)])
        removed, _ = removed_copies(copies["better"], copies["worse"])
        is_settled = np.isin(skipped["worse"], removed)
        now, skipped, number = skipped[~is_settled], skipped[is_settled], number + 1
    return copies["better"], copies["worse"]


def _compared(work: WorkFolder, number: int, corpus: Corpus, sha256: str, pairs: np.ndarray) -> np.ndarray:
    """Compare the texts of pairs, and return the pairs that are near copies."""
    # Put all pairs of a worse document together. Its text is then read once, and the better documents are often the
    # same as those of the previous document, whose n-grams are still in the cache.
    pairs = pairs[np.lexsort((pairs["better"], pairs["worse"]))]
    path = work.folder / f"unsure_pairs_{number}.npy"
    np.save(path, pairs)
    place = (str(corpus.folder), sha256, str(path), sha256_of(path))
    starts = range(0, len(pairs), _TASK_PAIRS)
    tasks = [CompareTask(*place, start, min(start + _TASK_PAIRS, len(pairs))) for start in starts]
    weights = [task.end - task.start for task in tasks]
    step = work.run(f"compare_{number}", tasks, "compare similar documents", "pairs", weights)
    is_copy = [np.load(step.path(task, "copies.npy")) for task in range(len(tasks))]
    return pairs[np.concatenate([np.empty(0, bool), *is_copy])]


class Grams(NamedTuple):
    """The different n-grams of a text, as sorted hashes: those by which similar texts and parts of texts are found."""

    similar: np.ndarray
    contained: np.ndarray

    @classmethod
    def of(cls, units: np.ndarray) -> Self:
        """Return the n-grams of a text, given the result of `unit_hashes`."""
        return cls(*(distinct(ngram_hashes(units, size)) for size in (NGRAM_UNITS, CONTAINED_NGRAM_UNITS)))


@dataclass(frozen=True)
class CompareTask(Task):
    """Task that reads the texts of the pairs from `start` (included) to `end` (excluded) of a file, and compares them.

    It writes PREFIX.copies.npy: bool [end - start], True for each pair of near copies.
    """

    corpus: str
    sha256: str
    pairs: str
    pairs_sha256: str
    start: int
    end: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        corpus = load_corpus(self.corpus, self.sha256)
        pairs = np.load(self.pairs, mmap_mode="r")[self.start : self.end]
        grams = functools.lru_cache(maxsize=64)(lambda number: self._grams(corpus, number))
        is_copy = np.zeros(len(pairs), bool)
        for position, (better, worse) in enumerate(zip(pairs["better"], pairs["worse"], strict=True)):
            heartbeat.beat()
            is_copy[position] = are_copies(grams(int(better)), grams(int(worse)))
        np.save(f"{prefix}.copies.npy", is_copy)
        return {}

    def _grams(self, corpus: Corpus, number: int) -> Grams:
        """Return the n-grams of a document, given by its number by priority."""
        [file], [row] = corpus.place(np.array([number]))
        # The signatures of a spool file are beside it, under the same number.
        prefix = corpus.files[file].prefix
        spool, shard = prefix.parent, int(prefix.name)
        document = _documents(spool, shard, self.sha256)[row]
        text = read_range(spool, shard, int(document["offset"]), int(document["num_bytes"]))
        return Grams.of(unit_hashes(text))


@functools.lru_cache(maxsize=128)  # cached, because opening the file takes as long as to compare two documents
def _documents(spool: Path, shard: int, sha256: str) -> np.ndarray:
    """Return the description (`index.SPOOLED`) of each document in a spool file, memory-mapped."""
    return np.load(documents_path(spool, shard), mmap_mode="r")


def are_copies(better: Grams, worse: Grams) -> bool:
    """Return True if the worse document is similar to the better one, or contained in it."""
    common = len(np.intersect1d(better.similar, worse.similar, assume_unique=True))
    if common >= SIMILAR * (len(better.similar) + len(worse.similar) - common):
        return common > 0
    if len(worse.contained) < MIN_CONTAINED_NGRAMS:
        return False
    common = len(np.intersect1d(better.contained, worse.contained, assume_unique=True))
    return common >= CONTAINED * len(worse.contained)
