"""Remove copies of documents, and write the files that alma-prep --extend needs to recognise copies later.

alma-prep --extend adds mega-batches to a stream, but leaves out documents that are copies of documents in the stream.

An exact copy has the same text as another document. A near copy has similar text. The folder OUT/dedup of a stream
stores a key and a MinHash signature per document, together 128 bytes. The key is a 16-byte hash of the text, so exact
copies have equal keys. The signature is used to find near copies (see `duplicates`). If the setting `duplicates` is
"exact", only keys are stored. If it is "keep", copies are not removed, and nothing is stored.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.errors import PrepError, Unworkable
from data_prep.progress import Bar
from data_prep.reading import Spooled, source_name


def remove_copies(
    spooled: Spooled, known_keys: np.ndarray, known_signatures: Sequence[list[Path]]
) -> tuple[np.ndarray, np.ndarray, list[dict]]:
    """Remove new documents that are exact or near copies of documents in the stream or of other new documents.

    Of new documents that are copies of each other, one is kept (see `find_duplicates`), unless it is also a copy of a
    document in the stream.

    Args:
        spooled: the new documents, that is, those that were read from the sources.
        known_keys: the 16-byte keys (hashes of the text) of the documents already in the stream, and of the near copies
            of them that were removed earlier. NumPy type V16, shape [m]; empty for a new stream.
        known_signatures: the files with the MinHash signatures of these m documents: one list of files for the stream
            as it was first made, and one list per extension.

    Returns:
        Three values. First, the index entry (`index.ENTRY`) of each remaining document. Second, a bool mask over all
        new documents, True for exact copies. Third, rows for the "cleaning" table in stream.json: how many documents
        and words of each source were removed.
    """
    # Import data_prep.duplicates only here, because it imports scipy, which takes a second.
    from data_prep.duplicates import find_duplicates

    documents, num_known = spooled.documents, len(known_keys)
    keys = np.concatenate([known_keys, documents["document"]])
    zeros = np.zeros(num_known, np.int32)
    # Give the documents already in the stream rank -1, because a smaller rank has priority, and the ranks of new
    # documents, which are the indices of their snapshots or their dates, start at 0.
    rank_of_new = documents["group"].astype(np.int32) if spooled.dates is None else spooled.dates
    rank = np.concatenate([zeros - 1, rank_of_new])
    num_words = np.concatenate([zeros, documents["num_words"]])
    signatures = None if spooled.signatures is None else [*known_signatures, spooled.signatures]
    with Bar("find duplicates", len(keys), "documents") as bar:
        found = find_duplicates(keys, rank, num_words, signatures, num_known)
        bar.advance(len(keys))
    exact, near = found.exact[num_known:], found.near[num_known:]
    rows = []
    for step, mask in (("exact copy", exact), ("near copy", near)):
        copies = documents[mask]
        for number, record in enumerate(spooled.records):
            words = copies["num_words"][copies["source"] == number]
            if len(words):
                total = int(words.sum(dtype=np.int64))
                rows.append({"step": step, "source": source_name(record), "documents": len(words), "words": total})
    kept = documents[~(exact | near)]
    if not len(kept):
        holder = "in the stream" if num_known else "in the sources"
        raise Unworkable(
            f"no document is left: each of the {len(documents):,} new documents is a copy of a document that is "
            f"already {holder}. Add sources with other text."
        )
    return kept, exact, rows


def save_keys(folder: Path, number: int, keys: np.ndarray, exact: np.ndarray, signatures: list[Path] | None) -> None:
    """Write the keys and MinHash signatures of all documents that were read, except exact copies.

    A later call of alma-prep --extend uses the keys and signatures to find copies of these documents.

    The keys and signatures of removed near copies are written, too, because a later text that is similar to a removed
    near copy is probably also similar to a text in the stream. The files are sorted by key, so they do not depend on
    the order in which the sources were read.

    Args:
        folder: the stream's folder `dedup`.
        number: 0 for a new stream, else the number of the extension, from 1.
        keys: the key of each document, a 16-byte hash of its text. NumPy type V16, shape [n].
        exact: bool [n], True for exact copies. Their keys are not written, because the document that is kept has the
            same key.
        signatures: the signature files of the n documents; None if near copies were not searched for.
    """
    from data_prep.duplicates import NUM_BANDS, load_band

    which = np.flatnonzero(~exact)
    halves = np.ascontiguousarray(keys[which]).view(">u8").reshape(-1, 2)
    which = which[np.lexsort((halves[:, 1], halves[:, 0]))]
    folder.mkdir(exist_ok=True)
    with open(folder / f"{number:04d}.keys", "wb") as file:
        file.write(np.ascontiguousarray(keys[which]).data)
    if signatures is not None:
        with open(folder / f"{number:04d}.signatures", "wb") as file:
            for band in range(NUM_BANDS):
                file.write(np.concatenate([load_band(path, band) for path in signatures])[which].data)


def load_keys(folder: Path, count: int, duplicates: str) -> tuple[np.ndarray, list[list[Path]]]:
    """Return the keys and the paths of the signature files that `save_keys` wrote for a stream and its extensions.

    Args:
        folder: the stream's folder `dedup`.
        count: 1 plus the number of the stream's extensions. The stream as it was first made and each extension have
            their own files.
        duplicates: the setting `duplicates`: near, exact, or keep. With keep, nothing is loaded.

    Raises:
        PrepError: if `duplicates` needs keys or signatures that the stream lacks, because it was made with
            --duplicates keep (no files) or exact (no signatures).
    """
    keys, signatures = [], []
    for number in range(count):
        # A missing file shows how the stream was made: --duplicates keep writes no .keys files, and --duplicates exact
        # writes no .signatures files. Raise an error if the current value of --duplicates needs the missing file.
        for ending, enough in (("keys", "keep"), ("signatures", "exact")):
            if not (folder / f"{number:04d}.{ending}").is_file() and duplicates not in ("keep", enough):
                raise PrepError(
                    f"{folder.parent} was made with --duplicates {enough}, so the {ending} of its documents were not "
                    f"stored: give --duplicates {enough}, or make the stream again."
                )
        if duplicates != "keep":
            keys.append(np.fromfile(folder / f"{number:04d}.keys", "V16"))
            signatures.append([folder / f"{number:04d}.signatures"])
    return np.concatenate([np.empty(0, "V16"), *keys]), signatures
