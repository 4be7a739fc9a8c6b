"""Types that all kinds of sources use: files, parts of files, and records of skipped content."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The UTF-8 byte order mark. Some files begin with it. Readers remove it, because it is not part of the text.
BOM = b"\xef\xbb\xbf"
MAX_DOCUMENT_BYTES = 16 << 20
"""Maximum length of a document in bytes. Longer documents are skipped, to limit the memory of a worker process. For
comparison, the novel War and Peace has 3 MB."""


ReportProgress = Callable[[], None]
"""A function that a reader calls while it reads a long document, to show that the worker process does not hang."""


def no_report() -> None:
    """Do nothing. This is the default ReportProgress function, for callers that do not monitor progress."""


class SourceFile(NamedTuple):
    """An input file of a source: its path, size and modification time."""

    path: Path | str
    """A path; for a file on another machine, its URL (see `remote`)."""
    name: str
    """Path of the file relative to the folder of the source. Messages and stream.json show this path."""
    num_bytes: int
    mtime_ns: int
    """Modification time of the file in nanoseconds. For a file on another machine, a number that stands for its
    version."""


class Part(NamedTuple):
    """A part of a file: the bytes from `start` (included) to `end` (excluded).

    If the file cannot be split, the part is the complete file.
    """

    kind: str
    path: str
    name: str
    start: int
    end: int
    options: tuple[tuple[str, str], ...] = ()
    """Options for reading this kind of source, for example the name of the JSON field with the text."""
    date: int = 0
    """The number (see `dates`) of the date in the path that the user gave; 0 if there is none. Documents without a date
    get it."""

    def option(self, name: str) -> str:
        """Return the value of the option with this name; an empty text if it is not given."""
        return dict(self.options).get(name, "")


class Document(NamedTuple):
    """A document of a source."""

    text: str
    id: str = ""
    """What names the document in its source: the URL of a page, the title of an article, the value of a field of a JSON
    object, or the file name, with the position of the line if the file has several documents."""
    date: str = ""
    """Date of the document as its source writes it, for example 1996-05-08 or 2019-03-25T09:02:11Z; empty if there is
    none."""


class Skipped(NamedTuple):
    """A record of what was skipped in a file: the complete file, everything after damage, or single lines or pages."""

    name: str
    why: str
    """The reason for skipping, as written to stream.json."""
    num_units: int = 0
    """Number of skipped lines, records, pages or rows; 0 if the complete file, or the rest after damage, is skipped."""
    first_byte: int = 0
    """Position in the file of the first unit that was skipped. A unit is a line, record, page or row.

    For lines and records, the position is a byte of the decompressed file. For pages and rows, it is the index of the
    unit, counted from the start of the part of the file that was read.
    """
    unit: str = "line"
    """What `num_units` counts: "line", "record", "page", "row", "chapter" or "document"."""
    damaged: bool = True
    """True if the file counts as damaged; False, for example, if the file is empty or a page exceeds a limit."""
    found: str = ""
    """What the first skipped unit has instead of what was expected, or its name; empty if `why` says everything."""
    by_design: bool = False
    """True for content that is left out by design, such as redirects and pages without text. It is only counted, for
    all files of a source together."""

    def reason(self) -> str:
        """Return the text for stream.json that says how many lines, pages or other units were skipped, and why."""
        if not self.num_units:
            return self.why
        units = f"1 {self.unit}" if self.num_units == 1 else f"{self.num_units} {self.unit}s"
        if self.by_design:
            return f"{units}: {self.why}"
        if self.unit == "document":
            return f"{units}: {self.why} (the first is {self.found})"
        first = f"byte {self.first_byte}" if self.unit in ("line", "record") else f"{self.unit} {self.first_byte + 1}"
        return f"{units}: {self.why} (the first at {first}{self.found and ', ' + self.found})"


@dataclass(frozen=True)
class Kind:
    """A kind of source, such as Wikipedia dumps, with the functions that list and read the files."""

    files_are: str
    """Description of the files for error messages, such as "*.txt file"."""
    read: Callable[[Part, "SkippedUnits", ReportProgress], Iterator[Document | Skipped]]
    """Function that yields the documents in a part of a file that is not empty. It counts the units that it skips in
    the SkippedUnits object. For other skipped content, it yields a Skipped object, or raises DamagedFile at the end."""
    unit: str = "line"
    """What `read` skips, see `Skipped.unit`."""
    wanted: str = r"(?!)"
    """Regular expression that the names of the files of this kind in a folder match. By default, it matches no name."""
    wants_path: bool = True
    """True if a source of this kind is written as KIND:PATH, False if it is written as KIND, without a path."""
    wants_folder: bool = False
    """True if the path of the source must be a folder."""
    splittable: Callable[[str], bool] = lambda name: False
    """Function that accepts a file name and returns True if `read` can start in the middle of this file."""
    is_readable: Callable[[str], bool] = lambda name: True
    """Function that accepts the name of a file that the user gave. It returns False if `read` cannot read the file."""
    endings: str = ""
    """The endings of the files that `read` can read, for error messages."""
    needs: tuple[str, ...] = ()
    """Libraries that `read` imports. They are installed with the optional dependencies `[corpora]`."""

    def is_wanted(self, name: str) -> bool:
        """Return True if a file with this name, in a folder, is of this kind."""
        return re.search(self.wanted, name, re.IGNORECASE) is not None


class SkippedUnits:
    """Counts how many lines, records, pages or rows (units) of one file are skipped, separately for each reason.

    Iterating over a SkippedUnits object yields one Skipped object per reason.

    Args:
        name: name of the file.
        unit: what is counted; see `Skipped.unit`.
    """

    def __init__(self, name: str, unit: str):
        self._name, self._unit = name, unit
        self._found: dict[str, Skipped] = {}

    def add(self, why: str, position: int, found: str = "", damaged: bool = True) -> None:
        """Count one line, record, page or row that is skipped.

        Args:
            why: the reason for skipping it.
            position: position in the file; see `Skipped.first_byte`.
            found: what it has instead of what was expected; see `Skipped.found`.
            damaged: True if the file counts as damaged; see `Skipped.damaged`.
        """
        before = self._found.get(why, Skipped(self._name, why, 0, position, self._unit, damaged, found))
        self._found[why] = before._replace(num_units=before.num_units + 1)

    def drop(self, why: str, count: int = 1, unit: str = "") -> None:
        """Count units that are left out by design (`Skipped.by_design`), for the reason `why`.

        Args:
            why: the reason.
            count: how many there are.
            unit: what is counted, if it is not the unit of this object.
        """
        before = self._found.get(why, Skipped(self._name, why, unit=unit or self._unit, damaged=False, by_design=True))
        if count:
            self._found[why] = before._replace(num_units=before.num_units + count)

    def __iter__(self) -> Iterator[Skipped]:
        return iter(self._found.values())
