"""The spool: the text of all documents, copied once into plain files, and an index of where each one lies.

Sources are read once, whatever they are (a folder, compressed archives, Python modules); later steps then read
any passage by its place, in the order of the partition, without holding the corpus in memory.
"""

import functools
import hashlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep.partition import Plan, cut_document, order_key
from data_prep.sources import Part, Skipped, read_documents

# One entry per document or passage: 56 bytes, all that is held in memory of a corpus.
ENTRY = np.dtype(
    [
        ("key", "V16"),  # its place in the seeded order: hash(seed, identity, passage number)
        ("document", "V16"),  # the key of its document's passage 0: equal for equal documents only
        ("shard", np.int32),  # which spool file
        ("offset", np.int64),  # bytes
        ("num_bytes", np.int64),
        ("num_words", np.int32),
    ]
)


INDEX = "passages.npy"


class Spooled(NamedTuple):
    """What one task found."""

    entries: np.ndarray
    """ENTRY per document, each of them still in one piece."""
    skipped: list[Skipped]


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06d}.text"


def spool_parts(folder: Path, shard: int, seed: int, parts: list[Part]) -> Spooled:
    """Copy the documents of `parts` into spool file number `shard` and count their words."""
    rows, skipped, offset = [], [], 0
    with open(shard_path(folder, shard), "wb") as file:
        for part in parts:
            for document in read_documents(part):
                if isinstance(document, Skipped):
                    skipped.append(document)
                    continue
                content = document.encode("utf-8")
                # A document is known by its content: names, paths and their order do not matter.
                key = order_key(seed, hashlib.sha256(content).digest(), 0)
                rows.append((key, key, shard, offset, len(content), len(document.split())))
                offset += file.write(content)
    return Spooled(np.array(rows, dtype=ENTRY), skipped)


def cut_documents(folder: Path, seed: int, plan: Plan, entries: np.ndarray) -> np.ndarray:
    """The passages of documents: ENTRY per passage, each a stretch of its document's place in the spool."""
    rows = []
    for entry in entries:
        text, offset = read_text(folder, entry), int(entry["offset"])
        identity = hashlib.sha256(text.encode("utf-8")).digest()
        for number, passage in enumerate(cut_document(text, plan.passage_words, plan.limit_words)):
            num_bytes = len(passage.encode("utf-8"))
            key, document = order_key(seed, identity, number), bytes(entry["document"])
            rows.append((key, document, entry["shard"], offset, num_bytes, len(passage.split())))
            offset += num_bytes
    return np.array(rows, dtype=ENTRY)


def write_index(folder: Path, passages: np.ndarray):
    """Keep the passages' entries beside the text: workers map this file instead of receiving it over and over."""
    with open(folder / INDEX, "wb") as file:
        np.save(file, passages)


def read_index(folder: Path) -> np.ndarray:
    """ENTRY per passage, as written by `write_index`; mapped, not loaded."""
    return np.load(folder / INDEX, mmap_mode="r")


def read_text(folder: Path, entry: np.void) -> str:
    """The text of one document or passage."""
    file = _open(shard_path(folder, int(entry["shard"])))
    file.seek(int(entry["offset"]))
    return file.read(int(entry["num_bytes"])).decode("utf-8")


@functools.lru_cache(maxsize=256)  # fewer than the usual limit of open files; a dropped file closes itself
def _open(path: Path) -> BinaryIO:
    return open(path, "rb")
