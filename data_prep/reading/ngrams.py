"""Split text into units, and compute a hash of each n-gram, that is, of each sequence of n neighbouring units.

The search for copies and the search for overlaps between training and held-out text compare texts by these hashes.

A unit is a word. Words are separated by spaces, dashes and slashes; upper case, punctuation, symbols and invisible
characters do not count. Scripts that do not separate words by spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese and
Tibetan) have one unit per letter. The script is looked up for each character, so a text can mix scripts.

All steps are computed with NumPy on arrays of code points. This is about ten times as fast as hashing Python strings.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np

from data_prep.characters import IGNORED, LETTER, SPACE, UNSPACED, codes_of, kinds_of

_CHUNK_CHARACTERS = 1 << 20
"""Number of characters that are processed at a time. Each character takes about 50 bytes of memory."""
_CODE_BYTES = 4
_SPACE_CODE = " ".encode("utf-32-le")
_CHUNK_END = re.compile(r"\s")
_FIRST_MARK, _LAST_MARK = 0x300, 0x1FFFF
"""All combining marks are between these code points."""
_MAX_MARKS = 30
"""Maximum number of combining marks after one another that count, as in the stream-safe text of UAX 15. Normalization
sorts them, in a time that grows with the square of their number."""
_POWERS = 1 << 12
"""Number of different factors for the characters of a word. In longer words, which are not natural language, the
factors repeat."""
_CHARACTER_FACTOR = 0x9FB21C651E98DF25
_UNIT_FACTOR = 0xD6E8FEB86659FD93


def splitmix(values: np.ndarray) -> np.ndarray:
    """Return pseudo-random numbers, uint64, that depend only on `values`, uint64 (the hash function splitmix64)."""
    with np.errstate(over="ignore"):  # splitmix64 computes modulo 2^64, so overflow is intended
        state = values + np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def unit_hashes(text: str) -> np.ndarray:
    """Return a hash of each unit (see the module docstring) of a text, in order, uint64 [number of units]."""
    found, start = [np.empty(0, np.uint64)], 0
    while start < len(text):
        # End a chunk at a space, so that no word is cut. Without a space nearby, the text is probably Chinese, in which
        # every letter is a unit.
        end = start + _CHUNK_CHARACTERS
        space = _CHUNK_END.search(text, end, end + 1000)
        end = space.start() if space else end
        found.append(_hashes_of_codes(np.frombuffer(_codes(text[start:end]), np.uint32))[0])
        start = end
    return np.concatenate(found)


def unit_hashes_of(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each unit of several texts, uint64, and the number of units of each text.

    The hashes are those of `unit_hashes`, one text after another. For short texts, this function is several times as
    fast. All texts together should have at most some 100 kB, because each character takes about 50 bytes of memory.
    """
    if len(texts) == 1:
        hashes = unit_hashes(texts[0])
        return hashes, np.array([len(hashes)])
    codes = [_codes(text) for text in texts]
    ends = np.cumsum([len(each) // _CODE_BYTES + 1 for each in codes])  # plus 1 for the space between two texts
    hashes, starts = _hashes_of_codes(np.frombuffer(_SPACE_CODE.join(codes), np.uint32))
    return hashes, np.diff(np.searchsorted(starts, ends), prepend=0)


def ngram_hashes(units: np.ndarray, size: int) -> np.ndarray:
    """Return a hash of each n-gram, in order, uint64 [max(0, number of units - n + 1)].

    Args:
        units: the result of `unit_hashes`.
        size: number of units of an n-gram, n.
    """
    count = len(units) - size + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    factor, found = np.uint64(_UNIT_FACTOR), units[:count].copy()
    with np.errstate(over="ignore"):
        for position in range(1, size):
            found *= factor
            found += units[position : position + count]
    return splitmix(found)


def distinct(hashes: np.ndarray) -> np.ndarray:
    """Return the different elements of an array of hashes, sorted.

    np.unique puts them into a hash table first, which takes several times as long for millions of different hashes.
    """
    found = np.sort(hashes)
    is_first = np.ones(len(found), bool)
    np.not_equal(found[1:], found[:-1], out=is_first[1:])
    return found[is_first]


def _codes(text: str) -> bytes:
    """Return the code points of a text, uint32, after normalization."""
    if not text.isascii():
        text = _normalized(text)
    # Characters that are not valid, such as half of a surrogate pair, are ignored later, like punctuation.
    return text.lower().encode("utf-32-le", "surrogatepass")


def _normalized(text: str) -> str:
    """Return a text in the normal form NFKC, with at most _MAX_MARKS combining marks after one another."""
    if unicodedata.is_normalized("NFKC", text):  # most texts; then no marks have to be sorted
        return text
    codes = codes_of(text)
    is_mark = _is_mark()[codes]
    if np.count_nonzero(is_mark) > _MAX_MARKS:
        positions = np.arange(len(codes))
        counts = positions - np.maximum.accumulate(np.where(is_mark, -1, positions)) <= _MAX_MARKS
        text = codes[counts].tobytes().decode("utf-32-le", "surrogatepass")
    return unicodedata.normalize("NFKC", text)


@functools.cache
def _is_mark() -> np.ndarray:
    """Return for each code point whether it is a combining mark, bool."""
    found = np.zeros(sys.maxunicode + 1, bool)
    marks = range(_FIRST_MARK, _LAST_MARK + 1)
    found[marks.start : marks.stop] = [unicodedata.combining(chr(code)) > 0 for code in marks]
    return found


def _hashes_of_codes(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of each unit, uint64, and the index of its first code point. `codes` are the code points."""
    kinds = kinds_of(codes)
    counts = kinds != IGNORED
    is_whole = counts.all()
    if not is_whole:
        codes, kinds = codes[counts], kinds[counts]
    in_unit = kinds != SPACE
    is_start = in_unit.copy()
    is_start[1:] &= (kinds[1:] == UNSPACED) | (kinds[:-1] != LETTER)
    codes, starts = codes[in_unit].astype(np.uint64), np.flatnonzero(is_start[in_unit])
    if not len(starts):
        return np.empty(0, np.uint64), starts
    first = np.flatnonzero(is_start) if is_whole else np.flatnonzero(counts)[is_start]
    lengths = np.append(starts[1:], len(codes)) - starts
    position = np.arange(len(codes)) - np.repeat(starts, lengths)
    with np.errstate(over="ignore"):
        codes *= _powers()[position & (_POWERS - 1)]
        return splitmix(np.add.reduceat(codes, starts)), first


@functools.cache
def _powers() -> np.ndarray:
    """Return the factor of each character of a word by its position: powers of an odd number, modulo 2^64."""
    factors = np.full(_POWERS, _CHARACTER_FACTOR, np.uint64)
    with np.errstate(over="ignore"):
        return np.cumprod(factors)
