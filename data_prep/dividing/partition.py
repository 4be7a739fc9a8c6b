"""Compute the sizes of splits, and cut long documents into passages (docs/design.md).

The splits are the mega-batches, the validation set and the test set.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import Unworkable
from data_prep.reading.index import ENTRY, order_key
from data_prep.reading.spool import read_text
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task
from data_prep.words import word_starts

MIN_MEGA_BATCH_WORDS = 1000
"""Minimum number of words in a mega-batch. The length of a passage is limited to 1% of a mega-batch, so passages of a
smaller mega-batch would have fewer than ten words."""

# Each pattern matches the characters between two paragraphs or lines. A text is cut where a match ends, which is where
# the next paragraph or line begins. So no character is lost.
PARAGRAPH_END = re.compile(r"\n(?:[^\S\n]*\n)+")
LINE_END = re.compile(r"\n")


class Plan(NamedTuple):
    """The sizes of splits and passages, in words. A passage is a document, or a piece of a long document."""

    valid_words: int
    """Number of words in the validation set."""
    mega_batch_words: int
    """Number of words in each mega-batch and in the test set."""
    passage_words: int
    """Approximate length of the passages into which a long document is cut, in words."""
    limit_words: int
    """Maximum length of an uncut document, in words: 1% of a mega-batch; half of the validation set or of the test set,
    but at least a passage, if that is less. Longer documents are cut into passages, so that all of these have nearly
    the sizes that they should."""


def make_plan(
    total_words: int, num_mega_batches: int, valid_words: int | None, passage_words: int | None, extends: bool = False,
    test_words: int | None = None, whole_documents: bool = False,
) -> Plan:  # fmt: skip
    """Return the sizes of the splits and passages of a stream.

    Args:
        total_words: number of words in all documents.
        num_mega_batches: number of mega-batches, B.
        valid_words: number of words in the validation set; None: 1% of all words, but at most 500 000.
        passage_words: number of words in a passage of a long document; None: 0.2% of a mega-batch, but at most 2000.
        extends: whether the mega-batches are added to a stream, so that there is no validation set and no test set.
        test_words: number of words in the test set; None: as many as in a mega-batch.
        whole_documents: whether whole documents are held out, so that shorter passages make no held-out set more exact.

    Raises:
        Unworkable: if there is too little text, or `passage_words` is too large.
    """
    if extends:
        valid_words = 0
    elif valid_words is None:
        valid_words = max(1, min(500_000, total_words // 100))
    # Without a size of its own, the test set has as many words as a mega-batch, so it counts as one.
    shares = num_mega_batches if extends or test_words is not None else num_mega_batches + 1
    held_out_words = valid_words + (test_words or 0)
    needed_words = held_out_words + shares * MIN_MEGA_BATCH_WORDS
    if total_words < needed_words and extends:
        raise Unworkable(
            f"too little text: only {total_words:,} words of new text can be used, but {num_mega_batches} mega-batches "
            f"need at least {needed_words:,}. Wait for more text, or add sources."
        )
    if total_words < needed_words:
        raise Unworkable(
            f"too little text: found {total_words:,} words, but {num_mega_batches} mega-batches"
            + (" and a test set" if test_words is None else "")
            + f" (at least {MIN_MEGA_BATCH_WORDS:,} words each) and {valid_words:,} validation words"
            + (f" and {test_words:,} test words" if test_words is not None else "")
            + f" need at least {needed_words:,}. Add sources, or lower --mega-batches (or give a longer --period), "
            + "--valid-words or --test-words."
        )
    mega_batch_words = (total_words - held_out_words) // shares
    limit_words = mega_batch_words // 100
    if passage_words is None:
        passage_words = min(2000, mega_batch_words // 500)
    if passage_words > limit_words:
        raise Unworkable(
            f"passage_words={passage_words} is more than 1% of a mega-batch ({mega_batch_words:,} words), so "
            f"mega-batches could not have equal sizes. Set --passage-words to at most {limit_words}."
        )
    held_out = [size for size in (valid_words, test_words) if size]
    if held_out and not whole_documents:
        limit_words = min(limit_words, max(passage_words, min(held_out) // 2))
    return Plan(valid_words, mega_batch_words, passage_words, limit_words)


class Passage(NamedTuple):
    """A document, or a piece of a long document."""

    text: str
    num_words: int


def cut_document(text: str, passage_words: int, limit_words: int) -> list[Passage]:
    """Cut a document into passages if the document is longer than `limit_words`.

    The document is cut at paragraph ends. Only a paragraph longer than `limit_words` is also cut at line ends, and
    only a line longer than `limit_words` is also cut between words. Then neighbouring parts are joined into passages of
    up to `passage_words` words (see `_join_up_to`). No character is lost: joining all passages gives the exact text of
    the document. The passages together have as many words as the document.
    """
    starts = word_starts(text)
    if len(starts) <= limit_words:
        return [Passage(text, len(starts))]

    def num_words(start: int, end: int) -> int:
        first, last = np.searchsorted(starts, (start, end))
        return int(last - first)

    cuts = [0]
    for start, end in _pieces(PARAGRAPH_END, text, 0, len(text)):
        if num_words(start, end) > limit_words:
            for line_start, line_end in _pieces(LINE_END, text, start, end):
                if num_words(line_start, line_end) > limit_words:
                    first, last = np.searchsorted(starts, (line_start + 1, line_end))
                    cuts += starts[first:last].tolist()
                cuts.append(line_end)
        else:
            cuts.append(end)
    return [Passage(text[start:end], num_words(start, end)) for start, end in _joined(cuts, starts, passage_words)]


def _pieces(pattern: re.Pattern, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each piece of a part of a text, which is split after each match of a pattern."""
    ends = [match.end() for match in pattern.finditer(text, start, end)]
    yield from itertools.pairwise(sorted({start, *ends, end}))


