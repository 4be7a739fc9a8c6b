"""Keep the documents that alma-prep removes, with the reason, so that a person can look at them (--keep-removed).

The files are STREAM/removed/*.jsonl.zst: one JSON object per line, with these fields:

reason      why the document was removed, as in the table of stream.json
id, date    name and date of the document in its source; for copies, the date in the form in which it is stored
file        name of the input file; copies have none, but without an id field their id contains it
text        the text of the document when it was removed
document    only for copies: hash of the text. The document that is kept instead of an exact copy has the same hash

The names of files with copies contain the word "copies". alma-prep --extend adds files whose names begin with the
number of the extension. A stream can be used without this folder.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.reading.facts import facts_digest, names_of
from data_prep.reading.index import ENTRY, byte_ranges
from data_prep.reading.removed_file import RemovedFile
from data_prep.reading.spool import read_text
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Executor, Step, Task, mark_of
from data_prep.running.work_folder import WorkFolder
from data_prep.sources.dates import date_text
from fairseq_alma.core.files import sha256_of

FOLDER = "removed"
_TASK_BYTES = 64 << 20
"""Approximate number of bytes of text that one task writes."""


def removed_path(folder: Path, shard: int) -> Path:
    """Return the path of the file with the documents that cleaning removed while it wrote spool file number `shard`."""
    return folder / f"{shard:06d}.removed.jsonl.zst"


def save_copies(folder: Path, documents: np.ndarray, exact: np.ndarray, near: np.ndarray) -> None:
    """Write the index entries of the copies that are removed into two files in the work folder, for `keep_removed`.

    Args:
        folder: the work folder.
        documents: the index entry (`index.ENTRY`) of each document, before copies were removed.
        exact: bool [number of documents], True for exact copies.
        near: bool [number of documents], True for near copies.
    """
    for name, which in (("exact", exact), ("near", near)):
        np.save(folder / f"{name}_copies.npy", documents[which])


def keep_removed(work: WorkFolder, num_shards: int, number: int, executor: Executor) -> None:
    """Put the files with all removed documents into the folder `removed` of the new stream or extension.

    Args:
        work: the work folder.
        num_shards: number of spool files.
        number: 0 for a new stream, else the number of the extension, from 1.
        executor: runs the tasks, on this machine or on a Slurm cluster.
    """
    for shard in range(num_shards):
        path = removed_path(work.spool, shard)
        # A file that the done mark does not list is a leftover of an earlier call that was killed.
        digest = mark_of(work.spool, shard)["files"].get(path.name)
        if digest is not None:
            work.add_shard(f"{FOLDER}/{number:04d}-{shard:06d}.jsonl.zst", path, digest)
    tasks = []
    digest = facts_digest(work.spool, num_shards)
    for name in ("exact", "near"):
        path = work.folder / f"{name}_copies.npy"
        if path.exists():
            num_bytes = np.load(path, mmap_mode="r")["num_bytes"]
            copies = (f"{name} copy", str(path), sha256_of(path))
            for start, end in byte_ranges(num_bytes, 0, len(num_bytes), _TASK_BYTES):
                tasks.append(CopiesTask(str(work.spool), digest, *copies, start, end))
    step = Step(work.folder / "removed", tasks)
    step.run(executor)
    for task in range(len(tasks)):
        work.add_shard(f"{FOLDER}/{number:04d}-copies-{task:06d}.jsonl.zst", *step.file(task, "jsonl.zst"))


@dataclass(frozen=True)
class CopiesTask(Task):
    """Task that writes the texts of copies to PREFIX.jsonl.zst, where PREFIX is the argument `prefix` of `run`.

    The copies are at the positions from `start` (included) to `end` (excluded) in the file `copies`.
    """

    spool: str
    """Path of the spool folder, which contains the text, the ids and the dates of the documents."""
    facts_sha256: str
    """Digest of the ids and dates of all documents, see `facts.facts_digest`."""
    reason: str
    copies: str
    """Path of the file with the index entry (`index.ENTRY`) of each copy."""
    sha256: str
    """SHA-256 digest of the file `copies`. If the file has changed, the task has changed, and is done again."""
    start: int
    end: int

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        spool, entries = Path(self.spool), np.load(self.copies, mmap_mode="r")[self.start : self.end].astype(ENTRY)
        ids, dates = names_of(spool, entries)
        with RemovedFile(Path(f"{prefix}.jsonl.zst")) as file:
            for number, entry in enumerate(entries):
                heartbeat.beat("copies that are removed")
                named = {"id": ids[number], "date": date_text(int(dates[number]))}
                text = read_text(spool, entry)
                file.add(reason=self.reason, **named, document=bytes(entry["document"]).hex(), text=text)
        return {}
