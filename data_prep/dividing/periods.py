"""The periods of a chronological stream: lay them out with the settings, and describe them in stream.json.

`chronological` computes the layout. This module reads the dates of the documents, and what a stream that is extended
says about its periods.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.dividing.chronological import (
    ChronologicalLayout,
    HeldOut,
    chronological_layout,
    held_out_fractions,
    period_unions,
)
from data_prep.errors import PrepError
from data_prep.reading.facts import dates_of
from data_prep.settings import PrepSettings
from data_prep.sources.dates import date_text, parse_cut_dates, parse_date


class Periods(NamedTuple):
    """The periods of a chronological stream, or those that alma-prep --extend adds to one."""

    layout: ChronologicalLayout
    held_out: HeldOut
    unions: dict[str, list[str]]
    """The splits that the validation set and the test set consist of; empty for an extension, which has neither."""

    def described(self, splits: Mapping[str, dict]) -> dict:
        """Return the entries of stream.json about periods and splits.

        The entries of the held-out text of each period are moved from `splits` into the list of periods. So "splits"
        contains the same names as in other streams.

        Args:
            splits: for each split, by name, its entry in stream.json.
        """
        names = [name for name in self.layout.splits if name.startswith("mega_batch_") and "/" not in name]
        held_out = [{part: splits[f"{name}/{part}"] for part in ("valid", "test")} for name in names]
        order = ["valid", *names, "test"] if self.unions else names
        # The number of periods whose test text makes up the test set. Extensions do not change it.
        in_test = {"periods_in_test": len(names)} if self.unions else {}
        return in_test | {
            "splits": {name: splits[name] for name in order},
            "periods": [dates | parts for dates, parts in zip(self.layout.periods, held_out, strict=True)],
            "held_out": self.held_out._asdict(),
        }


def is_chronological(settings: PrepSettings, base: Mapping | None) -> bool:
    """Return True if a stream is chronological.

    Args:
        settings: the settings of this call of alma-prep.
        base: the content of stream.json of the stream to extend; None for a new stream.
    """
    return settings.partition == "chronological" if base is None else "periods" in base


def lay_out_periods(
    settings: PrepSettings,
    passages: np.ndarray,
    strata: np.ndarray,
    valid_strata: Sequence[int] | None,
    valid_words: int,
    spool: Path,
    base: Mapping | None,
) -> Periods:
    """Return the periods of a new stream, or those that are added to a stream.

    Args:
        settings: the settings of this call of alma-prep.
        passages: the index entry (`index.ENTRY`) of each passage.
        strata: int [number of sources], index of the stratum of each source (see `layout.mixed`).
        valid_strata: the strata from which the validation text is taken; None: all strata.
        valid_words: number of words of the validation set. It is not used for an extension.
        spool: the spool folder, which contains the dates of the documents.
        base: the content of stream.json of the stream to extend; None for a new stream.

    Raises:
        PrepError: if a period has too little text, or if the new documents are earlier than the stream's last one.
    """
    dates = dates_of(spool, passages)
    cut_at: int | list[int] = settings.num_mega_batches or 1
    if settings.cut_dates:
        cut_at = parse_cut_dates(settings.cut_dates)
    if base is not None:
        _check_later(passages, dates, base)
        held_out, first = HeldOut(**base["held_out"]), base["num_mega_batches"] + 1
        return Periods(
            chronological_layout(passages, dates, strata, held_out, cut_at, valid_strata, first), held_out, {}
        )
    words = int(passages["num_words"].sum(dtype=np.int64))
    num_periods = len(cut_at) + 1 if isinstance(cut_at, list) else cut_at
    held_out = held_out_fractions(words, valid_words, settings.test_words, num_periods)
    found = chronological_layout(passages, dates, strata, held_out, cut_at, valid_strata)
    return Periods(found, held_out, period_unions(num_periods))


def _check_later(passages: np.ndarray, dates: np.ndarray, base: Mapping) -> None:
    """Raise PrepError if documents to add are earlier than the last document of a chronological stream."""
    last = base["periods"][-1]["last_date"]
    is_early = dates < parse_date(last)
    if is_early.any():
        num_early = len(np.unique(passages["document"][is_early]))
        raise PrepError(
            f"{num_early:,} of the new documents are earlier than {last}, the last date in the stream; the earliest is "
            f"of {date_text(int(dates.min()))}. A chronological stream is extended only by later text: leave these "
            "documents out of the sources, or make the stream again from all sources."
        )
