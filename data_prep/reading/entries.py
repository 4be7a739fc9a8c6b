"""Make the index entries (`index.ENTRY`) of the documents in the spool.

An index entry contains what depends on the settings of one stream: the sort key, which depends on the seed, and the
indices of the source and of the snapshot. These are not stored in the spool, because the spool can be used by several
streams (see `read_store`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from data_prep.reading.index import ENTRY, order_key
from data_prep.reading.spool import documents_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.progress import Bar
from data_prep.running.tasks import Executor, Step, Task

_TASK_DOCUMENTS = 1 << 19
"""Approximate number of documents whose index entries one task makes."""
_BEAT_DOCUMENTS = 1 << 14
"""Number of documents after which a task shows that it makes progress."""


class Shard(NamedTuple):
    """A spool file, and what the index entries of its documents need."""

    number: int
    """Number of the spool file."""
    num_documents: int
    sha256: str
    """SHA-256 digest of the file that describes the documents (`spool.documents_path`)."""
    source: int
    """Index of the source of the documents, in the list of sources."""
    groups: list[int]
    """Index of the snapshot of each part of the task that wrote the spool file. One number: the same for all parts."""


def make_entries(seed: int, shards: Sequence[Shard], spool: Path, folder: Path, executor: Executor) -> np.ndarray:
    """Return the index entry (`index.ENTRY`) of each document in the spool files, in the order of `shards`.

    Args:
        seed: the seed of the stream.
        shards: the spool files.
        spool: the spool folder.
        folder: the folder of this step.
        executor: runs the tasks, on this machine or on a Slurm cluster.
    """
    batches = list(_batches(shards))
    step = Step(folder, [EntriesTask(str(spool), seed, batch) for batch in batches])
    with Bar("order documents", sum(shard.num_documents for shard in shards), "documents") as bar:
        step.run(executor, lambda number: bar.advance(sum(shard.num_documents for shard in batches[number])))
    return np.concatenate([np.load(f"{step.prefix(number)}.entries.npy") for number in range(len(batches))])


def _batches(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Yield lists of neighbouring spool files with about _TASK_DOCUMENTS documents each."""
    batch: list[Shard] = []
    for shard in shards:
        batch.append(shard)
        if sum(one.num_documents for one in batch) >= _TASK_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


@dataclass(frozen=True)
class EntriesTask(Task):
    """Task that makes the index entries of the documents in some spool files.

    The task writes the index entries to PREFIX.entries.npy, where PREFIX is the argument `prefix` of `run`.
    """

    spool: str
    """Path of the spool folder."""
    seed: int
    """Seed of the stream. The sort keys, which shuffle the passages, depend on the seed."""
    shards: list[Shard]

    @classmethod
    def from_fields(cls, values: dict) -> Self:
        return cls(**values | {"shards": [Shard(*shard) for shard in values["shards"]]})

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        entries = [np.empty(0, ENTRY)]
        for shard in self.shards:
            documents = np.load(documents_path(Path(self.spool), shard.number))
            found = np.zeros(len(documents), ENTRY)
            identities = np.ascontiguousarray(documents["identity"])
            found["key"] = self._keys(identities.tobytes(), heartbeat)
            # The first half of the digest identifies the document. The second half only makes the sort key.
            found["document"] = identities.view("V16").reshape(-1, 2)[:, 0]
            for name in ("offset", "num_bytes", "num_words"):
                found[name] = documents[name]
            found["shard"], found["source"] = shard.number, shard.source
            found["group"] = shard.groups[0]
            if len(shard.groups) > 1:
                found["group"] = np.array(shard.groups, np.int16)[documents["part"]]
            entries.append(found)
        with open(f"{prefix}.entries.npy", "wb") as file:
            np.save(file, np.concatenate(entries))
        return {}

    def _keys(self, identities: bytes, heartbeat: Heartbeat) -> np.ndarray:
        """Return the sort key of each document. `identities` are the digests of the documents, 32 bytes each."""
        keys = bytearray()
        for start in range(0, len(identities), 32):
            if start % (32 * _BEAT_DOCUMENTS) == 0:
                heartbeat.beat("sort keys")
            keys += order_key(self.seed, identities[start : start + 32], 0)
        return np.frombuffer(bytes(keys), "V16")
