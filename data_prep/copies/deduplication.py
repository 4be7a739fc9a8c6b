"""Remove copies of documents, and write the files that alma-prep --extend needs to recognise copies later.

alma-prep --extend adds mega-batches to a stream, but leaves out documents that are copies of documents in the stream.

An exact copy has the same text as another document. A near copy has similar text. The folder OUT/dedup of a stream
stores a key and a signature per document, together 392 bytes. The key is a 16-byte hash of the text, so exact copies
have equal keys. The signature is used to find near copies (see `signatures`). It replaces the text, which can no longer
be read. Therefore documents that are only contained in a document of the stream are not found. If the setting
`duplicates` is "exact", only keys are stored. If it is "keep", copies are not removed, and nothing is stored. Documents
of which shares left out every passage are not stored, so they can be added later.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_prep.accounts import removed_rows
from data_prep.copies.candidates import save_corpus
from data_prep.copies.near_copies import Duplicates, find_duplicates, find_near_copies
from data_prep.errors import NothingNew, PrepError
from data_prep.reading.index import sortable
from data_prep.reading.provenance import copies_digest, reading_digest
from data_prep.reading.read import Spooled
from data_prep.reading.signatures import NO_BAND, NUM_BANDS, SKETCH_BYTES, SignatureFiles
from data_prep.running.progress import note
from data_prep.running.work_folder import WorkFolder
from fairseq_alma.core.store import Store

Pairs = tuple[np.ndarray, np.ndarray]
"""The numbers by priority of the better and of the worse documents, int64 [pairs]."""
_KEY_ROWS = 1 << 20
"""Number of documents whose keys are copied at a time."""
_SORTED_ROWS = 1 << 18
"""Number of sketches, 256 bytes, that are sorted at a time. Sorting copies them."""


def remove_copies(
    spooled: Spooled, known_keys: np.ndarray, known_signatures: Sequence[SignatureFiles], work: WorkFolder,
    cache: str | None = None, which: np.ndarray | None = None, dates: np.ndarray | None = None,
) -> tuple[np.ndarray, Duplicates, list[dict]]:  # fmt: skip
    """Remove new documents that are exact or near copies of documents in the stream or of other new documents.

    If new documents are copies of each other, one of them is kept, but none if the stream already has such a document.

    Args:
        spooled: the new documents, that is, those that were read from the sources.
        known_keys: the 16-byte keys (hashes of the text) of the documents already in the stream, and of the near copies
            of them that were removed earlier. NumPy type V16, shape [m]; empty for a new stream.
        known_signatures: the files with the signatures of these m documents (see `pipeline.BaseStream`).
        work: the work folder.
        cache: the folder of --cache, which keeps the pairs of near copies of a new stream.
        which: indices of the new documents to look at, for example those of one period; None: all.
        dates: the date of each new document by which copies are chosen, the earliest first; None: those in `spooled`.

    Returns:
        Three values. First, the index entry (`index.ENTRY`) of each remaining document. Second, which of the new
        documents are copies. `Duplicates.kept` is -1 for copies of documents in the stream, and else the index of a new
        document. Third, rows for the "cleaning" table in stream.json, with what was removed.
    """
    which = np.arange(len(spooled.documents)) if which is None else which
    documents, num_known = spooled.documents[which], len(known_keys)
    keys = np.concatenate([known_keys, documents["document"]])
    zeros = np.zeros(num_known, np.int32)
    # Give the documents already in the stream rank -1, because a smaller rank has priority, and the ranks of new
    # documents, which are the indices of their snapshots or their dates, start at 0.
    dates = spooled.dates if dates is None else dates
    rank_of_new = documents["group"].astype(np.int32) if dates is None else dates[which]
    rank = np.concatenate([zeros - 1, rank_of_new])
    num_words = np.concatenate([zeros, documents["num_words"]])

    def find_pairs(priority: np.ndarray, by_priority: np.ndarray) -> Pairs:
        def find() -> Pairs:
            files = [*known_signatures, *(spooled.signatures or [])]
            # The rows in these files of the documents to look at. The others are left out, as exact copies are.
            rows = np.concatenate([np.arange(num_known), num_known + which])
            number_of_row = np.full(num_known + len(spooled.documents), -1, priority.dtype)
            number_of_row[rows] = priority
            corpus = save_corpus(work.folder / "corpus", files, num_known, number_of_row, rows[by_priority])
            return find_near_copies(work, corpus)

        # With --extend, the pairs also depend on the stored sketches of the stream. The keys do not contain these, so
        # nothing is cached.
        return find() if num_known or cache is None else _cached_pairs(cache, keys, priority, by_priority, find)

    wanted = find_pairs if spooled.signatures is not None else None
    exact, near, instead = (each[num_known:] for each in find_duplicates(keys, rank, num_words, wanted, num_known))
    kept = documents[~(exact | near)]
    rows = removed_rows("exact copy", spooled.names, documents[exact])
    rows += removed_rows("near copy", spooled.names, documents[near])
    return kept, Duplicates(exact, near, np.maximum(instead - num_known, -1)), rows


def _cached_pairs(
    cache: str, keys: np.ndarray, priority: np.ndarray, by_priority: np.ndarray, find: Callable[[], Pairs]
) -> Pairs:
    """Return the pairs of near copies from the folder of --cache, or else find and store them.

    They depend on the texts of the documents and their order of priority, and not on the seed or the division into
    splits. So a second stream from the same files has the same pairs.
    """
    digest = hashlib.sha256(f"{reading_digest()} {copies_digest()} {len(keys)} ".encode())
    for start in range(0, len(keys), _KEY_ROWS):
        documents = by_priority[start : start + _KEY_ROWS]
        digest.update(keys[documents].tobytes())
        digest.update((priority[documents] < 0).tobytes())
    store, key = Store(cache, durable=False), digest.hexdigest()
    if (entry := store.take(key)) is not None:
        better, worse = np.load(entry.folder / "pairs.npy")
        return better, worse
    pairs = find()
    try:
        with store.writing(key) as folder:
            np.save(folder / "pairs.npy", np.array(pairs, np.int64))
    except OSError as error:  # for example, the cache is full or read-only
        note(f"the pairs of similar documents are not stored in the cache: {error}")
    return pairs


def without_forgotten(spooled: Spooled, description: Mapping | None) -> tuple[np.ndarray, list[dict]]:
    """Leave out the new documents whose text alma-forget has masked in the stream: a forgotten document stays out.

    Their near copies are found by the signatures of the stream, as all near copies.

    Args:
        spooled: the new documents.
        description: the content of stream.json of the stream that is extended; None for a new stream.

    Returns:
        The indices of the other documents, and rows for the "cleaning" table in stream.json.

    Raises:
        NothingNew: if no document is left.
    """
    every = np.arange(len(spooled.documents))
    names = [name for one in (description or {}).get("forgotten", []) for name in one["documents"]]
    if not names:
        return every, []
    hashes = np.frombuffer(bytes.fromhex("".join(names)), "V16")
    is_forgotten = np.isin(sortable(spooled.documents["document"]), sortable(hashes))
    if is_forgotten.all():
        raise NothingNew("each of the new documents was removed from the stream by alma-forget")
    return every[~is_forgotten], removed_rows("forgotten", spooled.names, spooled.documents[is_forgotten])


def record_documents(
    folder: Path, number: int, spooled: Spooled, which: np.ndarray, found: Duplicates,
    in_stream: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Record the documents of the stream for later calls of alma-prep --extend.

    All documents are recorded except exact copies, and those of which a share left out every part, with the near copies
    that were removed in favour of these.

    Args:
        folder: the folder `dedup` of the stream.
        number: 0 for a new stream, else the number of the extension, from 1.
        spooled: the documents that were read.
        which: indices of the documents that the stream, the extension or the period could use.
        found: which of these documents are copies.
        in_stream: the keys of the documents of which some part is in the stream; None: no text is left out.
    """
    keys, is_recorded = spooled.documents["document"][which], ~found.exact
    if in_stream is not None:
        is_left_out = ~(found.exact | found.near | np.isin(sortable(keys), sortable(in_stream)))
        of_left_out = found.near & (found.kept >= 0)
        of_left_out[of_left_out] = is_left_out[found.kept[of_left_out]]
        is_recorded &= ~(is_left_out | of_left_out)
    recorded, near = np.zeros((2, len(spooled.documents)), bool)
    recorded[which], near[which] = is_recorded, found.near
    save_keys(folder, number, spooled.documents["document"], recorded, near, spooled.signatures)


