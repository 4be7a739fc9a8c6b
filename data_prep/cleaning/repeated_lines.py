"""Find and remove the paragraphs of a document that are also in other documents (see `paragraphs`)."""

import functools
import hashlib
from pathlib import Path

import numpy as np

from data_prep.words import count_words

PAIR = np.dtype([("paragraph", np.uint64), ("document", np.uint64)])
"""A paragraph and a document in which it occurs: hashes of 8 bytes of their texts."""


def hash_of(text: str) -> int:
    """Return a hash of 8 bytes of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def paragraphs_of(text: str, min_words: int) -> list[tuple[int, int]]:
    """Return the paragraphs of a text as pairs (number of the line, hash). A paragraph is a line with enough words.

    White space at the ends of a line does not count.
    """
    return [
        (number, hash_of(line.strip()))
        for number, line in enumerate(text.split("\n"))
        if len(line) >= min_words and count_words(line) >= min_words
    ]


class RepeatedLines:
    """The paragraphs that occur in several documents, and for each of them the document in which it is kept.

    Args:
        path: a file of PAIR, sorted by the field `paragraph`. It is memory-mapped.
        min_words: number of words from which a line counts as a paragraph.
    """

    def __init__(self, path: Path, min_words: int):
        self._pairs = np.load(path, mmap_mode="r")
        self._min_words = min_words

    def remove(self, text: str) -> str:
        """Return the text without the paragraphs that are kept in another document."""
        found = paragraphs_of(text, self._min_words)
        if not found or not len(self._pairs):
            return text
        wanted = np.array([paragraph for _, paragraph in found], np.uint64)
        known = self._pairs["paragraph"]
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        is_other = (known[places] == wanted) & (self._pairs["document"][places] != np.uint64(hash_of(text)))
        if not is_other.any():
            return text
        removed = {number for (number, _), other in zip(found, is_other.tolist(), strict=True) if other}
        lines = [line for number, line in enumerate(text.split("\n")) if number not in removed]
        return "\n".join(lines).strip("\n")


@functools.lru_cache(maxsize=1)
def repeated_lines(path: str, sha256: str, min_words: int) -> RepeatedLines:
    """Return the paragraphs in this file. Later calls with the same digest return the same object."""
    return RepeatedLines(Path(path), min_words)
