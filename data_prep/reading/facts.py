"""Look up the names (ids) and the dates of documents.

The dates are in the files that describe the documents in the spool (`index.SPOOLED`). For each spool file, there is
also the file NUMBER.ids.arrow, with the id of each document, in the same order; null for a document without an id.

A document or passage is found by its position in the spool file. So the index entries (`index.ENTRY`) that are kept in
memory need not contain dates and ids.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.reading.index import SPOOLED, sortable
from data_prep.running.tasks import mark_of
from data_prep.sources.dates import date_text

if TYPE_CHECKING:
    import pyarrow

_IDS = 4096
"""Number of ids that are kept in memory before they are written. Each record batch of a file has so many, except the
last one."""


def documents_path(folder: Path, shard: int) -> Path:
    """Return the path of the file that describes each document (`index.SPOOLED`) in spool file number `shard`."""
    return folder / f"{shard:06d}.documents.npy"


def ids_path(folder: Path, shard: int) -> Path:
    """Return the path of the file with the id of each document in spool file number `shard`."""
    return folder / f"{shard:06d}.ids.arrow"


def facts_digest(spool: Path, num_shards: int) -> str:
    """Return a digest of the dates and ids of all documents, for tasks that look them up.

    The index file has neither dates nor ids. So a task that describes only the index file would not be done again if
    the input files were corrected in them, and their text was not changed. All reading tasks must be done.
    """
    digest = hashlib.sha256()
    for shard in range(num_shards):
        files = mark_of(spool, shard)["files"]
        for path in (documents_path(spool, shard), ids_path(spool, shard)):
            digest.update(f"{path.name} {files[path.name]['sha256']}\n".encode())
    return digest.hexdigest()


@contextmanager
def ids_writer(prefix: Path) -> Iterator[Callable[[str], int]]:
    """Context manager that writes PREFIX.ids.arrow (see the module).

    It yields a function that adds the id of the next document, empty if it has none, and returns a hash of it.
    """
    import pyarrow  # here and not above, because the import takes as long as a small task

    schema = pyarrow.schema([("id", pyarrow.string())])
    ids: list[str | None] = []

    def write() -> None:
        file.write_batch(pyarrow.record_batch([pyarrow.array(ids, pyarrow.string())], schema=schema))
        ids.clear()

    def add(identity: str) -> int:
        ids.append(identity or None)
        if len(ids) == _IDS:
            write()
        return int.from_bytes(hashlib.blake2b(identity.encode("utf-8"), digest_size=8).digest(), "big")

    with pyarrow.OSFile(f"{prefix}.ids.arrow", "wb") as sink, pyarrow.ipc.new_file(sink, schema) as file:
        yield add
        write()


def rows_by_shard(spool: Path, entries: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Find the documents that passages belong to. Yield one tuple per spool file, in the order of the spool files.

    Args:
        spool: the spool folder.
        entries: the index entry (`index.ENTRY`) of each document or passage.

    Yields:
        The number of the spool file, indices into `entries` of the documents or passages in this spool file, and for
        each of them `SPOOLED` of the document, with the row of the document in the field `offset`. The rows are in
        ascending order.
    """
    order = np.lexsort((entries["offset"], entries["shard"]))
    shards, first = np.unique(entries["shard"][order], return_index=True)
    for shard, which in zip(shards.tolist(), np.split(order, first[1:]), strict=True):
        facts = np.load(documents_path(spool, shard), mmap_mode="r")
        # A passage belongs to the document with the largest start that is not after the start of the passage.
        rows = np.searchsorted(facts["offset"], entries["offset"][which], "right") - 1
        found = np.array(facts[rows])
        found["offset"] = rows
        yield shard, which, found


def ids_of(spool: Path, shard: int, rows: np.ndarray) -> "pyarrow.StringArray":
    """Return the ids of the documents in the given rows of a spool file, in ascending order; null if there is no id.

    Only the parts of the file with these documents are read, because a task looks up a small part of all documents.
    """
    import pyarrow

    batches, first = np.unique(rows // _IDS, return_index=True)
    with pyarrow.memory_map(str(ids_path(spool, shard))) as file:
        reader = pyarrow.ipc.open_file(file)
        return pyarrow.concat_arrays(
            reader.get_batch(batch).column(0).take(pyarrow.array(some - batch * _IDS))
            for batch, some in zip(batches.tolist(), np.split(rows, first[1:]), strict=True)
        )


def dates_of(spool: Path, entries: np.ndarray) -> np.ndarray:
    """Return the date of each document or passage (see `dates`), int64 [n]. For the arguments, see `rows_by_shard`."""
    dates = np.zeros(len(entries), np.int64)
    for _, which, found in rows_by_shard(spool, entries):
        dates[which] = found["date"]
    return dates


def named_documents(spool: Path, entries: np.ndarray, most: int = 10) -> str:
    """Return the names and dates of documents, for a message: of the first `most`, and the number of others.

    For the arguments, see `rows_by_shard`.
    """
    names = []
    for shard, _, found in rows_by_shard(spool, entries[:most]):
        for name, date in zip(ids_of(spool, shard, found["offset"]).to_pylist(), found["date"].tolist(), strict=True):
            names.append(f"{name or 'a document without id'} ({date_text(date)})")
    return ", ".join(names) + (f" and {len(entries) - most:,} more" if len(entries) > most else "")


def order_copies(spool: Path, documents: np.ndarray, by_date: bool) -> None:
    """Put the exact copies of each text into a fixed order, in place. Other documents keep their positions.

    Later steps keep the first of several copies, or take copies in this order. So the ids and dates in a stream do not
    depend on the order in which the files were read.

    Copies are ordered by their source, then their date, then a hash of their id; by their date first if `by_date` is
    True. Copies of a text have equal MinHash signatures, so the files with signatures still fit. `documents` are index
    entries (`index.ENTRY`).
    """
    texts = sortable(documents["document"])
    order = np.argsort(texts, kind="stable")
    texts = texts[order]
    same = texts[1:] == texts[:-1]
    del texts
    is_copy = np.zeros(len(documents), bool)
    is_copy[order[1:][same]] = is_copy[order[:-1][same]] = True
    del order, same
    places = np.flatnonzero(is_copy)
    if not len(places):
        return
    copies = documents[places]
    facts = np.zeros(len(copies), SPOOLED)
    for _, which, found in rows_by_shard(spool, copies):
        facts[which] = found
    texts = sortable(copies["document"])
    first = (copies["source"], facts["date"]) if by_date else (facts["date"], copies["source"])
    wanted = np.lexsort((facts["id"], *first, texts))
    # `now` lists the places of the copies of each text in the same order of texts as `wanted`, each text's places
    # ascending. So the copies of a text are assigned to the places that they have already.
    now = np.lexsort((places, texts))
    documents[places[now]] = copies[wanted]
