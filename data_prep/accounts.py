"""The accounts of a stream: what was read is what is in the stream, and what was removed, with a reason.

For each source, the table "cleaning" in stream.json says what was removed, as numbers of documents, words and bytes of
text. `check_accounts` compares it with what was read and what is left. So no step can lose text without a reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from data_prep.reading.index import sortable

UNITS = {"words": "num_words", "bytes": "num_bytes"}
"""The units of the accounts: the name in stream.json -> the field of index entries (`reading.index.ENTRY`)."""


def removed_rows(
    step: str, names: Sequence[str], removed: np.ndarray, count: Callable[[np.ndarray], int] = len
) -> list[dict[str, Any]]:
    """Return the rows of the table "cleaning" for text that was removed, one for each source that lost some.

    Args:
        step: why the text was removed.
        names: the name of each source.
        removed: the index entries of the text.
        count: returns the number of documents, as the row records it, for the index entries of one source.
    """
    rows = []
    for number, name in enumerate(names):
        entries = removed[removed["source"] == number]
        if len(entries):
            sums = {unit: int(entries[field].sum(dtype=np.int64)) for unit, field in UNITS.items()}
            rows.append({"step": step, "source": name, "documents": count(entries), **sums})
    return rows


def merged_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table "cleaning" with one row for each step and source, which has the sums of its rows."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        merged = found.setdefault((row["step"], row["source"]), row | dict.fromkeys(("documents", *UNITS), 0))
        for unit in ("documents", *UNITS):
            merged[unit] += row[unit]
    return list(found.values())


def count_documents(documents: np.ndarray) -> int:
    """Return the number of different documents. `documents` is the field `document` of index entries."""
    hashes = np.sort(sortable(documents))
    return int((hashes[1:] != hashes[:-1]).sum()) + 1 if len(hashes) else 0


def check_accounts(
    records: Sequence[Mapping], names: Sequence[str], table: Sequence[Mapping], passages: np.ndarray, order: np.ndarray
) -> None:
    """Check that the words and bytes that were read from each source are in the stream or in the table "cleaning".

    Args:
        records: the entry of each source in stream.json.
        names: the name of each source.
        table: the table "cleaning".
        passages: the index entries of passages.
        order: the indices of the passages that are in the stream.

    Raises:
        RuntimeError: if text was lost or invented, which is an error in alma-prep.
    """
    source_of = passages["source"][order]
    for unit, field in UNITS.items():
        # Sums of float64, which `bincount` needs, are exact up to 2^53.
        sums = np.bincount(source_of, passages[field][order].astype(np.float64), len(records)).astype(np.int64).tolist()
        for record, name, kept in zip(records, names, sums, strict=True):
            removed = sum(row[unit] for row in table if row["source"] == name)
            if record[unit] != kept + removed:
                raise RuntimeError(
                    f"{record[unit]:,} {unit} were read from {name}, but {kept:,} are in the stream and {removed:,} "
                    "were removed. This is an error in alma-prep: please report it, with the command."
                )
