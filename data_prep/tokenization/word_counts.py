"""Count the words of a text, so that a byte-level BPE can be trained on the counts instead of the text.

The trainer of the tokenizers library first splits all text into GPT-2's words and counts them; it then needs only the
counts. Nearly all of its time is GPT-2's regular expression. Here, text is first split at simpler points (see
`split_words`), and GPT-2's expression is applied once to each different word. So the counting can be divided among many
tasks, each of which writes a table of its words and their counts.

In a table, a word is written in the alphabet of byte-level BPE: one letter per byte, such as `Ġthe` for " the". It has
no space and no line end.
"""

import functools
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    starts = _starts(data, ends)
    offsets = np.append(starts, len(data)).astype(np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    words = pyarrow.BinaryArray.from_buffers(pyarrow.binary(), len(starts), buffers).dictionary_encode()
    return Words(words.dictionary.to_pylist(), words.indices.to_numpy(), np.searchsorted(starts, ends))


def _starts(content: bytes, ends: np.ndarray) -> np.ndarray:
    """Return the positions at which words start."""
    if not content:
        return np.empty(0, np.int64)
    data = np.frombuffer(content, np.uint8)
    for wide in _WIDE_SPACES:
        content = content.replace(wide, b"\t" * len(wide))
    is_space = _IS_ASCII_SPACE[np.frombuffer(content, np.uint8)]
    # Where each run of white space begins and ends. A run ends at the end of its text.
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


_IS_ASCII_SPACE = np.array([code < 128 and bool(re.match(_SPACE, chr(code))) for code in range(256)])
_WIDE_SPACES = [space.encode("utf-8") for space in re.findall(_SPACE, "".join(map(chr, range(128, 0x3001))))]
"""The white space characters of more than one byte."""

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import ByteLevel

SEPARATOR = "\n"
"""The character between two words in the texts of `texts_with_counts`. No word contains it."""
_COPIES = 1024
"""Maximum number of words in a text of `texts_with_counts`. With fewer, the trainer is slower."""
_TEXT_LETTERS = 1 << 16
"""Approximate maximum number of letters in a text. A long word is therefore copied fewer than `_COPIES` times."""
_KNOWN_LETTERS = 64
"""Parts that are longer than this are split again each time, and not cached."""
_BATCH_LETTERS = 1 << 20
"""Approximate number of letters that are split at once."""
MAX_TRAINING_WORD_BYTES = 1024
"""A longer word, such as a DNA sequence, is divided into pieces, which are counted as words. The time of the trainer
grows with the square of the length of a word. Words of natural language are shorter, also in Chinese and Thai."""
_PART_LETTERS = 1 << 18
"""A longer text without white space is divided before GPT-2's expression is applied, which needs 350 bytes for each
word."""


class WordCounts(Counter[str]):
    """Maps each word to its number of occurrences, and counts the long words that were divided into pieces."""

    num_divided = 0
    """Number of words (occurrences) of more than MAX_TRAINING_WORD_BYTES bytes."""
    longest = 0
    """Number of bytes of the longest of these words."""

    def add(self, word: str, count: int) -> None:
        """Count a word, or the pieces of a long one. A letter of the word is a byte."""
        if len(word) <= MAX_TRAINING_WORD_BYTES:
            self[word] += count
            return
        self.num_divided += count
        self.longest = max(self.longest, len(word))
        for start in range(0, len(word), MAX_TRAINING_WORD_BYTES):
            self[word[start : start + MAX_TRAINING_WORD_BYTES]] += count


@functools.cache
def gpt2_words() -> "ByteLevel":
    """Return the part of the tokenizers library that splits text into GPT-2's words."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def count_words(texts: Iterable[str]) -> WordCounts:
    """Return GPT-2's words of all texts and their numbers of occurrences. Long words are divided."""
    parts: Counter[bytes] = Counter()
    for batch in _batches(texts):
        words = split_words(batch)
        parts.update(dict(zip(words.different, np.bincount(words.numbers).tolist(), strict=True)))
    counts = WordCounts()
    for part, count in parts.items():
        text = part.decode("utf-8")
        for word in _known_words_of(text) if len(text) <= _KNOWN_LETTERS else _words_of(text):
            counts.add(word, count)
    return counts


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts of at least `_BATCH_LETTERS` letters, except the last list."""
    batch: list[str] = []
    num_letters = 0
    for text in texts:
        batch.append(text)
        num_letters += len(text)
        if num_letters >= _BATCH_LETTERS:
            yield batch
            batch, num_letters = [], 0
    yield batch


def _words_of(part: str) -> Iterator[str]:
    """Yield GPT-2's words of a part of a text that `split_words` has split off."""
    for start in range(0, len(part), _PART_LETTERS):
        for word, _ in gpt2_words().pre_tokenize_str(part[start : start + _PART_LETTERS]):
            yield word


@functools.lru_cache(maxsize=1 << 17)  # cached, because a worker counts the words of many texts
def _known_words_of(part: str) -> list[str]:
    return list(_words_of(part))


def write_table(counts: Counter[str], path: Path) -> None:
    """Write words and their counts to a file, one word per line, sorted by word."""
    # The space sorts before all letters of the words. So the lines are sorted, too.
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{word} {counts[word]}\n" for word in sorted(counts))


def added_tables(paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """Yield each word of several tables and the sum of its counts, sorted by word. No table is read into memory.

    Args:
        paths: files that `write_table` wrote. All of them are opened at the same time.
    """
    with ExitStack() as stack:
        tables = [stack.enter_context(open(path, encoding="utf-8", newline="\n")) for path in paths]
        lines = (line.split(" ") for line in heapq.merge(*tables))
        for word, same in itertools.groupby(lines, key=lambda line: line[0]):
            yield word, sum(int(count) for _, count in same)


def texts_with_counts(counts: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yield texts for a BPE trainer in which each word occurs as often as its count says, with SEPARATOR between words.

    The trainer of the tokenizers library accepts no counts. It splits text at a separator five times as fast as with
    GPT-2's regular expression. Words of one letter are left out: they have no pair of letters that could be merged, and
    the trainer has all letters of the alphabet anyway.
    """
    text: list[str] = []
    num_letters = 0
    for word, count in counts:
        if len(word) == 1:
            continue
        copies = min(_COPIES, 1 + _TEXT_LETTERS // len(word))
        full, rest = divmod(count, copies)
        if full:
            yield from itertools.repeat(SEPARATOR.join([word] * copies), full)
        text += [word] * rest
        num_letters += len(word) * rest
        if len(text) >= _COPIES or num_letters >= _TEXT_LETTERS:
            yield SEPARATOR.join(text)
            text, num_letters = [], 0
    if text:
        yield SEPARATOR.join(text)
