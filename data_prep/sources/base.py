"""The types that every kind of source uses: files, parts of files, and records of what was skipped."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"
MAX_DOCUMENT_BYTES = 16 << 20
"""Longer documents are skipped: this bounds the memory of a worker. War and Peace has 3 MB."""


ReportProgress = Callable[[], None]
"""A function that a reader calls while it works on a long document, so that its worker does not count as hung."""


def no_report() -> None:
    """Report no progress: the default where nobody watches."""


class SourceFile(NamedTuple):
    """A file of a source."""

    path: Path
    name: str
    """Its path inside the source, which messages and stream.json use."""
    num_bytes: int
    mtime_ns: int


class Part(NamedTuple):
    """Bytes start..end of a file. It is the whole file unless files of its kind can be split."""

    kind: str
    path: str
    name: str
    start: int
    end: int
    options: tuple[tuple[str, str], ...] = ()
    """Options of the kind of source, such as the name of the text field."""

    def option(self, name: str) -> str:
        """Return the value of an option."""
        return dict(self.options)[name]


class Skipped(NamedTuple):
    """A record of what was skipped in a file: all of it, all after some damage, or some lines, records or pages."""

    name: str
    why: str
    """The reason, which stream.json shows."""
    num_units: int = 0
    """Number of skipped lines, records or pages; 0: the whole file, or everything after the damage."""
    first_byte: int = 0
    """Position of the first of these in the file; in a compressed file, in its decompressed content."""
    unit: str = "line"
    damaged: bool = True
    """True if it counts as damage: an empty file does not."""

    def reason(self) -> str:
        """Return the reason with the number of units, as stream.json shows it."""
        if not self.num_units:
            return self.why
        units = f"1 {self.unit}" if self.num_units == 1 else f"{self.num_units} {self.unit}s"
        return f"{units} {self.why}, the first at byte {self.first_byte}"


@dataclass(frozen=True)
class Kind:
    """A kind of source: how its files are listed and read."""

    files_are: str
    """Description of its files for error messages, such as "*.txt file"."""
    list_paths: Callable[[Path], list[Path]]
    """Returns the files of this kind below a folder."""
    read: Callable[[Part, ReportProgress], Iterator[str | Skipped]]
    """Yields the documents of a part, and a Skipped for everything that is left out."""
    wants_path: bool = True
    """True if the source is written as KIND:PATH, False if as KIND."""
    wants_folder: bool = False
    """True if the path must be a folder."""
    splittable: Callable[[str], bool] = lambda name: False
    """Returns True if `read` can start in the middle of a file of this name."""
    needs: tuple[str, ...] = ()
    """Libraries of the extra `corpora` that it imports."""


class SkippedUnits:
    """A count of the lines, records or pages of one file that could not be read, by reason."""

    def __init__(self, name: str, unit: str):
        self._name, self._unit = name, unit
        self._found: dict[str, Skipped] = {}

    def add(self, why: str, position: int) -> None:
        """Count one more unit that is skipped for this reason."""
        before = self._found.get(why, Skipped(self._name, why, 0, position, self._unit))
        self._found[why] = before._replace(num_units=before.num_units + 1)

    def __iter__(self) -> Iterator[Skipped]:
        return iter(self._found.values())
