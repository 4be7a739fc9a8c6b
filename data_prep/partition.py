"""The partition of DESIGN section 4: passages out of documents, their seeded order, the cuts between mega-batches.

Everything here is arithmetic on words; nothing reads or writes a file.
"""

import hashlib
import itertools
import re
from typing import NamedTuple

import numpy as np

from data_prep.errors import PrepError

MIN_MEGA_BATCH_WORDS = 1000
"""Below this, the 1% by which mega-batches may differ would be less than ten words."""

# Each match ends where the next paragraph, line or word begins, so that the pieces joined are the text.
PARAGRAPH_END = re.compile(r"\n(?:[^\S\n]*\n)+")
LINE_END = re.compile(r"\n")
WORD_END = re.compile(r"(?<=\S)\s+")


class Plan(NamedTuple):
    """How much text goes where. All counts are in words."""

    valid_words: int
    mega_batch_words: int
    """The equal share of each mega-batch and of the test set."""
    passage_words: int
    """How long the passages of a long document become, about."""
    limit_words: int
    """1% of a mega-batch: a longer document is cut."""


def default_valid_words(total_words: int) -> int:
    return max(1, min(500_000, total_words // 100))


def default_passage_words(mega_batch_words: int) -> int:
    return min(2000, mega_batch_words // 500)


def make_plan(total_words: int, num_mega_batches: int, valid_words: int | None, passage_words: int | None) -> Plan:
    """Resolve the defaults. Raises PrepError if there is too little text, or passages are set too long."""
    if valid_words is None:
        valid_words = default_valid_words(total_words)
    shares = num_mega_batches + 1  # the last one is the test set
    wanted_words = valid_words + shares * MIN_MEGA_BATCH_WORDS
    if total_words < wanted_words:
        raise PrepError(
            f"too little text: found {total_words:,} words, but {num_mega_batches} mega-batches and a test set "
            f"(at least {MIN_MEGA_BATCH_WORDS:,} words each) with {valid_words:,} validation words want at least "
            f"{wanted_words:,}. Add sources, or lower --mega-batches or --valid-words."
        )
    mega_batch_words = (total_words - valid_words) // shares
    limit_words = mega_batch_words // 100
    if passage_words is None:
        passage_words = default_passage_words(mega_batch_words)
    if passage_words > limit_words:
        raise PrepError(
            f"passage_words={passage_words} is more than 1% of a mega-batch ({mega_batch_words:,} words), so "
            f"mega-batches could not come out equal. Give --passage-words at most {limit_words}."
        )
    return Plan(valid_words, mega_batch_words, passage_words, limit_words)


def cut_document(text: str, passage_words: int, limit_words: int) -> list[str]:
    """Cut a document longer than `limit_words` into passages; joined they are the document, character by character.

    It is cut at paragraph ends. Only a paragraph that is itself longer than the limit is cut at line ends, and
    only a line longer than the limit between words. Neighbouring pieces are joined up to `passage_words`.
    """
    if _num_words(text) <= limit_words:
        return [text]
    pieces = []
    for paragraph in _split_after(PARAGRAPH_END, text):
        if _num_words(paragraph) <= limit_words:
            pieces.append(paragraph)
            continue
        for line in _split_after(LINE_END, paragraph):
            pieces += [line] if _num_words(line) <= limit_words else _split_after(WORD_END, line)
    return _join_up_to(passage_words, pieces)


def _num_words(text: str) -> int:
    return len(text.split())


def _split_after(pattern: re.Pattern, text: str) -> list[str]:
    ends = [match.end() for match in pattern.finditer(text)]
    bounds = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _join_up_to(passage_words: int, pieces: list[str]) -> list[str]:
    """Join neighbours as long as they stay within `passage_words`. Pieces without a word never stand alone."""
    passages: list[str] = []
    current: list[str] = []
    current_words = 0
    for piece in pieces:
        num_words = _num_words(piece)
        if current_words and num_words and current_words + num_words > passage_words:
            passages.append("".join(current))
            current, current_words = [], 0
        current.append(piece)
        current_words += num_words
    return [*passages, "".join(current)]


def order_key(seed: int, identity: bytes, passage_number: int) -> bytes:
    """hash(seed, identity, passage number), 16 bytes: passages are laid out in the order of their keys."""
    digest = hashlib.sha256(f"{seed} {passage_number} ".encode() + identity)
    return digest.digest()[:16]


def in_order(entries: np.ndarray) -> np.ndarray:
    """Sort entries by key. Equal keys mean equal text, so that no order among them can show."""
    halves = np.ascontiguousarray(entries["key"]).view(">u8").reshape(-1, 2)
    return entries[np.lexsort((halves[:, 1], halves[:, 0]))]


def split_order(num_mega_batches: int) -> list[str]:
    """The splits in the order in which `cut_points` cuts them off."""
    return ["valid", *(f"mega_batch_{t}" for t in range(1, num_mega_batches + 1)), "test"]


def cut_points(words: np.ndarray, valid_words: int, num_mega_batches: int) -> list[int]:
    """Where splits begin in passages of so many `words`: [0, end of valid, end of mega-batch 1, .., end of test].

    The validation set comes first. Each cut falls at the passage end nearest to its share, so that a mega-batch
    is at most the longest passage away from an equal share.
    """
    cumulative = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    valid_end = max(1, _nearest(cumulative, valid_words))  # never an empty validation set
    taken, total = int(cumulative[valid_end]), int(cumulative[-1])
    shares = num_mega_batches + 1
    ends = [_nearest(cumulative, taken + (total - taken) * share // shares) for share in range(1, shares)]
    return [0, valid_end, *ends, len(words)]


def _nearest(cumulative: np.ndarray, target: int) -> int:
    after = int(np.searchsorted(cumulative, target))
    if after > 0 and target - cumulative[after - 1] <= cumulative[after] - target:
        return after - 1
    return after