def save_keys(
    folder: Path, number: int, keys: np.ndarray, is_recorded: np.ndarray, near: np.ndarray,
    signatures: Sequence[SignatureFiles] | None,
) -> None:  # fmt: skip
    """Write the keys and signatures of documents that were read, for later calls of alma-prep --extend.

    The keys of removed near copies are written, too, so that exact copies of them are found. Their signatures do not
    count, because a text is removed only if it is similar to a text in the stream. The files are sorted by key, so they
    do not depend on the order in which the sources were read.

    Args:
        folder, number: see `record_documents`.
        keys: the key of each document, a 16-byte hash of its text. NumPy type V16, shape [n].
        is_recorded: bool [n], True for the documents to record.
        near: bool [n], True for near copies.
        signatures: the signature files of the n documents; None if near copies were not searched for.
    """
    which = np.flatnonzero(is_recorded)
    which = which[np.argsort(sortable(keys[which]), kind="stable")]
    folder.mkdir(exist_ok=True)
    files = SignatureFiles(folder / f"{number:04d}")
    with open(f"{files.prefix}.keys", "wb") as file:
        file.write(np.ascontiguousarray(keys[which]).data)
    if signatures is None:
        return
    with open(files.bands, "wb") as file:
        for band in range(NUM_BANDS):
            hashes = np.concatenate([each.load_band(band) for each in signatures])[which]
            hashes[near[which]] = NO_BAND
            file.write(hashes.data)
    _write_sketches(files.sketches, which, signatures)


