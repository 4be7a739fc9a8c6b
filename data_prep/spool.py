"""The spool: the text of all documents that pass, copied once into plain files, and an index of where each one lies.

Sources are read once, whatever they are (a folder, compressed archives, Python modules); later steps then read
any passage by its place, in the order of the partition, without holding the corpus in memory.
"""

import functools
import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.cleaning import Cleaner, Cleaning
from data_prep.partition import Plan, cut_document, order_key
from data_prep.pieces import beat
from data_prep.sources import Part, Skipped, read_documents

# One entry per document or passage: 56 bytes, all that is held in memory of a corpus.
ENTRY = np.dtype(
    [
        ("key", "V16"),  # its place in the seeded order: hash(seed, identity, passage number)
        ("document", "V16"),  # of its document's text, whatever the seed: equal for equal documents only
        ("offset", np.int64),  # bytes
        ("shard", np.int32),  # which spool file
        ("num_bytes", np.int32),
        ("num_words", np.int32),
        ("source", np.int16),  # which --source
        ("group", np.int16),  # which snapshot, of a stream that drifts
    ]
)
INDEX = "passages.npy"


def text_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06d}.text"


def documents_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06d}.documents.npy"


def signatures_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06d}.signatures"


def spool_parts(
    prefix: Path, shard: int, seed: int, source: int, parts: list, cleaning: list | None, sign: bool, stamp: str
) -> dict:
    """In a worker: copy the documents of `parts` that pass into one spool file; count words, sign, report.

    `stamp` (sizes and times of the files) only tells this task from one on files that have changed since.
    """
    cleaner = Cleaner(Cleaning(*cleaning)) if cleaning else None
    signer = _signer() if sign else None
    rows, signatures, skipped, offset = [], [], [], 0
    files: dict[str, list[int]] = {}
    removed: dict[str, list[int]] = {}
    with open(f"{prefix}.text", "wb") as file:
        for told, group in parts:
            kind, path, name, start, end, options = told
            part = Part(kind, path, name, start, end, tuple(map(tuple, options)))
            beat(part.name)
            count = files.setdefault(part.name, [0, 0, 0])
            for document in read_documents(part):
                beat()
                if isinstance(document, Skipped):
                    skipped.append(document)
                    continue
                content = document.encode("utf-8")
                num_words = len(document.split())
                count[0] += 1
                count[1] += num_words
                count[2] += len(content)
                reason = cleaner.reason(document) if cleaner else None
                if reason:
                    tally = removed.setdefault(reason, [0, 0])
                    tally[0] += 1
                    tally[1] += num_words
                    continue
                # A document is known by its content: names, paths and their order do not matter.
                identity = hashlib.sha256(content).digest()
                rows.append(
                    (order_key(seed, identity, 0), identity[:16], offset, shard, len(content), num_words, source, group)
                )
                if signer:
                    signatures.append(signer.signature(document))
                offset += file.write(content)
    with open(f"{prefix}.documents.npy", "wb") as file:
        np.save(file, np.array(rows, dtype=ENTRY))
    if signer:
        from data_prep.duplicates import NUM_BANDS, save_signatures

        save_signatures(Path(f"{prefix}.signatures"), np.array(signatures, np.uint64).reshape(-1, NUM_BANDS))
    return {"files": files, "removed": removed, "skipped": skipped}


@functools.lru_cache(maxsize=1)
def _signer():
    from data_prep.duplicates import Signer

    return Signer()


def cut_documents(
    prefix: Path, spool: str, seed: int, plan: list, long_documents: str, sha256: str, start: int, end: int
) -> dict:
    """In a worker: the passages of long documents start..end of a file, ENTRY each, into `prefix`.passages.npy."""
    rows = []
    limits = Plan(*plan)
    for entry in np.load(long_documents, mmap_mode="r")[start:end]:
        beat()
        text, offset = read_text(Path(spool), entry), int(entry["offset"])
        identity = hashlib.sha256(text.encode("utf-8")).digest()
        for number, passage in enumerate(cut_document(text, limits.passage_words, limits.limit_words)):
            num_bytes = len(passage.encode("utf-8"))
            key, document = order_key(seed, identity, number), bytes(entry["document"])
            place = (offset, entry["shard"], num_bytes, len(passage.split()), entry["source"], entry["group"])
            rows.append((key, document, *place))
            offset += num_bytes
    with open(f"{prefix}.passages.npy", "wb") as file:
        np.save(file, np.array(rows, dtype=ENTRY))
    return {"passages": len(rows)}


def read_index(path: Path) -> np.ndarray:
    """ENTRY per passage, as saved by numpy; mapped, not loaded."""
    return np.load(path, mmap_mode="r")


def read_text(folder: Path, entry: np.void) -> str:
    """The text of one document or passage."""
    file = _open(text_path(folder, int(entry["shard"])))
    file.seek(int(entry["offset"]))
    return file.read(int(entry["num_bytes"])).decode("utf-8")


@functools.lru_cache(maxsize=256)  # fewer than the usual limit of open files; a dropped file closes itself
def _open(path: Path) -> BinaryIO:
    return open(path, "rb")
