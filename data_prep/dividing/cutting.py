"""Cut the long documents in the spool into passages (see `partition`)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from data_prep.dividing.partition import Plan, cut_document
from data_prep.reading.index import ENTRY, order_key
from data_prep.reading.spool import read_text
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task


@dataclass(frozen=True)
class CutTask(Task):
    """Task that cuts long documents into passages.

    The task cuts the documents at the positions from `start` (included) to `end` (excluded) in the file
    `long_documents`. It writes the index entry (`index.ENTRY`) of each passage to PREFIX.passages.npy, where PREFIX is
    the argument `prefix` of `run`. The text stays in the spool (the folder of plain text files) and is not copied.
    """

    spool: str
    """Path of the spool folder, which contains the text of the documents."""
    seed: int
    """Seed of the stream. The sort keys, which shuffle the passages, depend on the seed."""
    plan: Plan
    """The length of passages, and the length above which a document is cut."""
    long_documents: str
    """Path of the file with the index entry (`index.ENTRY`) of each document that must be cut."""
    sha256: str
    """SHA-256 digest of the file `long_documents`. If the file has changed, this digest has changed too. Then the task
    counts as a different task and is done again (see `tasks`)."""
    start: int
    end: int

    @classmethod
    def from_fields(cls, values: dict) -> Self:
        return cls(**values | {"plan": Plan(*values["plan"])})

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        rows = []
        for entry in np.load(self.long_documents, mmap_mode="r")[self.start : self.end]:
            heartbeat.beat()
            text, offset = read_text(Path(self.spool), entry), int(entry["offset"])
            identity = hashlib.sha256(text.encode("utf-8")).digest()
            with heartbeat.computing():  # a document of 16 MB can take a minute
                passages = cut_document(text, self.plan.passage_words, self.plan.limit_words)
            for number, passage in enumerate(passages):
                num_bytes = len(passage.text.encode("utf-8"))
                key, document = order_key(self.seed, identity, number), bytes(entry["document"])
                place = (offset, entry["shard"], num_bytes, passage.num_words, entry["source"], entry["group"])
                rows.append((key, document, *place, number))
                offset += num_bytes
        with open(f"{prefix}.passages.npy", "wb") as file:
            np.save(file, np.array(rows, dtype=ENTRY))
        return {"passages": len(rows)}
