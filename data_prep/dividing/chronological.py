"""Divide a stream in time: each mega-batch is the text of one period, with held-out text of its own.

With partition="chronological", documents are sorted by date. The order is cut into periods of equal numbers of words,
or at given dates. A document belongs to one period as a whole. The period with index t - 1 becomes mega-batch t.

In each period, whole documents are held out for validation and for the test, so that no passage of a held-out document
is trained on. The validation set of the stream consists of the validation documents of all periods, and the test set
likewise.

The functions read and write no files. They compute with index entries (`index.ENTRY`) and dates (see `dates`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_prep.dividing.layout import _cumulative, _nearest, by_key, mixed
from data_prep.dividing.partition import MIN_MEGA_BATCH_WORDS
from data_prep.errors import PrepError
from data_prep.sources.dates import date_text


class HeldOut(NamedTuple):
    """How much text of each period is held out, as fractions of the words of the period."""

    valid: float
    test: float


class ChronologicalLayout(NamedTuple):
    """The order in which passages are written, the splits, and the dates of the periods."""

    order: np.ndarray
    """Indices into the array of passages, in the order in which passages are written."""
    cuts: list[int]
    """Split boundaries, as positions in `order`, in the order of `splits`."""
    splits: list[str]
    """Names: the validation text of each period, then the mega-batches, then the test text of each period."""
    periods: list[dict]
    """For each period, {"first_date": .., "last_date": ..}: the dates of its first and its last document."""


def held_out_fractions(total_words: int, valid_words: int, test_words: int | None, num_mega_batches: int) -> HeldOut:
    """Return how much text of each period of a new stream is held out.

    Args:
        total_words: number of words of all documents.
        valid_words: number of words of the validation set.
        test_words: number of words of the test set; None: as many as in a mega-batch.
        num_mega_batches: number of mega-batches, B.

    Raises:
        PrepError: if more than half of the text would be held out.
    """
    valid = valid_words / total_words
    test = (1 - valid) / (num_mega_batches + 1) if test_words is None else test_words / total_words
    if valid + test > 0.5:
        raise PrepError(
            f"the validation set and the test set would take {valid + test:.0%} of the {total_words:,} words: lower "
            "--valid-words or --test-words to at most half of the text."
        )
    return HeldOut(valid, test)


def chronological_layout(
    passages: np.ndarray,
    dates: np.ndarray,
    strata: np.ndarray,
    held_out: HeldOut,
    cut_at: list[int] | int,
    valid_strata: Sequence[int] | None = None,
    first: int = 1,
) -> ChronologicalLayout:
    """Return the layout of a chronological stream, or of mega-batches that are added to one.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        dates: int64 [number of passages], the date of the document of each passage.
        strata: int [number of sources], index of the stratum of each source (see `layout.mixed`).
        held_out: how much text of each period is held out.
        cut_at: the number of periods, all with the same number of words; or the dates at which periods begin, without
            that of the first period.
        valid_strata: the strata from which the validation text is taken; None: all strata.
        first: number of the first mega-batch.

    Raises:
        PrepError: if a period has too little text.
    """
    documents = _documents(passages, dates)
    ends = _period_ends(documents, cut_at)
    parts: dict[str, list[np.ndarray]] = {"valid": [], "train": [], "test": []}
    periods = []
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        name = f"mega_batch_{first + number}"
        if start == end:
            raise PrepError(f"{_period(name, documents, start, end)} contains no document. {_ADVICE}")
        is_candidate = np.ones(end - start, bool)
        if valid_strata is not None:
            source_of = passages["source"][documents.order[documents.first[start:end]]]
            is_candidate = np.isin(strata[source_of], valid_strata)
        part_of = _hold_out(documents, start, end, is_candidate, held_out)
        for index, part in enumerate(parts):
            which = documents.passages_of(start + np.flatnonzero(part_of == index))
            words = int(passages["num_words"][which].sum(dtype=np.int64))
            least = MIN_MEGA_BATCH_WORDS if part == "train" else 1
            if words < least:
                raise PrepError(
                    f"{_period(name, documents, start, end)} has too few documents: {words:,} words are left for "
                    f"{'training' if part == 'train' else part}, but at least {least:,} are needed. {_ADVICE}"
                )
            # The stored key of the first passage of a document has decided whether the document is held out. By the
            # same key, no mega-batch would begin with the beginning of a document.
            parts[part].append(mixed(passages, strata, which, purpose="order of a period"))
        bounds = [int(documents.dates[at]) for at in (start, end - 1)]
        periods.append(dict(zip(("first_date", "last_date"), map(date_text, bounds), strict=True)))
    numbers = range(first, first + len(periods))
    splits = [f"mega_batch_{t}/valid" for t in numbers]
    splits += [f"mega_batch_{t}" for t in numbers]
    splits += [f"mega_batch_{t}/test" for t in numbers]
    orders = [*parts["valid"], *parts["train"], *parts["test"]]
    cuts = [0, *np.cumsum([len(order) for order in orders]).tolist()]
    return ChronologicalLayout(np.concatenate(orders), cuts, splits, periods)


def period_unions(num_mega_batches: int) -> dict[str, list[str]]:
    """Return the names of the splits that the validation set and the test set of a new stream consist of."""
    numbers = range(1, num_mega_batches + 1)
    return {part: [f"mega_batch_{t}/{part}" for t in numbers] for part in ("valid", "test")}


_ADVICE = (
    "Held-out text consists of whole documents, so each period needs several documents: lower --mega-batches, change "
    "--cut-dates, or add sources."
)


class _Documents(NamedTuple):
    """The documents of a stream in order of time."""

    order: np.ndarray
    """Indices into the array of passages. The passages of a document follow one another."""
    first: np.ndarray
    """For each document, the position in `order` of its first passage, and the number of passages as last element."""
    dates: np.ndarray
    """The date of each document."""
    num_words: np.ndarray
    """The number of words of each document."""
    shuffled: np.ndarray
    """Position of each document in a shuffled order of all documents."""

    def passages_of(self, which: np.ndarray) -> np.ndarray:
        """Return the indices of the passages of some documents. `which` contains their indices."""
        lengths = self.first[which + 1] - self.first[which]
        # The positions in `order` of the passages: first[i], first[i] + 1, .. for each document i.
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self.order[np.repeat(self.first[which], lengths) + within]


def _documents(passages: np.ndarray, dates: np.ndarray) -> _Documents:
    """Sort passages by the date and the text of their documents. Copies with equal dates count as one document."""
    halves = np.ascontiguousarray(passages["document"]).view(">u8").reshape(-1, 2)
    order = np.lexsort((passages["passage"], halves[:, 1], halves[:, 0], dates))
    halves, sorted_dates = halves[order], dates[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (halves[1:] != halves[:-1]).any(axis=1) | (sorted_dates[1:] != sorted_dates[:-1])
    first = np.flatnonzero(is_new)
    num_words = np.add.reduceat(passages["num_words"][order].astype(np.int64), first)
    # The key of a document's first passage is pseudo-random and depends on the seed.
    shuffled = np.empty(len(first), np.int64)
    shuffled[by_key(passages[order[first]])] = np.arange(len(first))
    return _Documents(order, np.append(first, len(order)), sorted_dates[first], num_words, shuffled)


def _period_ends(documents: _Documents, cut_at: list[int] | int) -> list[int]:
    """Return the index after the last document of each period."""
    if isinstance(cut_at, int):
        cumulative = _cumulative(documents.num_words)
        total = int(cumulative[-1])
        ends = [_nearest(cumulative, total * number // cut_at) for number in range(1, cut_at)]
    else:
        ends = np.searchsorted(documents.dates, cut_at, "left").tolist()
    return [*ends, len(documents.num_words)]


def _hold_out(documents: _Documents, start: int, end: int, is_candidate: np.ndarray, held_out: HeldOut) -> np.ndarray:
    """Choose the held-out documents of a period: 0 for validation, 1 for training, 2 for the test, int [end - start].

    Documents are taken in the shuffled order, first for validation and then for the test, until their number of words
    is nearest to the wanted one. At least one document is taken for each.

    Args:
        documents: all documents.
        start, end: the documents of the period are those from `start` (included) to `end` (excluded).
        is_candidate: bool [end - start], which documents can be validated on.
        held_out: how much text is held out, as fractions of the words of the period.
    """
    part_of = np.ones(end - start, np.int8)
    total = int(documents.num_words[start:end].sum())
    for part, fraction in ((0, held_out.valid), (2, held_out.test)):
        which = np.flatnonzero((part_of == 1) & (is_candidate | (part == 2)))
        which = which[np.argsort(documents.shuffled[start + which])]
        cumulative = _cumulative(documents.num_words[start + which])
        part_of[which[: max(1, _nearest(cumulative, round(total * fraction)))]] = part
    return part_of


def _period(name: str, documents: _Documents, start: int, end: int) -> str:
    """Return words for an error message that name a period and its dates."""
    if start == end:
        return f"the period of {name}"
    return f"the period of {name} ({date_text(documents.dates[start])} to {date_text(documents.dates[end - 1])})"
