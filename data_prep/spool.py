"""The spool: the text of all documents that pass cleaning, copied into plain files, and an ENTRY for each document.

An ENTRY is one element of the index (`index.ENTRY`): sort key, position of the text, and counts.

With the spool, each source (a folder, compressed archives, Python modules) is read only once. Later steps can read any
document or passage by file and byte offset, in any order, without keeping the corpus in memory.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from data_prep.cleaning import Cleaner, Cleaning
from data_prep.heartbeat import Heartbeat
from data_prep.index import ENTRY
from data_prep.partition import Plan, cut_document, order_key
from data_prep.sources import Part, Skipped, read_documents
from data_prep.tasks import Task

if TYPE_CHECKING:
    from data_prep.duplicates import Signer


def text_path(folder: Path, shard: int) -> Path:
    """Return the path of a spool file, which contains the text of documents one after another."""
    return folder / f"{shard:06d}.text"


def documents_path(folder: Path, shard: int) -> Path:
    """Return the path of the file with the ENTRY of each document of a spool file."""
    return folder / f"{shard:06d}.documents.npy"


def signatures_path(folder: Path, shard: int) -> Path:
    """Return the path of the file with the signature of each document of a spool file."""
    return folder / f"{shard:06d}.signatures"


@dataclass(frozen=True)
class SpoolTask(Task):
    """Read parts of a source, clean the documents, and write those that pass into one spool file.

    Also writes PREFIX.documents.npy with the ENTRY of each document and, with `sign`, PREFIX.signatures. The result
    contains counts per file, and what was removed and skipped.
    """

    shard: int
    """Number of the spool file, equal to the number of the task."""
    seed: int
    """Seed of the order of passages."""
    source: int
    """Index of the source."""
    parts: list[tuple[Part, int]]
    """The parts to read, each with its snapshot index."""
    cleaning: Cleaning | None
    """The rules that documents must pass; None: all documents pass."""
    sign: bool
    """Whether to compute MinHash signatures, which are used to find near-duplicates."""
    stamp: str
    """Digest of the sizes and modification times of the files. If a file has changed, the task is run again."""

    @classmethod
    def from_fields(cls, values: dict) -> Self:
        parts = [
            (Part(kind, path, name, start, end, tuple(map(tuple, options))), group)
            for (kind, path, name, start, end, options), group in values["parts"]
        ]
        cleaning = Cleaning(*values["cleaning"]) if values["cleaning"] else None
        return cls(**values | {"parts": parts, "cleaning": cleaning})

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        cleaner = Cleaner(self.cleaning) if self.cleaning else None
        signer = _signer() if self.sign else None
        rows, signatures, skipped, offset = [], [], [], 0
        files: dict[str, list[int]] = {}
        removed: dict[str, list[int]] = {}
        with open(f"{prefix}.text", "wb") as file:
            for part, group in self.parts:
                heartbeat.beat(part.name)
                count = files.setdefault(part.name, [0, 0, 0])
                for document in read_documents(part, heartbeat.beat):
                    heartbeat.beat()
                    if isinstance(document, Skipped):
                        skipped.append(document)
                        continue
                    content = document.encode("utf-8")
                    num_words = len(document.split())
                    _add(count, 1, num_words, len(content))
                    reason = cleaner.reason(document) if cleaner else None
                    if reason:
                        _add(removed.setdefault(reason, [0, 0]), 1, num_words)
                        continue
                    # Identify a document by its content, because file names, paths and their order must not matter.
                    identity = hashlib.sha256(content).digest()
                    key = order_key(self.seed, identity, 0)
                    place = (offset, self.shard, len(content), num_words, self.source, group)
                    rows.append((key, identity[:16], *place))
                    if signer:
                        signatures.append(signer.signature(document))
                    offset += file.write(content)
        with open(f"{prefix}.documents.npy", "wb") as file:
            np.save(file, np.array(rows, dtype=ENTRY))
        if signer:
            from data_prep.duplicates import NUM_BANDS, save_signatures

            save_signatures(Path(f"{prefix}.signatures"), np.array(signatures, np.uint64).reshape(-1, NUM_BANDS))
        return {"files": files, "removed": removed, "skipped": skipped}


def _add(counts: list[int], *more: int) -> None:
    """Add one number to each count, in place."""
    counts[:] = [count + added for count, added in zip(counts, more, strict=True)]


@functools.lru_cache(maxsize=1)  # a worker runs many tasks, and datatrove takes a second to import
def _signer() -> "Signer":
    from data_prep.duplicates import Signer

    return Signer()


@dataclass(frozen=True)
class CutTask(Task):
    """Cut the documents start (included) to end (excluded) of `long_documents` into passages.

    Writes the ENTRY of each passage to PREFIX.passages.npy.
    """

    spool: str
    """Path of the spool folder."""
    seed: int
    """Seed of the order of passages."""
    plan: Plan
    long_documents: str
    """Path of the file with the ENTRY of each long document."""
    sha256: str
    """SHA-256 digest of the file `long_documents`."""
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
            passages = cut_document(text, self.plan.passage_words, self.plan.limit_words)
            for number, passage in enumerate(passages):
                num_bytes = len(passage.encode("utf-8"))
                key, document = order_key(self.seed, identity, number), bytes(entry["document"])
                place = (offset, entry["shard"], num_bytes, len(passage.split()), entry["source"], entry["group"])
                rows.append((key, document, *place))
                offset += num_bytes
        with open(f"{prefix}.passages.npy", "wb") as file:
            np.save(file, np.array(rows, dtype=ENTRY))
        return {"passages": len(rows)}


def read_text(folder: Path, entry: np.void) -> str:
    """Return the text of one document or passage.

    Args:
        folder: the spool folder.
        entry: the ENTRY of the document or passage.
    """
    file = _open(text_path(folder, int(entry["shard"])))
    file.seek(int(entry["offset"]))
    return file.read(int(entry["num_bytes"])).decode("utf-8")


# Keep spool files open, because passages are read in random order. The cache size is below the usual limit on open
# files. A file that is evicted from the cache is closed when it is garbage-collected.
@functools.lru_cache(maxsize=256)
def _open(path: Path) -> BinaryIO:
    return open(path, "rb")
