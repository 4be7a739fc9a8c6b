"""The step that removes copies, and the files by which later extensions recognise the documents of a stream.

A stream keeps 128 bytes per document in OUT/dedup: the key of its text, and its MinHash signature.
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
    """Find the documents that are no copies of others, or of documents that the stream holds already.

    Args:
        spooled: the documents.
        known_keys: V16 [m], the keys of the documents of the stream that is extended; else empty.
        known_signatures: their signatures, a list of files for the stream and for each extension.

    Returns:
        The ENTRY of each document that stays; a mask over all documents, True for exact copies; and the rows of the
        table in stream.json that say what was removed.
    """
    from data_prep.duplicates import find_duplicates  # needs scipy, which takes a second to import

    documents, num_known = spooled.documents, len(known_keys)
    keys = np.concatenate([known_keys, documents["document"]])
    zeros = np.zeros(num_known, np.int32)
    rank = np.concatenate([zeros - 1, documents["group"].astype(np.int32)])
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
        holder = "the stream holds" if num_known else "the sources hold"
        raise Unworkable(f"nothing is left: each of {len(documents):,} documents is a copy of one that {holder}.")
    return kept, exact, rows


def save_keys(folder: Path, number: int, keys: np.ndarray, exact: np.ndarray, signatures: list[Path] | None) -> None:
    """Write the keys and signatures by which later extensions recognise these documents.

    Near copies are kept too: a text that is near to one of them is near to a text of the stream. The files are sorted
    by key, so that they do not depend on the order in which sources were read.

    Args:
        folder: the folder `dedup` of the stream.
        number: 0 for the stream itself, 1.. for its extensions.
        keys: V16 [n], the key of each document.
        exact: bool [n], True for exact copies, which are left out.
        signatures: the files of the signatures of the n documents; None if near copies were not looked for.
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
    """Return the keys and the signature files of a stream and its extensions, as `save_keys` wrote them.

    Args:
        folder: the folder `dedup` of the stream.
        count: 1 for the stream itself plus the number of its extensions.
        duplicates: the setting of this name: near, exact, or keep, which needs neither.

    Raises:
        PrepError: the stream was made with a `duplicates` that keeps less.
    """
    keys, signatures = [], []
    for number in range(count):
        for ending, enough in (("keys", "keep"), ("signatures", "exact")):
            if not (folder / f"{number:04d}.{ending}").is_file() and duplicates not in ("keep", enough):
                raise PrepError(
                    f"{folder.parent} was made with --duplicates {enough}, and keeps no {ending} of its documents: "
                    f"give --duplicates {enough}, or make it again."
                )
        if duplicates != "keep":
            keys.append(np.fromfile(folder / f"{number:04d}.keys", "V16"))
            signatures.append([folder / f"{number:04d}.signatures"])
    return np.concatenate([np.empty(0, "V16"), *keys]), signatures
