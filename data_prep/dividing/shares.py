"""Shares of sources: how many words of each source a stream uses (--source KIND:PATH@SHARE)."""

import numpy as np

from data_prep.accounts import count_documents, row_of_entries
from data_prep.dividing import layout
from data_prep.errors import PrepError, Unworkable
from data_prep.reading.read import Spooled, source_name
from data_prep.sources import Files


def words_by_source(entries: np.ndarray, num_sources: int) -> dict[int, int]:
    """Return the number of words of each source, by source index.

    Args:
        entries: the index entry (`index.ENTRY`) of each document or passage.
        num_sources: number of sources.
    """
    # Convert to float64, because `bincount` needs float64 weights. Float64 sums are exact up to 2^53 words.
    counts = np.bincount(entries["source"], entries["num_words"].astype(np.float64), num_sources)
    return dict(enumerate(counts.astype(np.int64).tolist()))


def strata_of(files: Files, valid_source: str | None) -> tuple[np.ndarray, list[int] | None]:
    """Return the stratum of each source, and the strata from which the validation set is taken.

    A stratum is spread evenly over the stream (see `layout.mixed`). A source with a share is a stratum of its own, so
    that it has this share in each part of the stream. Sources of one kind without a share are one stratum, so that the
    stream does not depend on how their files are divided into sources.

    Args:
        files: the files of each source.
        valid_source: the setting `valid_source`, the kind of which the validation set is made; None: all kinds.

    Returns:
        The index of the stratum of each source, int [number of sources], and the indices of the strata of the kind
        `valid_source`; None if there is no source of this kind, or all kinds are used.
    """
    names = [(source.kind, None if source.share is None else number) for number, source in enumerate(files)]
    known = list(dict.fromkeys(names))
    valid = [number for number, (kind, _) in enumerate(known) if kind == valid_source]
    return np.array([known.index(name) for name in names]), valid or None


def wanted_words_of(files: Files, words: dict[int, int]) -> dict[int, int]:
    """Return how many words of each source to use so that every source provides its share.

    The share of a source is the fraction of the stream's words that the source should provide (--source ...@SHARE).

    Args:
        files: the files of each source.
        words: number of words of each source, by source index.

    Raises:
        Unworkable: if the shares are invalid, or if a source with a share has no text left.
    """
    shares = {number: source.share for number, source in enumerate(files)}
    for number, source in enumerate(files):
        if source.share is not None and not words[number]:
            raise Unworkable(
                f"{source.name} should provide {source.share:g} of the words, but none of its text is left: cleaning "
                "removed all of its documents, or they are copies of other documents. Remove the source, or change "
                "--language, --gopher or --duplicates."
            )
    try:
        return layout.share_out(words, shares)
    except PrepError as error:
        raise Unworkable(str(error)) from error


def share_rows(spooled: Spooled, kept: np.ndarray, dropped: np.ndarray) -> list[dict]:
    """Return rows for the table "cleaning" in stream.json. A row says how much text of one source is left out.

    Text is left out so that every source provides its share, which is the fraction of the stream's words that the
    source should provide. A source of which nothing is left out has no row.

    Args:
        spooled: the documents that were read, with the records of the sources.
        kept, dropped: the index entries (`index.ENTRY`) of the passages that are used, and of those that are left out.
    """
    rows = []
    for number, record in enumerate(spooled.records):
        of_source = dropped[dropped["source"] == number]
        if len(of_source):
            documents = kept["document"][kept["source"] == number]
            # The documents of which no passage is used.
            left_out = count_documents(np.concatenate([documents, of_source["document"]])) - count_documents(documents)
            rows.append(row_of_entries("share", source_name(record), left_out, of_source))
    return rows
