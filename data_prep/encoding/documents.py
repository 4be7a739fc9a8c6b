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
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.reading.facts import facts_digest, ids_of, rows_by_shard
from data_prep.reading.index import Index, Texts, TextsTask
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task
from data_prep.running.work_folder import WorkFolder
from data_prep.sources.dates import date_text

if TYPE_CHECKING:
    import pyarrow

FOLDER = "documents"
TASK_PASSAGES = 1 << 18
"""Number of passages that one task looks up. They become one row group of the Parquet file."""
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
    index: Index,
    sources: Sequence[str],
    source_of_shard: Sequence[int],
    num_sequences: np.ndarray,
    work: WorkFolder,
) -> None:
    """Write documents/SPLIT.parquet for every split into the work folder.

    Args:
        index: the passages in their final order, and the splits.
        sources: the name of each source.
        source_of_shard: index of the source of each spool file.
        num_sequences: (passage, number of sequences) of each passage that is stored as several sequences, int [n, 2],
            ordered by passage.
        work: the work folder.
    """
    named = (facts_digest(index.spool, len(source_of_shard)), list(sources), list(source_of_shard))
    tasks: list[DocumentsTask] = []
    tasks_of_split: dict[str, list[int]] = {}
    for name, (start, end) in zip(index.splits, itertools.pairwise(index.cuts), strict=True):
        tasks_of_split[name] = []
        for first in range(start, end, TASK_PASSAGES):
            last = min(first + TASK_PASSAGES, end)
            bounds = np.searchsorted(num_sequences[:, 0], [first, last])
            long = num_sequences[slice(*bounds)].tolist()
            tasks_of_split[name].append(len(tasks))
            tasks.append(DocumentsTask(index.texts(first, last), *named, long))
    weights = [task.texts.end - task.texts.start for task in tasks]
    step = work.run("documents", tasks, "describe passages", "passages", weights)
    for name, members in index.unions.items():
        tasks_of_split[name] = [number for member in members for number in tasks_of_split[member]]
    names = list(tasks_of_split)
    parts = [[str(step.prefix(number)) + ".arrow" for number in tasks_of_split[name]] for name in names]
    digests = [[step.file(number, "arrow")[1]["sha256"] for number in tasks_of_split[name]] for name in names]
    joined = work.run("join_documents", [JoinTask(*both) for both in zip(parts, digests, strict=True)])
    for number, name in enumerate(names):
        work.add_shard(f"{FOLDER}/{name}.parquet", *joined.file(number, "parquet"))


@dataclass(frozen=True)
class DocumentsTask(TextsTask):
    """Task that writes the rows (see the module) of some passages to PREFIX.arrow. PREFIX is an argument of `run`."""

    texts: Texts
    facts_sha256: str
    """Digest of the ids and dates of all documents, see `facts.facts_digest`."""
    sources: list[str]
    """The name of each source."""
    source_of_shard: list[int]
    """Index of the source of each spool file."""
    long: list[list[int]]
    """[passage, number of sequences] for each passage in the range that is stored as several sequences."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        import pyarrow  # in the worker and not above, because alma-prep itself never needs it

        passages, spool = np.asarray(self.texts.entries()), Path(self.texts.spool)
        dates, sources = np.zeros(len(passages), np.int64), np.zeros(len(passages), np.int32)
        ids, order = [], []
        for shard, which, found in rows_by_shard(spool, passages):
            heartbeat.beat("describe passages")
            dates[which] = found["date"]
            ids.append(ids_of(spool, shard, found["offset"]))
            sources[which] = self.source_of_shard[shard]
            order.append(which)
        place = np.empty(len(passages), np.int64)
        place[np.concatenate(order)] = np.arange(len(passages))
        known, number_of = np.unique(dates, return_inverse=True)
        texts = pyarrow.array([date_text(int(date)) or None for date in known], pyarrow.string())
        # Paths that are not valid UTF-8 contain halves of UTF-16 pairs, which pyarrow cannot encode.
        encoded = [source.encode("utf-8", "backslashreplace") for source in self.sources]
        names = pyarrow.array(encoded, pyarrow.string())
        columns = {
            "document": _hexadecimal(passages["document"]),
            "id": pyarrow.concat_arrays(ids).take(pyarrow.array(place)),
            "date": texts.take(pyarrow.array(number_of)),
            "source": names.take(pyarrow.array(sources)),
            "words": passages["num_words"],
            "passage": passages["passage"],
        }
        table = self._with_pieces(pyarrow.table(columns, _schema()))
        with pyarrow.OSFile(f"{prefix}.arrow", "wb") as file, pyarrow.ipc.new_file(file, _schema()) as writer:
            writer.write_table(table)
        return {}

    def _with_pieces(self, table: "pyarrow.Table") -> "pyarrow.Table":
        """Return the table with one row for each sequence, instead of one for each passage."""
        import pyarrow

        if not self.long:
            return table
        counts = np.ones(len(table), np.int64)
        for passage, count in self.long:
            counts[passage - self.texts.start] = count
        table = table.take(pyarrow.array(np.repeat(np.arange(len(table)), counts)))
        words = table.column("words").to_numpy().copy()
        is_first = np.zeros(len(words), bool)
        is_first[np.cumsum(counts) - counts] = True
        words[~is_first] = 0
        number = table.schema.get_field_index("words")
        return table.set_column(number, table.schema.field(number), pyarrow.array(words))


@dataclass(frozen=True)
class JoinTask(Task):
    """Task that joins the rows that several tasks wrote into one Parquet file, PREFIX.parquet."""

    parts: list[str]
    """Paths of the files that `DocumentsTask` wrote."""
    digests: list[str]
    """SHA-256 digest of each file. If a file has changed, the task has changed, and is done again."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetWriter(f"{prefix}.parquet", _schema(), compression="zstd") as writer:
            for path in self.parts:
                heartbeat.beat("join descriptions of passages")
                with pyarrow.memory_map(path) as file:
                    writer.write_table(pyarrow.ipc.open_file(file).read_all())
        return {}


def _schema() -> "pyarrow.Schema":
    import pyarrow

    return pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in _COLUMNS.items()])


def _hexadecimal(hashes: np.ndarray) -> "pyarrow.Array":
    """Return 16-byte hashes (NumPy type V16) as an array of texts of 32 hexadecimal digits."""
    import pyarrow

    digits = binascii.hexlify(np.ascontiguousarray(hashes).tobytes())
    offsets = np.arange(len(hashes) + 1, dtype=np.int32) * 32
    return pyarrow.StringArray.from_buffers(len(hashes), pyarrow.py_buffer(offsets), pyarrow.py_buffer(digits))
