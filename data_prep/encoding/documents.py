"""Write the folder `documents` of a stream, which says from which document each sequence of each split comes.

documents/SPLIT.parquet has one row for each sequence of the split, in the order of the split. A sequence is a passage,
or a piece of a very long passage (see `mmap_writer.sequence_sizes`). The columns:

document    hash of the document's text: the first 16 bytes of its SHA-256 digest, in hexadecimal
id          name of the document in its source, for example its URL; null if it has none
date        date of the document as ISO 8601 text (see `dates`), else that of its file; null if there is none
source      name of the source, KIND:PATH
words       number of words of the passage; 0 for the second and later pieces of a very long passage
passage     index of the passage in its document, from 0
"""

import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.reading.facts import ids_of, rows_by_shard
from data_prep.reading.index import Texts
from data_prep.running.heartbeat import Heartbeat
from data_prep.sources.dates import date_text

if TYPE_CHECKING:
    import pyarrow

FOLDER = "documents"
ROW_GROUP_PASSAGES = 1 << 18
"""Number of passages that are looked up together. They become one row group of the Parquet file."""
_COLUMNS = {
    "document": "string",
    "id": "string",
    "date": "string",
    "source": "string",
    "words": "int32",
    "passage": "int32",
}
"""The columns of the Parquet files: name -> type of pyarrow."""


def write_documents(
    path: Path, passages: Texts, sources: Sequence[str], source_of_shard: Sequence[int], num_pieces: np.ndarray,
    heartbeat: Heartbeat,
) -> None:  # fmt: skip
    """Write the rows of all passages of a split to a Parquet file.

    Args:
        path: the file.
        passages: the passages of the split.
        sources: the name of each source.
        source_of_shard: index of the source of each spool file.
        num_pieces: int [number of passages], the number of sequences as which each passage is stored.
        heartbeat: the heartbeat of the task.
    """
    import pyarrow.parquet  # in the worker and not above, because alma-prep itself never needs it

    # Paths that are not valid UTF-8 contain halves of UTF-16 pairs, which pyarrow cannot encode.
    names = pyarrow.array([source.encode("utf-8", "backslashreplace") for source in sources], pyarrow.string())
    entries = passages.entries()
    with pyarrow.parquet.ParquetWriter(path, _schema(), compression="zstd") as writer:
        for first in range(0, max(1, len(entries)), ROW_GROUP_PASSAGES):
            group = slice(first, first + ROW_GROUP_PASSAGES)
            table = _rows(np.asarray(entries[group]), Path(passages.spool), names, np.array(source_of_shard), heartbeat)
            writer.write_table(_with_pieces(table, num_pieces[group]))


def _rows(
    passages: np.ndarray, spool: Path, names: "pyarrow.Array", source_of_shard: np.ndarray, heartbeat: Heartbeat
) -> "pyarrow.Table":
    """Return a row for each passage."""
    import pyarrow

    dates, sources = np.zeros(len(passages), np.int64), np.zeros(len(passages), np.int32)
    ids, order = [pyarrow.array([], pyarrow.string())], [np.empty(0, np.int64)]
    for shard, which, found in rows_by_shard(spool, passages):
        heartbeat.beat("describe passages")
        dates[which] = found["date"]
        ids.append(ids_of(spool, shard, found["offset"]))
        sources[which] = source_of_shard[shard]
        order.append(which)
    place = np.empty(len(passages), np.int64)
    place[np.concatenate(order)] = np.arange(len(passages))
    known, number_of = np.unique(dates, return_inverse=True)
    texts = pyarrow.array([date_text(int(date)) or None for date in known], pyarrow.string())
    columns = {
        "document": _hexadecimal(passages["document"]),
        "id": pyarrow.concat_arrays(ids).take(pyarrow.array(place)),
        "date": texts.take(pyarrow.array(number_of)),
        "source": names.take(pyarrow.array(sources)),
        "words": passages["num_words"],
        "passage": passages["passage"],
    }
    return pyarrow.table(columns, _schema())


def _with_pieces(table: "pyarrow.Table", counts: np.ndarray) -> "pyarrow.Table":
    """Return the table with `counts` rows for each passage, one for each of its sequences."""
    import pyarrow

    if (counts == 1).all():
        return table
    table = table.take(pyarrow.array(np.repeat(np.arange(len(table)), counts)))
    words = np.zeros(len(table), np.int32)
    is_first = np.cumsum(counts) - counts
    words[is_first] = table.column("words").to_numpy()[is_first]
    number = table.schema.get_field_index("words")
    return table.set_column(number, table.schema.field(number), pyarrow.array(words))


def _schema() -> "pyarrow.Schema":
    import pyarrow

    return pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in _COLUMNS.items()])


def _hexadecimal(hashes: np.ndarray) -> "pyarrow.Array":
    """Return 16-byte hashes (NumPy type V16) as an array of texts of 32 hexadecimal digits."""
    import pyarrow

    digits = binascii.hexlify(np.ascontiguousarray(hashes).tobytes())
    offsets = np.arange(len(hashes) + 1, dtype=np.int32) * 32
    return pyarrow.StringArray.from_buffers(len(hashes), pyarrow.py_buffer(offsets), pyarrow.py_buffer(digits))