def _write_sketches(path: Path, which: np.ndarray, signatures: Sequence[SignatureFiles]) -> None:
    """Write the sketches of some documents into one file.

    The documents are in random order, so reading them in this order would read a small piece of a file at a time.
    Instead, the new file is divided into blocks. First, the sketches of each signature file are put into their blocks,
    file by file. Then each block is sorted. So each sketch is read and written twice, and many together.
    """
    counts = [each.num_documents for each in signatures]
    place = np.full(sum(counts), -1, np.int32 if len(which) < 2**31 else np.int64)
    place[which] = np.arange(len(which), dtype=place.dtype)
    ends = _SORTED_ROWS * np.arange(-(-len(which) // _SORTED_ROWS))
    start = 0
    with open(path, "w+b") as file:
        for each, count in zip(signatures, counts, strict=True):
            block_of = place[start : start + count] // _SORTED_ROWS  # negative for documents that are not written
            start += count
            rows = np.argsort(block_of, kind="stable")
            starts = np.searchsorted(block_of[rows], np.arange(len(ends) + 1))
            sketches = each.map_sketches()
            for block in np.flatnonzero(np.diff(starts)).tolist():
                chosen = rows[starts[block] : starts[block + 1]]
                file.seek(SKETCH_BYTES * int(ends[block]))
                file.write(sketches[chosen].data)
                ends[block] += len(chosen)
        for first in range(0, len(which), _SORTED_ROWS):
            # The sketches of a block are in the order of the documents.
            order = np.argsort(which[first : first + _SORTED_ROWS])
            file.seek(SKETCH_BYTES * first)
            stored = np.frombuffer(file.read(SKETCH_BYTES * len(order)), np.uint8).reshape(-1, SKETCH_BYTES)
            found = np.empty_like(stored)
            found[order] = stored
            file.seek(SKETCH_BYTES * first)
            file.write(found.data)


def load_keys(folder: Path, count: int, duplicates: str) -> tuple[np.ndarray, list[SignatureFiles]]:
    """Return the keys and the signature files that `save_keys` wrote for a stream and its extensions.

    Args:
        folder: the stream's folder `dedup`.
        count: 1 plus the number of the stream's extensions. The stream as it was first made and each extension have
            their own files.
        duplicates: the setting `duplicates`: near, exact, or keep. With keep, nothing is loaded.

    Raises:
        PrepError: if `duplicates` needs keys or signatures that the stream lacks, because it was made with
            --duplicates keep (no files) or exact (no signatures).
    """
    if duplicates == "keep":
        return np.empty(0, "V16"), []
    signatures = [SignatureFiles(folder / f"{number:04d}") for number in range(count)]
    for files in signatures:
        # --duplicates keep writes no .keys files, and --duplicates exact writes no .bands files.
        for ending, name, made_with in (("keys", "keys", "keep"), ("bands", "signatures", "exact")):
            if duplicates != made_with and not Path(f"{files.prefix}.{ending}").is_file():
                raise PrepError(
                    f"{folder.parent} was made with --duplicates {made_with}, so the {name} of its documents were not "
                    f"stored: give --duplicates {made_with}, or make the stream again."
                )
    return np.concatenate([np.fromfile(f"{files.prefix}.keys", "V16") for files in signatures]), signatures