def _joined(cuts: list[int], starts: np.ndarray, passage_words: int) -> Iterator[tuple[int, int]]:
    """Join neighbouring parts of a document into passages of up to `passage_words` words. Yield their starts and ends.

    A part with more than `passage_words` words is not cut, so its passage is longer than `passage_words` words. A part
    without words, such as a blank line, is always joined with another part.
    """
    words_before = np.searchsorted(starts, cuts).tolist()
    first = 0
    for part in range(1, len(cuts) - 1):
        has_words = words_before[part + 1] > words_before[part] > words_before[first]
        if has_words and words_before[part + 1] - words_before[first] > passage_words:
            yield cuts[first], cuts[part]
            first = part
    yield cuts[first], cuts[-1]


@dataclass(frozen=True)
class CutTask(Task):
    """Task that cuts the documents from `start` (included) to `end` (excluded) in a file into passages.

    It writes the index entry (`index.ENTRY`) of each passage to PREFIX.passages.npy. The text stays in the spool.
    """

    spool: str
    seed: int
    plan: Plan
    long_documents: str
    """Path of the file with the index entry (`index.ENTRY`) of each document that must be cut."""
    sha256: str
    """SHA-256 digest of the file `long_documents`."""
    start: int
    end: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        rows = []
        for entry in np.load(self.long_documents, mmap_mode="r")[self.start : self.end]:
            heartbeat.beat()
            text, offset = read_text(Path(self.spool), entry), int(entry["offset"])
            identity = hashlib.sha256(text.encode("utf-8")).digest()
            with heartbeat.computing():  # a document of 16 MB can take a minute
                passages = cut_document(text, self.plan.passage_words, self.plan.limit_words)
            for number, passage in enumerate(passages):
                num_bytes = len(passage.text.encode("utf-8"))
                key, document = order_key(self.seed, identity, number), bytes(entry["document"])
                place = (offset, entry["shard"], num_bytes, passage.num_words, entry["source"], entry["group"])
                rows.append((key, document, *place, number))
                offset += num_bytes
        with open(f"{prefix}.passages.npy", "wb") as file:
            np.save(file, np.array(rows, dtype=ENTRY))
        return {"passages": len(rows)}
