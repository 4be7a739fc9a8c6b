"""Divide a stream in time: each mega-batch is the text of one period, with held-out text of its own.

With partition="chronological", documents are sorted by date. The order is cut into periods of equal numbers of words,
or at dates (the setting `period`). A document belongs to one period as a whole. The period with index t - 1 becomes
mega-batch t.

In each period, whole documents are held out for validation and for the test, so that no passage of a held-out document
is trained on. The validation set of the stream consists of the validation documents of all periods, and the test set
likewise.

A causal stream (the setting `causal`) is made period by period, as if each later period were added by --extend. So its
validation set and its test set are those of the first period, and nothing depends on later text.

The functions read and write no files. They compute with index entries (`index.ENTRY`) and dates (see `dates`).
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.accounts import removed_rows
from data_prep.dividing.layout import Layout, by_key, equal_cuts, mixed, nearest_cut
from data_prep.dividing.partition import MIN_MEGA_BATCH_WORDS
from data_prep.errors import Unworkable
from data_prep.reading.facts import dates_of, named_documents
from data_prep.reading.index import is_training, sortable
from data_prep.running.progress import note
from data_prep.settings import PrepSettings
from data_prep.sources.dates import date_text, parse_date, period_of

LATE = "earlier than the stream"
"""The step in the table "cleaning" of documents that --late drop leaves out."""
_ADVICE = (
    "Held-out text consists of whole documents, so each period needs several documents: make fewer or longer periods "
    "(--mega-batches, --period), or add sources."
)


class HeldOut(NamedTuple):
    """How much text of each period is held out, as fractions of the words of the period."""

    valid: float
    test: float


class Periods(NamedTuple):
    """The periods of a chronological stream, or those that alma-prep --extend adds to one."""

    layout: Layout
    dates: list[dict]
    """For each period, {"first_date": .., "last_date": ..}: the dates of its first and its last document."""
    held_out: HeldOut
    unions: dict[str, list[str]]
    """The splits that the validation set and the test set consist of; empty for an extension, which has neither."""

    def base(self, before: Mapping | None) -> dict:
        """Return what the next period of a causal stream needs to know of the stream, as in its stream.json.

        `before` is the same for this period; None for the first period.
        """
        periods = [*(before["periods"] if before else []), *self.dates]
        return {"periods": periods, "num_mega_batches": len(periods), "held_out": self.held_out._asdict()}

    def described(self, splits: Mapping[str, dict]) -> dict:
        """Return the entries of stream.json about periods and splits.

        The entries of the held-out text of each period are moved from `splits`, the entries of all splits, into the
        list of periods. So "splits" contains the same names as in other streams.
        """
        names = list(filter(is_training, self.layout.splits))
        held_out = [{part: splits[f"{name}/{part}"] for part in ("valid", "test")} for name in names]
        order = ["valid", *names, "test"] if self.unions else names
        # The number of periods whose test text makes up the test set. Extensions do not change it.
        in_test = {"periods_in_test": len(self.unions["test"])} if self.unions else {}
        return in_test | {
            "splits": {name: splits[name] for name in order},
            "periods": [dates | parts for dates, parts in zip(self.dates, held_out, strict=True)],
            "held_out": self.held_out._asdict(),
        }


def joined_periods(parts: Sequence[Periods], starts: Sequence[int]) -> Periods:
    """Return the periods of a causal stream, or those that are added to one.

    Args:
        parts: each period.
        starts: the index of the first passage of each period in the array of the passages of all periods.
    """
    found = [
        (name, start + part.layout.order[first:last])
        for part, start in zip(parts, starts, strict=True)
        for name, (first, last) in zip(part.layout.splits, itertools.pairwise(part.layout.cuts), strict=True)
    ]
    # A stable sort, so that the periods stay in order: validation text, mega-batches, test text.
    found.sort(key=lambda each: ("valid", "", "test").index(each[0].partition("/")[2]))
    cuts = [0, *itertools.accumulate(len(order) for _, order in found)]
    dates = [period for part in parts for period in part.dates]
    joined = Layout(np.concatenate([order for _, order in found]), cuts, [name for name, _ in found])
    return parts[0]._replace(layout=joined, dates=dates)


def is_causal(settings: PrepSettings, base: Mapping | None) -> bool:
    """Return True if a new stream, or the stream with the stream.json `base`, is causal."""
    return settings.causal if base is None else bool(base["settings"].get("causal"))


def is_chronological(settings: PrepSettings, base: Mapping | None) -> bool:
    """Return True if a new stream, or the stream with the stream.json `base`, is chronological."""
    return settings.partition == "chronological" if base is None else "periods" in base


def lay_out_periods(
    settings: PrepSettings, passages: np.ndarray, strata: np.ndarray, valid_strata: Sequence[int] | None,
    valid_words: int, num_periods: int, spool: Path, base: Mapping | None,
) -> Periods:  # fmt: skip
    """Return the periods of a new stream, or those that are added to a stream.

    Args:
        settings: the settings of this call of alma-prep.
        passages, strata, valid_strata: see `chronological_layout`.
        valid_words: number of words of the validation set. It is not used for an extension.
        num_periods: the number of periods.
        spool: the spool folder, which contains the dates of the documents.
        base: the content of stream.json of the stream to extend; None for a new stream.

    Raises:
        Unworkable: if a period has too little text, or if more than half of the text would be held out.
    """
    dates = dates_of(spool, passages)
    if base is not None:
        dates = as_new(dates, base)
        held_out, first, unions = HeldOut(**base["held_out"]), base["num_mega_batches"] + 1, {}
    else:
        words = int(passages["num_words"].sum(dtype=np.int64))
        # Only the first period is divided here, so the default share would be half of it.
        test_words = words // 10 if settings.causal and settings.test_words is None else settings.test_words
        held_out, first = _held_out_fractions(words, valid_words, test_words, num_periods), 1
        numbers = range(1, num_periods + 1)
        unions = {part: [f"mega_batch_{t}/{part}" for t in numbers] for part in ("valid", "test")}
    limits = settings.period if num_periods > 1 else None
    found = chronological_layout(passages, dates, strata, held_out, num_periods, valid_strata, first, limits)
    return Periods(*found, held_out, unions)


def without_late(
    settings: PrepSettings, documents: np.ndarray, names: Sequence[str], spool: Path, base: Mapping
) -> tuple[np.ndarray, list[dict]]:
    """Apply the setting `late` to documents that are earlier than the last document of a stream.

    Args:
        settings: the settings of this call of alma-prep.
        documents: the index entry (`index.ENTRY`) of each document to add.
        names: the name of each source.
        spool: the spool folder, which contains the names and dates of the documents.
        base: the content of stream.json of the stream to extend.

    Returns:
        The index entries of the used documents, and the rows of the table "cleaning" about the others.

    Raises:
        Unworkable: if there are late documents and `late` is "error".
    """
    last, dates = base["periods"][-1]["last_date"], dates_of(spool, documents)
    is_late = dates < parse_date(last)
    if not is_late.any():
        return documents, []
    late = documents[is_late]
    named = named_documents(spool, late[np.argsort(dates[is_late], kind="stable")])
    text = f"{len(late):,} of the new documents are earlier than {last}, the last date in the stream: {named}"
    if settings.late == "error":
        raise Unworkable(
            f"{text}. A chronological stream is extended only by later text: give --late drop to leave these documents "
            "out, or --late as-new to add them to the new period."
        )
    note(f"{text}. They {'are left out' if settings.late == 'drop' else 'count as text of the new period'}")
    if settings.late == "as-new":
        return documents, []
    return documents[~is_late], removed_rows(LATE, names, late)


def as_new(dates: np.ndarray, base: Mapping, is_known: np.ndarray | None = None) -> np.ndarray:
    """Return the dates by which new documents are sorted, for a stream with the stream.json `base`.

    Late documents are earlier than the last document of the stream. They get the earliest date of the others.

    Args:
        dates: the date of each document.
        base: the content of stream.json.
        is_known: True for documents that are in the stream, whose dates do not count; None: no document is.
    """
    last = parse_date(base["periods"][-1]["last_date"])
    of_others = dates[(dates >= last) & (True if is_known is None else ~is_known)]
    return np.maximum(dates, of_others.min() if len(of_others) else last)


def dates_for_copies(settings: PrepSettings, dates: np.ndarray | None, base: Mapping | None) -> np.ndarray | None:
    """Return the dates by which it is chosen which of several new copies is kept: the earliest.

    Late documents that `without_late` will leave out come last, so that no text is removed in favour of one of them.

    Args:
        settings: the settings of this call of alma-prep.
        dates: the date of each new document; None if the stream is not chronological.
        base: the content of stream.json of the stream to extend; None for a new stream.
    """
    if dates is None or base is None or settings.late != "drop":
        return dates
    is_late = dates < parse_date(base["periods"][-1]["last_date"])
    return np.where(is_late, dates.max(initial=0) + 1, dates)


def _held_out_fractions(total_words: int, valid_words: int, test_words: int | None, num_mega_batches: int) -> HeldOut:
    """Return how much text of each period of a new stream is held out. For `test_words`, see the setting."""
    valid = valid_words / total_words
    test = (1 - valid) / (num_mega_batches + 1) if test_words is None else test_words / total_words
    if valid + test > 0.5:
        raise Unworkable(
            f"the validation set and the test set would take {valid + test:.0%} of the {total_words:,} words: lower "
            "--valid-words or --test-words to at most half of the text."
        )
    return HeldOut(valid, test)


def chronological_layout(
    passages: np.ndarray,
    dates: np.ndarray,
    strata: np.ndarray,
    held_out: HeldOut,
    num_periods: int,
    valid_strata: Sequence[int] | None = None,
    first: int = 1,
    limits: str | None = None,
) -> tuple[Layout, list[dict]]:
    """Return the layout of a chronological stream, or of mega-batches that are added to one, and `Periods.dates`.

    Args:
        passages: the index entry (`index.ENTRY`) of each passage.
        dates: int64 [number of passages], the date of the document of each passage.
        strata: int [number of sources], index of the stratum of each source (see `layout.mixed`).
        held_out: how much text of each period is held out.
        num_periods: the number of periods, all with the same number of words unless `limits` is given.
        valid_strata: the strata from which the validation text is taken; None: all strata.
        first: number of the first mega-batch.
        limits: the setting `period`, which says where periods begin.

    Raises:
        Unworkable: if a period has too little text.
    """
    documents = _documents(passages, dates)
    if limits is None:
        bounds = equal_cuts(documents.num_words, num_periods)
    else:
        bounds = [0, *(1 + np.flatnonzero(np.diff(period_of(limits, documents.dates)))), len(documents.dates)]
    parts: dict[str, list[np.ndarray]] = {"valid": [], "train": [], "test": []}
    periods = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        name = f"mega_batch_{first + number}"
        if start == end:
            raise Unworkable(f"{_period(name, documents, start, end)} contains no document. {_ADVICE}")
        is_candidate = np.ones(end - start, bool)
        if valid_strata is not None:
            source_of = passages["source"][documents.order[documents.first[start:end]]]
            is_candidate = np.isin(strata[source_of], valid_strata)
        try:
            part_of = _hold_out(documents, start, end, is_candidate, held_out)
        except Unworkable as error:
            raise Unworkable(f"{_period(name, documents, start, end)}: {error}") from error
        for index, part in enumerate(parts):
            which = documents.passages_of(start + np.flatnonzero(part_of == index))
            words = int(passages["num_words"][which].sum(dtype=np.int64))
            least = MIN_MEGA_BATCH_WORDS if part == "train" else 1
            if words < least:
                raise Unworkable(
                    f"{_period(name, documents, start, end)} has too few documents: {words:,} words are left for "
                    f"{'training' if part == 'train' else part}, but at least {least:,} are needed. {_ADVICE}"
                )
            # The stored key of the first passage of a document decided whether the document is held out. If passages
            # were sorted by this key, no mega-batch would begin with the first passage of a document.
            parts[part].append(mixed(passages, strata, which, purpose="order of a period"))
        first_date, last_date = (date_text(int(documents.dates[at])) for at in (start, end - 1))
        periods.append({"first_date": first_date, "last_date": last_date})
    numbers = range(first, first + len(periods))
    splits = [f"mega_batch_{t}{part}" for part in ("/valid", "", "/test") for t in numbers]
    orders = [*parts["valid"], *parts["train"], *parts["test"]]
    cuts = [0, *np.cumsum([len(order) for order in orders]).tolist()]
    return Layout(np.concatenate(orders), cuts, splits), periods


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
    texts = sortable(passages["document"])
    order = np.lexsort((passages["passage"], texts, dates))
    texts, sorted_dates = texts[order], dates[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (texts[1:] != texts[:-1]) | (sorted_dates[1:] != sorted_dates[:-1])
    first = np.flatnonzero(is_new)
    num_words = np.add.reduceat(passages["num_words"][order].astype(np.int64), first)
    # The key of a document's first passage is pseudo-random and depends on the seed.
    shuffled = np.empty(len(first), np.int64)
    shuffled[by_key(passages[order[first]])] = np.arange(len(first))
    return _Documents(order, np.append(first, len(order)), sorted_dates[first], num_words, shuffled)


def _hold_out(documents: _Documents, start: int, end: int, is_candidate: np.ndarray, held_out: HeldOut) -> np.ndarray:
    """Choose the held-out documents of a period: 0 for validation, 1 for training, 2 for the test, int [end - start].

    Documents are taken in the shuffled order, first for validation and then for the test, until their number of words
    is nearest to the wanted one. At least one document is taken for each.

    Raises:
        Unworkable: if the documents of the setting `valid_source` are too few for the validation set.
    """
    part_of = np.ones(end - start, np.int8)
    total = int(documents.num_words[start:end].sum())
    for part, fraction in ((0, held_out.valid), (2, held_out.test)):
        which = np.flatnonzero((part_of == 1) & (is_candidate | (part == 2)))
        which = which[np.argsort(documents.shuffled[start + which])]
        wanted, sizes = round(total * fraction), documents.num_words[start + which]
        if part == 0 and not is_candidate.all() and sizes.sum() < wanted:
            raise Unworkable(
                f"the sources of the kind given by --valid-source have only {sizes.sum():,} words, but {wanted:,} are "
                "held out for validation. Give a smaller --valid-words, or leave out --valid-source."
            )
        count = max(1, nearest_cut(sizes, wanted))
        part_of[which[:count]] = part
    return part_of


def _period(name: str, documents: _Documents, start: int, end: int) -> str:
    """Return words for an error message that name a period and its dates."""
    if start == end:
        return f"the period of {name}"
    return f"the period of {name} ({date_text(documents.dates[start])} to {date_text(documents.dates[end - 1])})"
