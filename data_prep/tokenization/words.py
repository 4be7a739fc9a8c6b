"""Split texts into words that byte-level BPE can encode, or count, one by one.

GPT-2's regular expression takes most of the time of encoding and counting. Here, text is first split at simpler
points, and GPT-2's expression is applied once to each different word. GPT-2's expression also splits at all of these
points, so GPT-2's words, and therefore the tokens, are the same.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# The characters that the tokenizers library treats as white space. Python's \s and str.isspace cannot be used instead,
# because they also match four control characters that are not white space in the tokenizers library.
_SPACE = "[\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"


class Words(NamedTuple):
    """The words of some texts."""

    different: list[bytes]
    """All different words in UTF-8, in the order of their first occurrences."""
    numbers: np.ndarray
    """int32 [number of words]: the words of all texts, as indices into `different`."""
    ends: np.ndarray
    """int64 [number of texts]: index after the last word of each text in `numbers`."""


def split_words(texts: Sequence[str]) -> Words:
    """Split texts into words.

    A word is one of these, as in the regular expression `` ?[^S]+|S+(?![^S])|S+``, where S is a white space character:
        characters other than white space, with one space before them if there is one;
        white space, without its last character if another character follows;
        the last character of white space, if it is no space and another character follows.

    Args:
        texts: texts of together at most 2 GB in UTF-8.
    """
    import pyarrow  # in the worker and not above, because alma-prep itself never needs it

    encoded = [text.encode("utf-8") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    data = b"".join(encoded)
    starts = _starts(np.frombuffer(data, np.uint8), ends)
    offsets = np.append(starts, len(data)).astype(np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    words = pyarrow.BinaryArray.from_buffers(pyarrow.binary(), len(starts), buffers).dictionary_encode()
    return Words(words.dictionary.to_pylist(), words.indices.to_numpy(), np.searchsorted(starts, ends))


def _starts(data: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the positions at which words start.

    Args:
        data: uint8 [number of bytes], the texts in UTF-8, one after another.
        ends: int64 [number of texts], the position after the last byte of each text.

    Returns:
        int64 [number of words].
    """
    if not len(data):
        return np.empty(0, np.int64)
    is_space = _ascii_space()[data]
    for position, length in _other_spaces(data):
        for following in range(length):
            is_space[position + following] = True
    # The first and the last bytes of white space. It does not go on from one text to the next.
    is_start, is_last = is_space.copy(), is_space.copy()
    is_start[1:] &= ~is_space[:-1]
    is_last[:-1] &= ~is_space[1:]
    is_last[ends[ends > 0] - 1] = False  # no other character follows in the text
    is_start[0] = True
    is_start[ends[ends < len(data)]] = True
    last = np.flatnonzero(is_last)
    is_start[last[data[last] != ord(" ")] + 1] = True
    for _ in range(2):  # to the first byte of the last white space character. Bytes like 10xxxxxx continue a character
        last -= (data[last] & 0xC0) == 0x80
    is_start[last] = True
    return np.flatnonzero(is_start)


def _other_spaces(data: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Return the positions of the white space characters of more than one byte, and the number of bytes they have."""
    first, codes = _other_codes()
    found = np.flatnonzero(first[data])
    padded = np.append(data, np.zeros(2, np.uint8))
    result = []
    for length, known in codes.items():
        value = np.zeros(len(found), np.uint32)
        for following in range(length):
            value = (value << 8) + padded[found + following]
        result.append((found[np.isin(value, known)], length))
    return result


@functools.cache
def _ascii_space() -> np.ndarray:
    """bool [256]: whether a byte is a white space character."""
    return np.array([byte < 128 and bool(re.match(_SPACE, chr(byte))) for byte in range(256)])


@functools.cache
def _other_codes() -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return the white space characters of more than one byte.

    Returns:
        bool [256]: whether such a character starts with a byte.
        Number of bytes -> all such characters of this length, as the number that the bytes form.
    """
    letters = [chr(code).encode("utf-8") for code in range(128, 1 << 16) if re.match(_SPACE, chr(code))]
    first = np.isin(np.arange(256), [letter[0] for letter in letters])
    lengths = {len(letter) for letter in letters}
    codes = {size: [int.from_bytes(one) for one in letters if len(one) == size] for size in sorted(lengths)}
    return first, {size: np.array(known, np.uint32) for size, known in codes.items()}
