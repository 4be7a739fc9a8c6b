"""The accounts of a stream: what was read is what is in the stream, and what was removed, with a reason.

For each source, the table "cleaning" in stream.json says what was removed, as numbers of documents, words and bytes of
text. `check_accounts` compares it with what was read and what is left. So no step can lose text without a reason.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

UNITS = {"words": "num_words", "bytes": "num_bytes"}
"""The units of the accounts: the name in stream.json -> the field of index entries (`reading.index.ENTRY`)."""


def cleaning_row(
    step: str, source: str, documents: int, words: int, num_bytes: int, changes_text: bool = False
) -> dict[str, Any]:
    """Return a row of the table "cleaning" in stream.json.

    Args:
        step: why text was removed, or what changed it.
        source: the name of the source.
        documents: how many documents were removed completely, or were changed.
        words, num_bytes: how much text was removed.
        changes_text: True if the documents were changed, and not removed.
    """
    row = {"step": step, "source": source, "documents": documents, "words": words, "bytes": num_bytes}
    return row | {"changes_text": True} if changes_text else row


def row_of_entries(step: str, source: str, documents: int, entries: np.ndarray) -> dict[str, Any]:
    """Return a row of the table "cleaning" for text that was removed. `entries` are its index entries."""
    words, num_bytes = (int(entries[field].sum(dtype=np.int64)) for field in UNITS.values())
    return cleaning_row(step, source, documents, words, num_bytes)


def count_documents(documents: np.ndarray) -> int:
    """Return the number of different documents. `documents` is the field `document` of index entries."""
    return len(np.unique(np.ascontiguousarray(documents).view(">u8").reshape(-1, 2), axis=0))


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
