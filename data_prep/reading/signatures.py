"""Signatures of documents: small fingerprints that show which documents could be near copies of each other.

A near copy is a document whose word 5-grams are similar to those of another document, by Jaccard similarity: the number
of 5-grams that both have, divided by the number of 5-grams that at least one has. `ngrams` defines words and n-grams.

Each document gets a one-permutation MinHash (Li, Owen, Zhang, 2012): the hashes of its 5-grams are divided among 512
bins, and each bin keeps its minimum. Two texts have the same minimum in a bin with a probability equal to their Jaccard
similarity. Two things are derived from the minima:

bands   NUM_BANDS hashes of HASHES_PER_BAND minima each, 120 bytes. Documents with an equal band are compared. Two
        documents with Jaccard similarity 0.8 have an equal band with probability 0.996, with 0.67 in 71% of all cases.
        A bin without a 5-gram borrows the minimum of another bin (optimal densification, Shrivastava, 2017).
sketch  4 bits of each minimum, 256 bytes. From two sketches, the Jaccard similarity is estimated. The standard error is
        0.018 at similarity 0.8 for long documents, and less for documents with fewer than 500 words.

A document that is contained in a longer one has a low Jaccard similarity with it. To find such documents, anchors are
stored: those hashes of 13-grams that are below 2^64 / ANCHOR_RATE. The longer document has the same anchors.
"""

import bisect
import functools
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np

from data_prep.reading.ngrams import ngram_hashes, splitmix, unit_hashes

NUM_BANDS = 30
HASHES_PER_BAND = 8
NUM_BINS = 512
SKETCH_BYTES = NUM_BINS // 2
NGRAM_UNITS = 5
NO_BAND = 0
"""Value of all bands of a document with fewer than NGRAM_UNITS words. For such documents, only exact copies are
found."""
CONTAINED_NGRAM_UNITS = 13
MIN_CONTAINED_NGRAMS = 100
"""Documents with fewer different 13-grams than this are not searched for in longer documents. With 100 13-grams, a
document has no anchor with probability 0.002."""
ANCHOR_RATE = 16
"""One 13-gram in ANCHOR_RATE is an anchor."""
NUM_QUERIES = 4
"""A document is searched for in longer documents by its NUM_QUERIES smallest anchors."""
ANCHOR = np.dtype([("hash", np.uint64), ("row", np.uint32), ("needed", np.uint8)])
"""An anchor: its hash; the index of the document in its file; and how many of the document's queries another document
must have to be compared with it, or 0 if this anchor is not one of the document's queries."""
_LENDERS_ASKED = 32
"""Number of bins that an empty bin asks at a time for their minimum."""
_BIN_BITS = 9
_CODES = 15
"""Number of values in a sketch that stand for a minimum. The remaining value, 0, stands for an empty bin."""


class SignatureFiles(NamedTuple):
    """The files with the signatures of some documents."""

    prefix: Path
    """The files have the endings .bands, .sketches and .anchors. The files of a finished stream have no .anchors."""

    @property
    def bands(self) -> Path:
        return Path(f"{self.prefix}.bands")

    @property
    def sketches(self) -> Path:
        return Path(f"{self.prefix}.sketches")

    @property
    def anchors(self) -> Path:
        return Path(f"{self.prefix}.anchors")

    @property
    def num_documents(self) -> int:
        return self.sketches.stat().st_size // SKETCH_BYTES

    def load_band(self, band: int) -> np.ndarray:
        """Return the hash of each document in one band, uint32 [n]."""
        count = self.num_documents
        return np.fromfile(self.bands, np.uint32, count, offset=4 * count * band)

    def map_sketches(self) -> np.ndarray:
        """Return the sketches of all documents, uint8 [n, SKETCH_BYTES], memory-mapped."""
        count = self.num_documents
        if not count:
            return np.empty((0, SKETCH_BYTES), np.uint8)
        return np.memmap(self.sketches, np.uint8, "r", shape=(count, SKETCH_BYTES))

    def load_anchors(self, lowest: int, highest: int) -> np.ndarray:
        """Return the anchors (`ANCHOR`) with lowest <= hash < highest, sorted by hash. Only these are read."""
        if not self.anchors.stat().st_size:
            return np.empty(0, ANCHOR)
        stored = np.memmap(self.anchors, ANCHOR, "r")
        # numpy.searchsorted would copy the hashes of all anchors.
        start, end = (bisect.bisect_left(stored["hash"], np.uint64(limit)) for limit in (lowest, highest))
        return np.array(stored[start:end])


class Signer:
    """Computes signatures, and writes them to files. Use it as a context manager.

    Sketches are written at once. The bands, 120 bytes per document, are kept in memory until the end, because the file
    contains band after band. The anchors, about 13 bytes per 16 words, are too, because the file is sorted by hash.
    """

    def __init__(self, files: SignatureFiles):
        self._files = files
        self._bands: list[np.ndarray] = []
        self._anchors = [np.empty(0, ANCHOR)]

    def __enter__(self) -> Self:
        self._sketches: BinaryIO = open(self._files.sketches, "wb")
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._sketches.close()
        found = np.concatenate(self._anchors)
        found[np.argsort(found["hash"], kind="stable")].tofile(self._files.anchors)
        np.array(self._bands, np.uint32).reshape(-1, NUM_BANDS).T.tofile(self._files.bands)

    def add(self, text: str) -> None:
        """Compute and store the signature of the next document."""
        units = unit_hashes(text)
        bands, sketch = sign(units)
        found = anchors(units, len(self._bands))
        if len(found):
            self._anchors.append(found)
        self._bands.append(bands)
        self._sketches.write(sketch.data)


