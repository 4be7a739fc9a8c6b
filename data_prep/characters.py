"""What kinds of characters a text consists of: spaces, letters, scripts without spaces, and characters no reader sees.

All functions look characters up in a table by code point, with NumPy, which is about ten times as fast as a loop over
the characters of a Python string.
"""

import sys
import unicodedata

import numpy as np

SPACE, LETTER, UNSPACED, IGNORED, _UNKNOWN = 0, 1, 2, 3, 4
"""Kinds of characters, see `kinds_of`."""
_BLOCK_CHARACTERS = 1 << 8
"""Number of neighbouring characters whose kinds are looked up together."""
_UNSPACED_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x19E0, 0x19FF),  # Khmer symbols
    (0x2E80, 0x2FDF),  # radicals of Chinese characters
    (0x3005, 0x3007),  # iteration mark, closing mark and zero of Chinese characters
    (0x3041, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Chinese characters, extension A
    (0x4E00, 0x9FFF),  # Chinese characters
    (0xA9E0, 0xA9FF),  # Burmese extensions
    (0xAA60, 0xAA7F),  # Burmese extensions
    (0xF900, 0xFAFF),  # compatibility forms of Chinese characters
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x1B000, 0x1B16F),  # Kana supplements
    (0x20000, 0x3FFFF),  # Chinese characters, extensions B and later
)
"""Ranges of code points (first, last) of the scripts that do not separate words by spaces."""
_HANGUL = (0xAC00, 0xD7A3)
"""The first and the last syllable of Hangul."""
SCRIPTS = ("alphabet", "syllables", "unspaced")
"""Kinds of scripts. In alphabets (here also those without vowels), a character is a sound. In Hangul, a character is a
syllable. The scripts that do not separate words by spaces are a kind of their own."""
_CONTROLS = bytes([*range(9), *range(14, 28), 127])
"""The control characters of ASCII that are not white space."""
_ASCII = bytes(range(128))
_REPLACEMENT = 0xFFFD
MAX_UNREADABLE = 0.01
"""Maximum fraction of the characters of a document that may be unreadable, see `num_unreadable`."""


# Tables of all code points. The first two are filled only for the blocks of characters that occur (see `kinds_of`):
# a worker needs a second of CPU time to look up all 1.1 million code points, and most text uses a few blocks.
_KIND = np.full(sys.maxunicode + 1, _UNKNOWN, np.uint8)
_IS_UNREADABLE, _IS_UNSPACED = np.zeros((2, sys.maxunicode + 1), bool)
for _first, _last in _UNSPACED_RANGES:
    _IS_UNSPACED[_first : _last + 1] = True


def kinds_of(codes: np.ndarray) -> np.ndarray:
    """Return the kind of each character, uint8. `codes` are the code points, uint32.

    A kind is SPACE (white space, and for the comparison of texts also dashes and the slash), UNSPACED (a letter or
    digit of a script without spaces), LETTER (any other letter, digit or mark), or IGNORED (everything else).
    """
    kinds = _KIND[codes]
    is_unknown = kinds == _UNKNOWN
    if is_unknown.any():
        for block in np.unique(codes[is_unknown] // _BLOCK_CHARACTERS).tolist():
            for code in range(block * _BLOCK_CHARACTERS, (block + 1) * _BLOCK_CHARACTERS):
                _look_up(code)
        kinds = _KIND[codes]
    return kinds


def _look_up(code: int) -> None:
    """Fill the tables for a character."""
    character = chr(code)
    category = unicodedata.category(character)
    is_unspaced = _IS_UNSPACED[code]
    kind = IGNORED
    if character.isspace() or category == "Pd" or character == "/":
        kind = SPACE
    elif is_unspaced and category[0] == "M" and code <= 0xFFFF:
        # Vowel signs of these scripts are marks that belong to the letter before them. They are ignored.
        pass
    elif category[0] in "LNM":
        kind = UNSPACED if is_unspaced else LETTER
    _KIND[code] = kind
    is_control = category == "Cc" and not character.isspace()
    _IS_UNREADABLE[code] = code == _REPLACEMENT or category in ("Co", "Cs", "Cn") or is_control


def codes_of(text: str) -> np.ndarray:
    """Return the code points of a text, uint32 [number of characters]."""
    # Halves of UTF-16 pairs, which are no valid characters, keep their code points.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def has_unspaced(content: bytes) -> bool:
    """Return True if a text in UTF-8 contains letters of scripts without spaces.

    The answer takes little time for text of European languages. Their characters have up to two bytes, apart from marks
    such as “ and ”, which begin with the byte E2.
    """
    data = np.frombuffer(content, np.uint8)
    if not ((data >= 0xE0) & (data != 0xE2)).any():
        return False
    return bool((kinds_of(codes_of(_without_ascii(content))) == UNSPACED).any())


def script_of(text: str) -> str:
    """Return the kind of script, one of SCRIPTS, of most letters of a text."""
    if text.isascii():
        return "alphabet"
    codes = codes_of(text)
    counts = np.bincount(kinds_of(codes), minlength=_UNKNOWN)
    num_hangul = int(np.count_nonzero((codes >= _HANGUL[0]) & (codes <= _HANGUL[1])))
    # The letters of Hangul count as LETTER, too.
    by_script = {"unspaced": counts[UNSPACED], "syllables": num_hangul, "alphabet": counts[LETTER] - num_hangul}
    return max(by_script, key=by_script.__getitem__)


def num_unreadable(text: str, content: bytes) -> int:
    """Return the number of characters that no reader can read.

    These are control characters other than white space, U+FFFD (which replaces bytes that could not be decoded), and
    code points without a character: private use, surrogates and unassigned ones.

    Args:
        text: the text.
        content: the same text in UTF-8.
    """
    num_controls = len(content) - len(content.translate(None, _CONTROLS))
    if len(text) == len(content):  # only ASCII
        return num_controls
    codes = codes_of(_without_ascii(content))
    kinds_of(codes)  # which fills the tables
    return num_controls + int(np.count_nonzero(_IS_UNREADABLE[codes]))


def _without_ascii(content: bytes) -> str:
    """Return the characters of a text in UTF-8 that are not ASCII. Usually, there are few, so this saves time."""
    return content.translate(None, _ASCII).decode("utf-8")
