"""What a word is. Sizes, shares, passages, filters and reports all count text in these words.

A word is the text between white space. Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan put no spaces
between words. There, words are those of Unicode's segmentation (UAX 29), which ICU finds, with its dictionaries.
Punctuation belongs to the word before it.

MAX_WORD_CHARACTERS characters without the end of a word count as a word. So a text without spaces, such as a DNA
sequence or encoded data, has a number of words that fits its length, and can be cut.
"""

import numpy as np

from data_prep.characters import LETTER, UNSPACED, codes_of, has_unspaced, kinds_of

MAX_WORD_CHARACTERS = 128
"""Maximum length of a word in characters. Longer ones count as several words."""
_SHORT = 4096
"""Number of characters below which the words of a text are counted without NumPy, which is then faster."""
_SEGMENTED_CHARACTERS = 1 << 16
"""Number of characters that ICU segments at a time, because it keeps all segments in memory."""
_SPACE_TABLE = np.array([chr(code).isspace() for code in range(0x3002)])
"""bool: whether a code point is white space, as `str.split` defines it. Larger code points are not."""
_IS_ASCII_SPACE = np.array([code < 128 and chr(code).isspace() for code in range(256)])


def count_words(text: str, content: bytes | None = None) -> int:
    """Return the number of words of a text.

    Args:
        text: the text.
        content: the same text in UTF-8, if the caller has it.
    """
    if len(text) < _SHORT and text.isascii():
        words = text.split()
        if max(map(len, words), default=0) <= MAX_WORD_CHARACTERS:
            return len(words)
    content = text.encode("utf-8") if content is None else content
    if len(text) == len(content):  # only ASCII
        is_space = _IS_ASCII_SPACE[np.frombuffer(content, np.uint8)]
        lengths = np.diff(np.flatnonzero(is_space), prepend=-1, append=len(content)) - 1
        is_long = lengths > MAX_WORD_CHARACTERS
        return int(np.count_nonzero(lengths) + ((lengths[is_long] - 1) // MAX_WORD_CHARACTERS).sum())
    if has_unspaced(content):
        return len(word_starts(text))
    words = text.split()
    if max(map(len, words), default=0) <= MAX_WORD_CHARACTERS:
        return len(words)
    long = [len(word) for word in words if len(word) > MAX_WORD_CHARACTERS]
    return len(words) + sum((length - 1) // MAX_WORD_CHARACTERS for length in long)


def split_words(text: str) -> list[str]:
    """Return the words of a text, each with the punctuation around it, and without white space.

    Long words are not divided, so that rules for quality can recognise them.
    """
    if not has_unspaced(text.encode("utf-8")):
        return text.split()
    starts = _uncapped_starts(text, codes_of(text)).tolist()
    return [text[start:end].rstrip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def word_starts(text: str) -> np.ndarray:
    """Return the positions of the characters with which the words of a text begin, int64 [number of words]."""
    codes = codes_of(text)
    starts = _uncapped_starts(text, codes)
    # A word ends at the next white space, or where the next word begins.
    breaks = np.union1d(starts, np.flatnonzero(_is_space(codes)))
    ends = np.append(breaks, len(codes))[np.searchsorted(breaks, starts, "right")]
    num_pieces = -(-(ends - starts) // MAX_WORD_CHARACTERS)
    if num_pieces.max(initial=1) == 1:
        return starts
    firsts = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    return np.repeat(starts, num_pieces) + (np.arange(num_pieces.sum()) - firsts) * MAX_WORD_CHARACTERS


def _uncapped_starts(text: str, codes: np.ndarray) -> np.ndarray:
    """Return the positions at which the words of a text begin, if words can be as long as they are."""
    is_space = _is_space(codes)
    is_start = ~is_space
    is_start[1:] &= is_space[:-1]
    kinds = kinds_of(codes)
    if (kinds == UNSPACED).any():
        is_start[_starts_within(text, kinds, np.flatnonzero(is_start))] = True
    return np.flatnonzero(is_start)


def _is_space(codes: np.ndarray) -> np.ndarray:
    """Return for each code point whether it is white space, bool."""
    return _SPACE_TABLE[np.minimum(codes, len(_SPACE_TABLE) - 1)]


def _starts_within(text: str, kinds: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the positions of words that begin without white space before them."""
    from icu4py.breakers import WordBreaker  # here, because most text does not need it

    found = [np.empty(0, np.int64)]
    has_unspaced_letter = np.logical_or.reduceat(kinds == UNSPACED, starts)
    ends = np.append(starts[1:], len(text))
    for start, end in zip(starts[has_unspaced_letter].tolist(), ends[has_unspaced_letter].tolist(), strict=True):
        for first in range(start, end, _SEGMENTED_CHARACTERS):
            part = text[first : min(end, first + _SEGMENTED_CHARACTERS)]
            segments = np.cumsum([0, *map(len, WordBreaker(part, "root"))])[:-1]
            of_part = kinds[first : first + len(part)]
            is_unspaced = np.logical_or.reduceat(of_part == UNSPACED, segments)
            has_letter = np.logical_or.reduceat(of_part == LETTER, segments) | is_unspaced
            # The first segment with a letter belongs to the word that begins with the punctuation before it. Segments
            # of other scripts, such as the two of "and/or", are one word, as elsewhere.
            letters, is_unspaced = segments[has_letter], is_unspaced[has_letter]
            found.append(first + letters[1:][is_unspaced[1:] | is_unspaced[:-1]])
    return np.concatenate(found)
