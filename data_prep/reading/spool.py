"""The spool: a folder of plain files (spool files) with the text of all documents that pass cleaning.

Beside each spool file, a file describes its documents (`index.SPOOLED`): the digest and the position of the text, and
the number of words. `read.make_entries` makes their index entries from it.

With the spool, each source (for example a folder with compressed files) is read only once. Later steps can read any
document or passage by file and byte offset, in any order, without keeping the corpus in memory.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.cleaning.cleaner import TOO_SLOW, UNREADABLE, Cleaner, Cleaning
from data_prep.errors import PrepError
from data_prep.reading.facts import ids_writer
from data_prep.reading.index import SPOOLED
from data_prep.reading.provenance import reading_digest
from data_prep.reading.signatures import SignatureFiles, Signer
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Task
from data_prep.sources import Document, Part, Skipped, merge_skipped, read_documents_of
from data_prep.sources.dates import UNDATED, parse_date
from data_prep.sources.remote import is_remote
from data_prep.words import count_words

_UNDATED_SHOWN = 3
"""Number of documents without a date that the result of a task names."""


@dataclass
class Counts:
    """Counts of documents, words and bytes of text, as entries of the result of a `SpoolTask`.

    What was read is what was written and removed, and what changes took away.
    """

    files: dict[str, list[int]] = field(default_factory=dict)
    """Name of each input file -> the numbers of documents, words and bytes that were read from it."""
    removed: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> the same numbers for what was removed."""
    changed: dict[str, list[int]] = field(default_factory=dict)
    """What changed text -> the number of documents that were changed, and of the words and bytes that they lost."""
    skipped: list[Skipped] = field(default_factory=list)
    undated: list[list[str]] = field(default_factory=list)
    """Id and date of some of the documents that were removed because of their date."""
    with_fields: list[int] = field(default_factory=lambda: [0, 0])
    """Number of documents with an id and with a date of their own. Otherwise, the id is the file name with a position,
    and the date is that of the file."""

    def read(self, part: Part, document: Document, num_words: int, num_bytes: int) -> None:
        """Count a document that was read from a part of a file."""
        _add(self.files, part.name, 1, num_words, num_bytes)
        self.with_fields[0] += not document.id.startswith(f"{part.name}:")
        self.with_fields[1] += document.date != ""

    def remove(self, part: Part, document: Document, reason: str, num_words: int, num_bytes: int) -> None:
        """Count a document that is removed. It is named if the cleaning could not read it, or not in time."""
        _add(self.removed, reason, 1, num_words, num_bytes)
        if reason in (UNREADABLE, TOO_SLOW):
            name = document.id or part.name
            self.skipped.append(Skipped(part.name, reason, 1, unit="document", damaged=False, found=name))


def _add(counts: dict[str, list[int]], key: str, *more: int) -> None:
    """Add numbers to those of a key, in place."""
    counts[key] = [count + added for count, added in zip(counts.get(key, [0] * len(more)), more, strict=True)]


