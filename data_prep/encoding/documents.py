"""Write the folder `documents` of a stream, which says from which document each sequence of each split comes.

documents/SPLIT.parquet has one row for each sequence of the split, in the order of the split. A sequence is a passage,
or a piece of a very long passage (see `mmap_writer.sequence_sizes`). The columns:

document    hash of the document's text: the first 16 bytes of its SHA-256 digest, in hexadecimal
id          name of the document in its source, for example its URL; null if it has none
date        date of the document as ISO 8601 text (see `dates`), else that of its file; null if there is none
source      name of the source, KIND:PATH
words       number of words of the passage; 0 for the second and later pieces of a very long passage
bytes       number of UTF-8 bytes of the passage's text; 0 for the same pieces
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
    "bytes": "int64",
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
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in _COLUMNS.items()])
    entries = passages.entries()
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, max(1, len(entries)), ROW_GROUP_PASSAGES):
            group = slice(first, first + ROW_GROUP_PASSAGES)
            part = np.asarray(entries[group])
            source = names.take(pyarrow.array(np.array(source_of_shard)[part["shard"]]))
            columns = _columns(part, Path(passages.spool), source, num_pieces[group], heartbeat)
            writer.write_table(pyarrow.table(columns, schema))


def _columns(
    passages: np.ndarray, spool: Path, source: "pyarrow.Array", num_pieces: np.ndarray, heartbeat: Heartbeat
) -> dict[str, "np.ndarray | pyarrow.Array"]:
    """Return the columns of the rows of some passages. `source` is the name of the source of each passage."""
    import pyarrow

    dates = np.zeros(len(passages), np.int64)
    ids, order = [pyarrow.array([], pyarrow.string())], [np.empty(0, np.int64)]
    for shard, which, found in rows_by_shard(spool, passages):
        heartbeat.beat("describe passages")
        dates[which] = found["date"]
        ids.append(ids_of(spool, shard, found["offset"]))
        order.append(which)
    place = np.empty(len(passages), np.int64)
    place[np.concatenate(order)] = np.arange(len(passages))
    known, number_of = np.unique(dates, return_inverse=True)
    texts = pyarrow.array([date_text(int(date)) or None for date in known], pyarrow.string())
    # The passage of each row.
    rows = np.repeat(np.arange(len(passages)), num_pieces)
    words, num_bytes = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int64)
    firsts = np.cumsum(num_pieces) - num_pieces
    words[firsts], num_bytes[firsts] = passages["num_words"], passages["num_bytes"]
    return {
        "document": _hexadecimal(passages["document"][rows]),
        "id": pyarrow.concat_arrays(ids).take(pyarrow.array(place[rows])),
        "date": texts.take(pyarrow.array(number_of[rows])),
        "source": source.take(pyarrow.array(rows)),
        "words": words,
        "bytes": num_bytes,
        "passage": passages["passage"][rows],
    }


def _hexadecimal(hashes: np.ndarray) -> "pyarrow.Array":
    """Return 16-byte hashes (NumPy type V16) as an array of texts of 32 hexadecimal digits."""
    import pyarrow

    digits = binascii.hexlify(np.ascontiguousarray(hashes).tobytes())
    offsets = np.arange(len(hashes) + 1, dtype=np.int32) * 32
    return pyarrow.StringArray.from_buffers(len(hashes), pyarrow.py_buffer(offsets), pyarrow.py_buffer(digits))
