"""Find exact and near-duplicates among all documents of all sources.

Near-duplicates are found by MinHash (Broder, 1997) of word 5-grams in 14 bands of 8 hashes, datatrove's settings: two
documents with Jaccard similarity 0.8 agree in a band with probability 0.92, with similarity 0.72 with probability 0.65.
A document takes 128 bytes: its key, and one 64-bit hash per band. Documents that agree in a band form a group, also
through a chain of others. One document of each group stays. It is chosen by content alone, so that the order of files,
sources and workers changes nothing.
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
"""The hash in every band for a document that is shorter than an n-gram: only its exact copies are found."""
_ROWS = 1 << 20
"""Number of documents that are compared at a time."""
_CHUNK_NGRAMS = 8192
"""Number of n-grams that are hashed at a time. Each takes 112 numbers: a whole book would take gigabytes."""


class Signer:
    """Computes MinHash signatures. datatrove is loaded once."""

    def __init__(self):
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

        config = MinhashConfig(n_grams=NGRAM_WORDS, num_buckets=NUM_BANDS, hashes_per_bucket=HASHES_PER_BAND)
        # datatrove asks for a folder for the files of its own pipeline. Nothing is written there.
        self._minhash = MinhashDedupSignature(tempfile.gettempdir(), config, language=words_between_spaces())

    def signature(self, text: str) -> np.ndarray:
        """Return uint64 [NUM_BANDS]. Similar documents are likely to be equal in at least one band."""
        shingles = self._minhash.get_shingles(text)
        if not len(shingles):
            return np.full(NUM_BANDS, NO_SIGNATURE, np.uint64)
        least: np.ndarray | None = None
        for start in range(0, len(shingles), _CHUNK_NGRAMS):
            found = np.array(self._minhash.get_signature(shingles[start : start + _CHUNK_NGRAMS]), np.uint64)
            least = found if least is None else np.minimum(least, found)
        assert least is not None
        return _hash_bands(least)


def _hash_bands(minima: np.ndarray) -> np.ndarray:
    """Hash uint64 [bands, hashes] to one number per band, never NO_SIGNATURE: splitmix64 over the hashes in turn."""
    state = np.zeros(len(minima), np.uint64)
    with np.errstate(over="ignore"):
        for column in minima.T:
            state = (state ^ column) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    state[state == NO_SIGNATURE] = 1
    return state


class Duplicates(NamedTuple):
    """The documents to remove, as masks over all documents."""

    exact: np.ndarray
    """bool [n]: exact copies of a document that stays."""
    near: np.ndarray
    """bool [n]: near copies of a document that stays."""


def find_duplicates(
    keys: np.ndarray, rank: np.ndarray, num_words: np.ndarray, signatures: list[list[Path]] | None, num_known: int = 0
) -> Duplicates:
    """Find the documents that are copies of one that stays.

    Args:
        keys: V16 [n], equal for equal texts.
        rank: int [n]. The document of a group with the smallest rank stays: the one of the first snapshot, or the one
            that the stream holds already.
        num_words: int [n]. Among documents of equal rank the longest stays, then the one with the smallest key.
        signatures: files written by `save_signatures`, in the order of the documents; None: find exact copies only.
        num_known: number of documents, the first ones, that always stay.
    """
    count = len(keys)
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    high, low = halves[:, 0], halves[:, 1]
    # The first document of any set in this order stays. Equal texts keep the order in which they were given: it does
    # not matter which of them stays.
    better = np.lexsort((low, high, -num_words, rank))
    place = np.empty(count, np.int32 if count < 2**31 else np.int64)
    place[better] = np.arange(count, dtype=place.dtype)
    del better

    by_key = np.lexsort((place, low, high))
    exact = np.zeros(count, bool)
    for start in range(0, count - 1, _ROWS):  # in parts: copies of all keys would be large
        these = by_key[start : start + _ROWS + 1]
        same = (high[these[1:]] == high[these[:-1]]) & (low[these[1:]] == low[these[:-1]])
        exact[these[1:][same]] = True  # equal keys are sorted by place: the first one stays
    del by_key, halves, high, low
    exact[:num_known] = False
    near = np.zeros(count, bool)
    if signatures is not None and count:
        label = _groups(count, signatures)
        # The smallest place in each group: that document stays.
        best = np.full(count, count, place.dtype)
        np.minimum.at(best, label, place)
        near = place != best[label]
        near &= ~exact
        near[:num_known] = False
    return Duplicates(exact, near)


def _groups(count: int, shards: list[list[Path]]) -> np.ndarray:
    """Return the group of each document, int [n]. Only one band at a time is in memory."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

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
    """Write uint64 [n, bands] to a file, band after band, so that one band can be read alone."""
    with open(path, "wb") as file:
        file.write(np.ascontiguousarray(signatures.T).data)


def load_band(path: Path, band: int) -> np.ndarray:
    """Return one band of a file of `save_signatures`: uint64 [n]."""
    count = path.stat().st_size // (8 * NUM_BANDS)
    return np.fromfile(path, np.uint64, count, offset=8 * count * band)
