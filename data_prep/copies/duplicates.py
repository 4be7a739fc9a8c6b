"""Decide which copies of documents to remove.

An exact copy has the same text as another document. A near copy is similar to another document: their word 5-grams have
a Jaccard similarity of at least 0.8. A document is also a near copy of a longer document that contains at least 90% of
its 13-grams. `near_copies` finds the pairs of near copies.

Documents are ordered by priority. A document is removed only if it is a copy of a document that has a better priority
and is kept. If A and B are near copies, and B and C are, but A and C are not, then B is removed, and C is kept. The
order depends only on the texts and the snapshots (points in time, see `snapshots`), not on the order of files, sources
and workers.

Memory: `find_duplicates` needs at most 72 bytes per document, in one process, in addition to the index entries.
"""

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
    count = len(keys)
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    high, low = halves[:, 0], halves[:, 1]
    # Documents that are equal in all sort keys have equal text, so it does not matter which of them is kept.
    index_type = np.int32 if count < 2**31 else np.int64
    by_priority = np.lexsort((low, high, -num_words, rank)).astype(index_type)
    priority = np.empty(count, index_type)
    priority[by_priority] = np.arange(count, dtype=index_type)

    by_key = np.lexsort((priority, low, high))
    exact = np.zeros(count, bool)
    # Compare the keys in chunks of _ROWS documents. Indexing `high` and `low` copies keys, so chunks limit the memory.
    for start in range(0, count - 1, _ROWS):
        these = by_key[start : start + _ROWS + 1]
        same = (high[these[1:]] == high[these[:-1]]) & (low[these[1:]] == low[these[:-1]])
        # Mark all documents with equal keys as exact copies, except the first of them, which is kept.
        exact[these[1:][same]] = True
    del by_key, halves, high, low
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

    Also return, for each of them, the number of the best document that is kept and of which it is a copy.

    Args:
        better: the number of the better document of each pair, int64 [pairs].
        worse: the number of the worse document of each pair, which is larger.
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
