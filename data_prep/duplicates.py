"""Find exact duplicates and near-duplicates among all documents of all sources.

Near-duplicates are found by MinHash (Broder, 1997) of word 5-grams in 14 bands of 8 hashes, the default settings of
datatrove. The 8 hashes of a band are combined into one 64-bit hash. The signature of a document consists of these
14 hashes, 112 bytes. Together with the key (16-byte hash of the text), a document takes 128 bytes.

Two documents whose signatures are equal in at least one band count as copies of each other. The probability of this is
0.92 for two documents with Jaccard similarity 0.8, and 0.65 for similarity 0.72. A group consists of all documents that
are linked by a chain of such pairs. All documents of a group count as copies of each other, and one of them is kept.
The choice of this document depends only on the texts and the snapshots (points in time, see `snapshots`), not on the
order of files, sources and workers.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.words import words_between_spaces

NUM_BANDS = 14
HASHES_PER_BAND = 8
NGRAM_WORDS = 5
NO_SIGNATURE = 0
"""Value in every band of the signature of a document with fewer than NGRAM_WORDS words. For such documents, only exact
copies are found, and no near copies."""
_ROWS = 1 << 20
"""Number of documents whose keys (hashes of the text) are compared at a time. A limit is needed because the keys are
copied for the comparison, which takes memory."""
_CHUNK_NGRAMS = 8192
"""Number of word n-grams that are hashed at a time. Hashing needs memory for 112 numbers per n-gram (14 bands of 8
hashes), so hashing a complete book at once would take gigabytes."""


class Signer:
    """Computes MinHash signatures. Create a Signer only if it is needed: it imports datatrove, which takes a second."""

    def __init__(self):
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

        config = MinhashConfig(n_grams=NGRAM_WORDS, num_buckets=NUM_BANDS, hashes_per_bucket=HASHES_PER_BAND)
        # Pass any folder. datatrove requires one for the output of its pipeline, but this pipeline is not run.
        self._minhash = MinhashDedupSignature(tempfile.gettempdir(), config, language=words_between_spaces())

    def signature(self, text: str) -> np.ndarray:
        """Return the signature of a text, uint64 [NUM_BANDS].

        If two texts are similar, their signatures are probably equal in at least one band.
        """
        shingles = self._minhash.get_shingles(text)
        # `shingles` contains one hash per word n-gram. A text with fewer than NGRAM_WORDS words has no n-gram, so there
        # is nothing to compute a signature from.
        if not len(shingles):
            return np.full(NUM_BANDS, NO_SIGNATURE, np.uint64)
        # A MinHash is a minimum over all n-grams. To limit memory, compute the minimum of each chunk of n-grams, and
        # then the minimum of these minima.
        least: np.ndarray | None = None
        for start in range(0, len(shingles), _CHUNK_NGRAMS):
            found = np.array(self._minhash.get_signature(shingles[start : start + _CHUNK_NGRAMS]), np.uint64)
            least = found if least is None else np.minimum(least, found)
        assert least is not None
        return _hash_bands(least)


def _hash_bands(minima: np.ndarray) -> np.ndarray:
    """Combine the MinHashes of each band into one hash with the hash function splitmix64.

    The result is never NO_SIGNATURE, the value that marks documents that are too short for a signature.

    Args:
        minima: the MinHashes, uint64 [bands, hashes].

    Returns:
        uint64 [bands].
    """
    state = np.zeros(len(minima), np.uint64)
    with np.errstate(over="ignore"):  # splitmix64 computes modulo 2^64, so overflow is intended
        for column in minima.T:
            state = (state ^ column) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    state[state == NO_SIGNATURE] = 1
    return state


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
    keys: np.ndarray, rank: np.ndarray, num_words: np.ndarray, signatures: list[list[Path]] | None, num_known: int = 0
) -> Duplicates:
    """Find the copies to remove. In each group of copies, one document is kept.

    The document with the smallest rank is kept. Among documents with equal ranks, the one with the most words is kept.
    Among documents with equal ranks and numbers of words, the one with the smallest key is kept. Exception: documents
    that are already in the stream are all kept.

    Args:
        keys: 16-byte hash of each text, NumPy type V16, shape [n]. Equal texts have equal keys. n is the number of
            documents.
        rank: int [n], -1 for documents already in the stream, else the index of the document's snapshot, or its date.
        num_words: int [n], number of words of each document.
        signatures: lists of files written by `save_signatures`, in the order of the documents; None: find exact
            copies only.
        num_known: number of documents that are already in the stream. They are the first elements of `keys`, `rank`,
            `num_words` and `signatures`.
    """
    count = len(keys)
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    high, low = halves[:, 0], halves[:, 1]
    # Sort documents by priority, because the first document of each group is kept. Documents that are equal in all sort
    # keys have equal text, so it does not matter which of them is kept.
    by_priority = np.lexsort((low, high, -num_words, rank))
    priority = np.empty(count, np.int32 if count < 2**31 else np.int64)
    priority[by_priority] = np.arange(count, dtype=priority.dtype)
    del by_priority

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
    kept = np.arange(count, dtype=priority.dtype)
    if signatures is not None and count:
        label = _groups(count, signatures)
        # In each group of near copies, keep the document with the smallest value of `priority` (0 is the best).
        first = np.full(count, count, priority.dtype)
        np.minimum.at(first, label, priority)
        near = priority != first[label]
        near &= ~exact
        near[:num_known] = False
        by_priority = np.empty_like(priority)
        by_priority[priority] = np.arange(count, dtype=priority.dtype)
        kept[near] = by_priority[first[label[near]]]
    return Duplicates(exact, near, kept)


def _groups(count: int, shards: list[list[Path]]) -> np.ndarray:
    """Return the index of each document's group, int [n].

    A group consists of near-duplicates. The module docstring defines groups, bands and signatures. To save memory, only
    one band is loaded at a time.

    Args:
        count: number of documents, n.
        shards: lists of signature files, in the order of the documents.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # At first, each document is a separate group. For each band, merge the groups of documents with equal hashes.
    label = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    for band in range(NUM_BANDS):
        hashes = np.concatenate([load_band(path, band) for paths in shards for path in paths])
        assert len(hashes) == count, (len(hashes), count)
        order = np.argsort(hashes, kind="stable").astype(label.dtype)
        hashes = hashes[order]
        agree = (hashes[1:] == hashes[:-1]) & (hashes[1:] != NO_SIGNATURE)
        del hashes
        left, right = label[order[:-1][agree]], label[order[1:][agree]]
        del order, agree
        differ = left != right
        if differ.any():
            edges = (np.ones(int(differ.sum()), np.int8), (left[differ], right[differ]))
            _, group = connected_components(coo_array(edges, shape=(count, count)), directed=False)
            label = group.astype(label.dtype)[label]
    return label


def save_signatures(path: Path, signatures: np.ndarray) -> None:
    """Write signatures, uint64 [n, bands], to a file, band after band, so that `load_band` can read a single band."""
    with open(path, "wb") as file:
        file.write(np.ascontiguousarray(signatures.T).data)


def load_band(path: Path, band: int) -> np.ndarray:
    """Return the hash of each document in one band of the MinHash signatures, uint64 [n].

    Args:
        path: a file that `save_signatures` wrote.
        band: index of the band.
    """
    count = path.stat().st_size // (8 * NUM_BANDS)
    return np.fromfile(path, np.uint64, count, offset=8 * count * band)
