"""Remove copies of documents, and write the files that alma-prep --extend needs to recognise copies later.

alma-prep --extend adds mega-batches to a stream, but leaves out documents that are copies of documents in the stream.

An exact copy has the same text as another document. A near copy has similar text. The folder OUT/dedup of a stream
stores a key and a signature per document, together 392 bytes. The key is a 16-byte hash of the text, so exact copies
have equal keys. The signature is used to find near copies (see `signatures`). It replaces the text, which can no longer
be read. Therefore documents that are only contained in a document of the stream are not found. If the setting
`duplicates` is "exact", only keys are stored. If it is "keep", copies are not removed, and nothing is stored.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.candidates import save_corpus
from data_prep.duplicates import Duplicates, find_duplicates
from data_prep.errors import PrepError, Unworkable
from data_prep.near_copies import find_near_copies
from data_prep.reading import Spooled, source_name
from data_prep.signatures import NO_BAND, NUM_BANDS, SignatureFiles, Sketches
from data_prep.tasks import Executor
from data_prep.work_folder import WorkFolder

_ROWS = 1 << 13
"""Number of sketches that are copied at a time."""


def remove_copies(
    spooled: Spooled,
    known_keys: np.ndarray,
    known_signatures: Sequence[SignatureFiles],
    work: WorkFolder,
    executor: Executor,
) -> tuple[np.ndarray, Duplicates, list[dict]]:
    """Remove new documents that are exact or near copies of documents in the stream or of other new documents.

    Of new documents that are copies of each other, one is kept (see `find_duplicates`), unless it is also a copy of a
    document in the stream.

    Args:
        spooled: the new documents, that is, those that were read from the sources.
        known_keys: the 16-byte keys (hashes of the text) of the documents already in the stream, and of the near copies
            of them that were removed earlier. NumPy type V16, shape [m]; empty for a new stream.
        known_signatures: the files with the signatures of these m documents: first those of the stream as it was first
            made, then those of each extension.
        work: the work folder.
        executor: runs the tasks that compare documents.

    Returns:
        Three values. First, the index entry (`index.ENTRY`) of each remaining document. Second, which of
        the new documents are copies. Third, rows for the "cleaning" table in stream.json: how many documents
        and words of each source were removed.
    """
    documents, num_known = spooled.documents, len(known_keys)
    keys = np.concatenate([known_keys, documents["document"]])
    zeros = np.zeros(num_known, np.int32)
    # Give the documents already in the stream rank -1, because a smaller rank has priority, and the ranks of new
    # documents, which are the indices of their snapshots, start at 0.
    rank = np.concatenate([zeros - 1, documents["group"].astype(np.int32)])
    num_words = np.concatenate([zeros, documents["num_words"]])

    def find_pairs(priority: np.ndarray, by_priority: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        files = [*known_signatures, *(spooled.signatures or [])]
        corpus = save_corpus(work.folder / "corpus", files, num_known, priority, by_priority)
        return find_near_copies(work.folder, executor, corpus, work.spool, len(known_signatures))

    wanted = find_pairs if spooled.signatures is not None else None
    found = find_duplicates(keys, rank, num_words, wanted, num_known)
    new = Duplicates(found.exact[num_known:], found.near[num_known:])
    rows = []
    for step, mask in (("exact copy", new.exact), ("near copy", new.near)):
        copies = documents[mask]
        for number, record in enumerate(spooled.records):
            words = copies["num_words"][copies["source"] == number]
            if len(words):
                total = int(words.sum(dtype=np.int64))
                rows.append({"step": step, "source": source_name(record), "documents": len(words), "words": total})
    kept = documents[~(new.exact | new.near)]
    if not len(kept):
        holder = "in the stream" if num_known else "in the sources"
        raise Unworkable(
            f"no document is left: each of the {len(documents):,} new documents is a copy of a document that is "
            f"already {holder}. Add sources with other text."
        )
    return kept, new, rows


def save_keys(
    folder: Path, number: int, keys: np.ndarray, found: Duplicates, signatures: Sequence[SignatureFiles] | None
) -> None:
    """Write the keys and signatures of all documents that were read, except exact copies.

    A later call of alma-prep --extend uses the keys and signatures to find copies of these documents.

    The keys of removed near copies are written, too, so that exact copies of them are found. Their signatures do not
    count, because a text is removed only if it is similar to a text in the stream. The files are sorted by key, so they
    do not depend on the order in which the sources were read.

    Args:
        folder: the stream's folder `dedup`.
        number: 0 for a new stream, else the number of the extension, from 1.
        keys: the key of each document, a 16-byte hash of its text. NumPy type V16, shape [n].
        found: which documents are copies. The keys of exact copies are not written, because the document that is kept
            has the same key.
        signatures: the signature files of the n documents; None if near copies were not searched for.
    """
    which = np.flatnonzero(~found.exact)
    halves = np.ascontiguousarray(keys[which]).view(">u8").reshape(-1, 2)
    which = which[np.lexsort((halves[:, 1], halves[:, 0]))]
    folder.mkdir(exist_ok=True)
    files = SignatureFiles(folder / f"{number:04d}")
    with open(f"{files.prefix}.keys", "wb") as file:
        file.write(np.ascontiguousarray(keys[which]).data)
    if signatures is None:
        return
    with open(files.bands, "wb") as file:
        for band in range(NUM_BANDS):
            hashes = np.concatenate([each.load_band(band) for each in signatures])[which]
            hashes[found.near[which]] = NO_BAND
            file.write(hashes.data)
    sketches = Sketches(signatures)
    with open(files.sketches, "wb") as file:
        for start in range(0, len(which), _ROWS):
            file.write(sketches.read(which[start : start + _ROWS]).data)


def load_keys(folder: Path, count: int, duplicates: str) -> tuple[np.ndarray, list[SignatureFiles]]:
    """Return the keys and the signature files that `save_keys` wrote for a stream and its extensions.

    Args:
        folder: the stream's folder `dedup`.
        count: 1 plus the number of the stream's extensions. The stream as it was first made and each extension have
            their own files.
        duplicates: the setting `duplicates`: near, exact, or keep. With keep, nothing is loaded.

    Raises:
        PrepError: if `duplicates` needs keys or signatures that the stream lacks, because it was made with
            --duplicates keep (no files) or exact (no signatures), or by an earlier version (other signatures).
    """
    keys, signatures = [], []
    for number in range(count):
        if (folder / f"{number:04d}.signatures").is_file() and duplicates == "near":
            raise PrepError(
                f"{folder.parent} was made by an earlier version of alma-prep, whose signatures do not allow to verify "
                "near copies: give --duplicates exact to leave out only exact copies of its documents, or make the "
                "stream again."
            )
        # A missing file shows how the stream was made: --duplicates keep writes no .keys files, and --duplicates exact
        # writes no .bands files. Raise an error if the current value of --duplicates needs the missing file.
        for ending, name, enough in (("keys", "keys", "keep"), ("bands", "signatures", "exact")):
            if not (folder / f"{number:04d}.{ending}").is_file() and duplicates not in ("keep", enough):
                raise PrepError(
                    f"{folder.parent} was made with --duplicates {enough}, so the {name} of its documents were not "
                    f"stored: give --duplicates {enough}, or make the stream again."
                )
        if duplicates != "keep":
            keys.append(np.fromfile(folder / f"{number:04d}.keys", "V16"))
            signatures.append(SignatureFiles(folder / f"{number:04d}"))
    return np.concatenate([np.empty(0, "V16"), *keys]), signatures
