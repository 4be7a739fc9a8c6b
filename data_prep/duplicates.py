"""Exact and near-duplicates among all documents of all sources, found before the partition.

Near: MinHash (Broder, 1997) of word 5-grams in 14 bands of 8, datatrove's settings: documents of Jaccard similarity 0.8
meet in a band with probability 0.92, of 0.72 with 0.65. Of a document 128 bytes are kept: its key, and one 64-bit hash
a band. What meets is one group, however long the chain; of each group one document stays, chosen by content alone, so
that the order of files, sources and workers changes nothing.
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
"""In every band, of a document with fewer words than an n-gram has: only its exact copies are found."""
_ROWS = 1 << 20
"""Documents compared at a time."""
_CHUNK_WORDS = 8192
"""n-grams hashed at a time: 112 numbers each, so that a book does not take gigabytes."""


class Signer:
    """Computes signatures. Loads datatrove once."""

    def __init__(self):
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

        config = MinhashConfig(n_grams=NGRAM_WORDS, num_buckets=NUM_BANDS, hashes_per_bucket=HASHES_PER_BAND)
        # It wants a folder for the files that its own pipeline would write; nothing is written there.
        self._minhash = MinhashDedupSignature(tempfile.gettempdir(), config, language=words_between_spaces())

    def signature(self, text: str) -> np.ndarray:
        """uint64 [NUM_BANDS]: equal in a band for documents that are likely to be near."""
        shingles = self._minhash.get_shingles(text)
        if not len(shingles):
            return np.full(NUM_BANDS, NO_SIGNATURE, np.uint64)
        least: np.ndarray | None = None
        for start in range(0, len(shingles), _CHUNK_WORDS):
            found = np.array(self._minhash.get_signature(shingles[start : start + _CHUNK_WORDS]), np.uint64)
            least = found if least is None else np.minimum(least, found)
        assert least is not None
        return _hash_bands(least)


def _hash_bands(minima: np.ndarray) -> np.ndarray:
    """uint64 [bands, hashes] to one number a band, never NO_SIGNATURE (splitmix64 over the hashes in turn)."""
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
    """Which documents to leave out: masks over all documents."""

    exact: np.ndarray
    near: np.ndarray


def find_duplicates(
    keys: np.ndarray, rank: np.ndarray, num_words: np.ndarray, signatures: list[list[Path]] | None, old: int = 0
) -> Duplicates:
    """Which of n documents are copies of one that stays.

    Args:
        keys: V16 [n], equal for equal texts.
        rank: int [n]; of a group a document with the least rank stays (the first snapshot; what a stream holds).
        num_words: int [n]; among those the longest, then the one with the smallest key.
        signatures: per shard, the file of `save_signatures`, in the order of the documents; None: exact copies only.
        old: how many of the documents, the first ones, always stay.
    """
    count = len(keys)
    halves = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    high, low = halves[:, 0], halves[:, 1]
    # First in this order: the one that stays of any set. Equal texts come as they were given, which does not show.
    better = np.lexsort((low, high, -num_words, rank))
    place = np.empty(count, np.int32 if count < 2**31 else np.int64)
    place[better] = np.arange(count, dtype=place.dtype)
    del better

    by_key = np.lexsort((place, low, high))
    exact = np.zeros(count, bool)
    for start in range(0, count - 1, _ROWS):  # in parts, as copies of keys are large
        these = by_key[start : start + _ROWS + 1]
        same = (high[these[1:]] == high[these[:-1]]) & (low[these[1:]] == low[these[:-1]])
        exact[these[1:][same]] = True  # sorted by place: the first of equal ones stays
    del by_key, halves, high, low
    exact[:old] = False
    near = np.zeros(count, bool)
    if signatures is not None and count:
        label = _groups(count, signatures)
        # The place of the best of each group.
        best = np.full(count, count, place.dtype)
        np.minimum.at(best, label, place)
        near = place != best[label]
        near &= ~exact
        near[:old] = False
    return Duplicates(exact, near)


def _groups(count: int, shards: list[list[Path]]) -> np.ndarray:
    """The group of each document: int [n]. Bands are taken one after another, so that one at a time is in memory."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    label = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    for band in range(NUM_BANDS):
        hashes = np.concatenate([load_band(path, band) for paths in shards for path in paths])
        assert len(hashes) == count, (len(hashes), count)
        order = np.argsort(hashes, kind="stable").astype(label.dtype)
        hashes = hashes[order]
        meet = (hashes[1:] == hashes[:-1]) & (hashes[1:] != NO_SIGNATURE)
        del hashes
        left, right = label[order[:-1][meet]], label[order[1:][meet]]
        del order, meet
        differ = left != right
        if differ.any():
            edges = (np.ones(int(differ.sum()), np.int8), (left[differ], right[differ]))
            _, group = connected_components(coo_array(edges, shape=(count, count)), directed=False)
            label = group.astype(label.dtype)[label]
    return label


def save_signatures(path: Path, signatures: np.ndarray) -> None:
    """uint64 [n, bands] into a file, band after band: each is read on its own."""
    with open(path, "wb") as file:
        file.write(np.ascontiguousarray(signatures.T).data)


def load_band(path: Path, band: int) -> np.ndarray:
    """uint64 [n] of one file."""
    count = path.stat().st_size // (8 * NUM_BANDS)
    return np.fromfile(path, np.uint64, count, offset=8 * count * band)