def sign(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bands, uint32 [NUM_BANDS], and the sketch, uint8 [SKETCH_BYTES], of a text.

    Args:
        units: the result of `unit_hashes`.
    """
    hashes = np.sort(ngram_hashes(units, NGRAM_UNITS))
    if not len(hashes):
        return np.full(NUM_BANDS, NO_BAND, np.uint32), np.zeros(SKETCH_BYTES, np.uint8)
    bins = (hashes >> np.uint64(64 - _BIN_BITS)).astype(np.intp)
    first = np.flatnonzero(np.diff(bins, prepend=-1))
    minima, is_filled = np.zeros(NUM_BINS, np.uint64), np.zeros(NUM_BINS, bool)
    minima[bins[first]], is_filled[bins[first]] = hashes[first], True
    codes = np.where(is_filled, minima % np.uint64(_CODES) + np.uint64(1), np.uint64(0)).astype(np.uint8)
    empty = np.flatnonzero(~is_filled[: NUM_BANDS * HASHES_PER_BAND])
    for start in range(0, NUM_BINS, _LENDERS_ASKED):
        if not len(empty):
            break
        lenders = _lenders()[empty, start : start + _LENDERS_ASKED]
        can_lend = is_filled[lenders]
        found = np.flatnonzero(can_lend.any(axis=1))
        minima[empty[found]] = minima[lenders[found, can_lend[found].argmax(axis=1)]]
        empty = np.delete(empty, found)
    return _hash_bands(minima), codes[0::2] | codes[1::2] << 4


def anchors(units: np.ndarray, row: int) -> np.ndarray:
    """Return the anchors (`ANCHOR`) of a text. `row` is the index of the document in its file. See also `sign`."""
    hashes = ngram_hashes(units, CONTAINED_NGRAM_UNITS)
    if len(hashes) < MIN_CONTAINED_NGRAMS:
        return np.empty(0, ANCHOR)
    chosen = np.unique(hashes[hashes < np.uint64(2**64 // ANCHOR_RATE)])
    found = np.zeros(len(chosen), ANCHOR)
    found["hash"], found["row"] = chosen, row
    num_queries = min(NUM_QUERIES, len(chosen))
    found["needed"][:num_queries] = (num_queries + 1) // 2
    return found


def estimate_similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the estimated Jaccard similarity of pairs of documents, float [number of pairs].

    Args:
        left: the sketches of the first documents of the pairs, uint8 [number of pairs, SKETCH_BYTES].
        right: the sketches of the second documents.
    """
    # Compare 16 codes at a time, as 64-bit integers.
    ours, theirs = (np.ascontiguousarray(sketches).view(np.uint64) for sketches in (left, right))
    used = np.bitwise_count(_filled(ours | theirs)).sum(axis=1, dtype=np.int64)
    both = np.bitwise_count(_filled(ours) & _filled(theirs)).sum(axis=1, dtype=np.int64)
    equal = used - np.bitwise_count(_filled(ours ^ theirs)).sum(axis=1, dtype=np.int64)
    # Different minima have the same code with probability 1 / _CODES.
    same_minima = (equal - both / _CODES) / (1 - 1 / _CODES)
    return np.maximum(same_minima, 0) / np.maximum(used, 1)


def _filled(codes: np.ndarray) -> np.ndarray:
    """Return for every 4 bits that are not all 0 the bits 0001, and for others 0000."""
    codes = codes | codes >> np.uint64(2)
    return (codes | codes >> np.uint64(1)) & np.uint64(0x1111111111111111)


def _hash_bands(minima: np.ndarray) -> np.ndarray:
    """Combine the minima of each band into one hash, uint32 [NUM_BANDS], which is never NO_BAND."""
    rows = minima[: NUM_BANDS * HASHES_PER_BAND].reshape(NUM_BANDS, HASHES_PER_BAND)
    # The sum of the products is computed modulo 2^64. The factors make the order of the minima count.
    bands = (splitmix(rows @ _band_factors()) >> np.uint64(32)).astype(np.uint32)
    bands[bands == NO_BAND] = 1
    return bands


@functools.cache
def _band_factors() -> np.ndarray:
    return splitmix(np.arange(HASHES_PER_BAND, dtype=np.uint64)) | np.uint64(1)


@functools.cache
def _lenders() -> np.ndarray:
    """Return for each bin of the bands all bins, in the order in which an empty bin asks them for their minimum."""
    rows, columns = NUM_BANDS * HASHES_PER_BAND, NUM_BINS
    numbers = splitmix(np.arange(rows * columns, dtype=np.uint64)).reshape(rows, columns)
    return np.argsort(numbers, axis=1, kind="stable")
