"""Text that a share left out of a stream, and that alma-prep --extend can add later.

Shares (--source KIND:PATH@SHARE) leave out passages at random. A document of which no passage is in the stream is not
recorded as a document of the stream, so it can be added later like any other text. Of a document that is partly in the
stream, the file OUT/dedup/NNNN.left_out lists the ranges of bytes that are not. If a later call of alma-prep --extend
reads the same document again, it uses these ranges and only these.
"""

import hashlib
from pathlib import Path

import numpy as np

from data_prep.reading.index import ENTRY, order_key

# A range of a document that is not in the stream, 32 bytes.
RANGE = np.dtype(
    [
        ("document", "V16"),  # hash of the text of the complete document, as in `index.ENTRY`
        ("start", np.int64),  # first byte of the range, in the document
        ("num_bytes", np.int32),
        ("num_words", np.int32),
    ]
)


def is_in(documents: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return a bool mask: True for each document hash (NumPy type V16) that is one of the hashes `among`."""
    # NumPy sorts texts of bytes, but not values of type V16. Both have 16 bytes, so the comparison is exact.
    return np.isin(_as_bytes(documents), _as_bytes(among))


def ranges_of(dropped: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the ranges (RANGE) of documents that passages cover. Ranges that touch each other are joined.

    The ranges are sorted, so they do not depend on the order of the passages.

    Args:
        dropped: the index entry (`index.ENTRY`) of each passage.
        documents: the index entries of the documents that the passages are cut from. Each document is there once.
    """
    ranges = np.empty(len(dropped), RANGE)
    by_hash = np.argsort(_as_bytes(documents["document"]), kind="stable")
    found = np.searchsorted(_as_bytes(documents["document"])[by_hash], _as_bytes(dropped["document"]))
    ranges["start"] = dropped["offset"] - documents["offset"][by_hash[found]]
    for name in ("document", "num_bytes", "num_words"):
        ranges[name] = dropped[name]
    ranges = ranges[np.lexsort((ranges["start"], _as_bytes(ranges["document"])))]
    if not len(ranges):
        return ranges
    same = _as_bytes(ranges["document"])[1:] == _as_bytes(ranges["document"])[:-1]
    touches = same & (ranges["start"][1:] == (ranges["start"] + ranges["num_bytes"])[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], ~touches]))
    joined = ranges[firsts]
    for name in ("num_bytes", "num_words"):
        joined[name] = np.add.reduceat(ranges[name], firsts)
    return joined


def entries_of(ranges: np.ndarray, documents: np.ndarray, seed: int) -> np.ndarray:
    """Return the index entries (`index.ENTRY`) of all ranges of documents that were read again.

    Each range is treated as a document of its own, whose hash is that of the complete document.

    Args:
        ranges: the ranges that are not in the stream (RANGE).
        documents: the index entries of the documents that were read.
        seed: the seed of the stream. The sort keys depend on it.
    """
    hashes, first = np.unique(_as_bytes(documents["document"]), return_index=True)
    wanted = ranges[np.isin(_as_bytes(ranges["document"]), hashes)]
    of_document = documents[first[np.searchsorted(hashes, _as_bytes(wanted["document"]))]]
    entries = of_document.astype(ENTRY)
    entries["offset"] += wanted["start"]
    entries["num_bytes"], entries["num_words"] = wanted["num_bytes"], wanted["num_words"]
    keys = [
        order_key(seed, hashlib.sha256(bytes(document) + int(start).to_bytes(8, "big")).digest(), 0)
        for document, start in zip(wanted["document"], wanted["start"], strict=True)
    ]
    entries["key"] = np.frombuffer(b"".join(keys), "V16")
    return entries


def save_ranges(folder: Path, number: int, ranges: np.ndarray) -> None:
    """Write the ranges that are not in a stream after it was made, or after it was extended.

    Args:
        folder: the stream's folder `dedup`.
        number: 0 for a new stream, else the number of the extension, from 1.
        ranges: the ranges (RANGE) of all documents that are partly in the stream.
    """
    ranges[np.lexsort((ranges["start"], _as_bytes(ranges["document"])))].tofile(_path(folder, number))


def load_ranges(folder: Path, count: int) -> np.ndarray:
    """Return the ranges (RANGE) that `save_ranges` wrote last. The array is empty if there are none.

    Args:
        folder: the stream's folder `dedup`.
        count: 1 plus the number of the stream's extensions.
    """
    for number in reversed(range(count)):
        if _path(folder, number).is_file():
            return np.fromfile(_path(folder, number), RANGE)
    return np.empty(0, RANGE)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.left_out"


def _as_bytes(hashes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(hashes).view("S16")