def added(counted: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the sums of the numbers in several mappings, by key."""
    totals: dict[str, list[int]] = {}
    for counts in counted:
        for key, numbers in counts.items():
            _add(totals, key, *numbers)
    return totals


NO_DATE = "no date"
UNREADABLE_DATE = "unreadable date"
FUTURE_DATE = "date in the future"
"""The reasons for which a chronological stream leaves out documents."""
NO_LIMIT = 10**14
"""A number that is larger than each date."""
READ_BYTES = 64 << 20
"""Approximate number of bytes of text to read at a time with `read_texts`. The larger this number, the more passages
are read from a spool file each time that the file is opened. In memory, a text can take four times its bytes."""


def text_path(folder: Path, shard: int) -> Path:
    """Return the path of a spool file, which contains the text of documents one after another."""
    return folder / f"{shard:06d}.text"


def stamp_of(states: Iterable[tuple[int, int]]) -> str:
    """Return a digest of the sizes in bytes and the modification times in nanoseconds of files."""
    return hashlib.sha256(repr(list(states)).encode()).hexdigest()


@dataclass(frozen=True)
class SpoolTask(Task):
    """Task that reads parts of a source's files, and writes the documents that pass cleaning into one spool file.

    The fields contain everything that the files of the task depend on, and nothing else: no seed, no share, and no
    number of the task. So the files can be used again by each call of alma-prep that reads these parts in the same way.

    The task checks that it has read what it describes: jobs of a cluster start hours after the files were listed, and
    import the code anew.

    The task writes these files.
        PREFIX.text: the spool file, which contains the text of the documents.
        PREFIX.documents.npy: the description (`index.SPOOLED`) of each document in the spool file.
        PREFIX.ids.arrow: the id of each document in the spool file (see `facts`).
        PREFIX.bands, PREFIX.sketches and PREFIX.anchors, only if `sign` is True: the signature of each document in the
            spool file (see `signatures`).

    The result of the task contains the fields of `Counts`, the latest date, and the number of documents that were
    written.
    """

    parts: list[Part]
    """The parts of files to read. All parts are of one source, and their paths are absolute."""
    cleaning: Cleaning | None
    """The rules that documents must pass; None: all documents pass."""
    stamp: str
    """Digest of the sizes and modification times of the input files (`stamp_of`)."""
    versions: str
    """Digest of the versions of the libraries and of the code that reads documents (`provenance.reading_digest`)."""
    sign: bool
    """Whether to compute signatures, which are used to find near-duplicates."""
    needs_date: bool = False
    """Whether documents without a date are left out."""
    latest_date: int = NO_LIMIT
    """Documents with a later date (see `dates`) are left out."""

    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        if reading_digest() != self.versions:
            raise PrepError(
                "the libraries or the code that reads documents were changed while alma-prep was running. Do not "
                "change the Python environment during a run. Run the same command again: it reads all documents with "
                "the same code."
            )
        try:
            with heartbeat.computing():  # a document of 16 MB can take minutes
                result = self._read(prefix, heartbeat)
        except OSError:
            self._check_files()  # a file that was removed cannot be opened
            raise
        self._check_files()
        return result

    def _check_files(self) -> None:
        """Raise PrepError if an input file has changed since it was listed. Files on other machines are not checked."""
        if any(is_remote(part.path) for part in self.parts):
            return
        states: dict[str, os.stat_result] = {}
        for part in self.parts:
            try:
                states[part.path] = Path(part.path).stat()
            except FileNotFoundError as error:
                raise PrepError(
                    f"{part.path} was removed while alma-prep was running. Restore it, or run the same command again "
                    "to read without it."
                ) from error
        if stamp_of((states[part.path].st_size, states[part.path].st_mtime_ns) for part in self.parts) != self.stamp:
            newest = max(states, key=lambda path: states[path].st_mtime_ns)
            others = f" (or another one of the {len(states)} files of this task)" if len(states) > 1 else ""
            raise PrepError(
                f"{newest}{others} was changed while alma-prep was running. Run the same command again when the files "
                "no longer change: it reads the changed files again."
            )

    def _read(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        cleaner = Cleaner(self.cleaning or Cleaning())
        counts, rows, offset, last_date = Counts(), bytearray(), 0, 0
        counts.files.update({part.name: [0, 0, 0] for part in self.parts})
        signing = Signer(SignatureFiles(prefix)) if self.sign else nullcontext()
        with open(f"{prefix}.text", "wb") as file, ids_writer(prefix) as add_id, signing as signer:
            for number, part in enumerate(self.parts):
                heartbeat.beat(part.name)
                for document in read_documents_of(part, prefix.parent, heartbeat.beat):
                    heartbeat.beat()
                    if isinstance(document, Skipped):
                        counts.skipped.append(document)
                        continue
                    content = document.text.encode("utf-8")
                    num_words = count_words(document.text, content)
                    counts.read(part, document, num_words, len(content))
                    text, reason, changes = cleaner.clean(document, content)
                    date = date_of(document, part)
                    if not reason and (reason := self._date_reason(document, date)):
                        counts.undated = [*counts.undated, [document.id or part.name, document.date]][:_UNDATED_SHOWN]
                    if reason:
                        counts.remove(part, document, reason, num_words, len(content))
                        continue
                    for change, *fewer in changes:
                        _add(counts.changed, change, 1, *fewer)
                    if changes:
                        content = text.encode("utf-8")
                        num_words = count_words(text, content)
                    # Identify a document by its text, because the stream must not depend on file names and their order.
                    identity = hashlib.sha256(content).digest()
                    row = (identity, offset, number, len(content), num_words, date, add_id(document.id))
                    rows += np.array(row, SPOOLED).tobytes()
                    last_date = max(last_date, date)
                    if signer:
                        signer.add(text)
                    offset += file.write(content)
        documents = np.frombuffer(rows, SPOOLED)
        np.save(f"{prefix}.documents.npy", documents)
        counts.skipped = merge_skipped(counts.skipped)
        return vars(counts) | {"last_date": last_date, "documents": len(documents)}

    def _date_reason(self, document: Document, date: int) -> str | None:
        """Return the reason to remove a document because of its date; None: keep it."""
        if date > self.latest_date:
            return FUTURE_DATE
        if self.needs_date and date == UNDATED:
            return UNREADABLE_DATE if document.date else NO_DATE
        return None


def date_of(document: Document, part: Part) -> int:
    """Return the date (see `dates`) of a document, or else that in the path of its file; UNDATED if there is none."""
    return parse_date(document.date) if document.date else part.date


def read_text(folder: Path, entry: np.void) -> str:
    """Return the text of one document or passage.

    Args:
        folder: the spool folder, which contains plain text files.
        entry: the index entry (`index.ENTRY`) of the document or passage. It gives the file and the position.
    """
    return read_range(folder, int(entry["shard"]), int(entry["offset"]), int(entry["num_bytes"]))


def read_texts(folder: Path, entries: np.ndarray, beat: Callable[[], None]) -> list[str]:
    """Return the texts of many documents or passages, in the order of `entries`. See `read_text` for the arguments.

    The spool files are read one after another, each from its start to its end, because passages are in random order.
    `beat` is called before each text is read.
    """
    entries, texts = np.asarray(entries), [""] * len(entries)  # a memory-mapped array is slower
    for number in np.lexsort((entries["offset"], entries["shard"])).tolist():
        beat()
        texts[number] = read_text(folder, entries[number])
    return texts


def read_range(folder: Path, shard: int, offset: int, num_bytes: int) -> str:
    """Return the text in spool file number `shard` that begins at the byte `offset`."""
    return _read(_open_shard(folder, shard), offset, num_bytes)


def _read(file: BinaryIO, offset: int, num_bytes: int) -> str:
    file.seek(offset)
    return file.read(num_bytes).decode("utf-8")


# Keep spool files open, because passages are read in random order. 128 files are fewer than systems usually allow.
# Python closes a file when the cache drops it.
@functools.lru_cache(maxsize=128)
def _open_shard(folder: Path, shard: int) -> BinaryIO:
    return open(text_path(folder, shard), "rb")
