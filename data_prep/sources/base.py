"""What every kind of source speaks in: files, the parts that one task reads, and what had to be set aside."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"
MAX_DOCUMENT_BYTES = 16 << 20
"""A longer document is set aside: War and Peace has 3 MB. It bounds what a worker holds in memory."""


class SourceFile(NamedTuple):
    """A file of a source."""

    path: Path
    name: str
    """Its path inside the source: what messages and stream.json call it."""
    num_bytes: int
    mtime_ns: int


class Part(NamedTuple):
    """What one task reads: bytes start..end of a file, the whole of it unless its kind can be split."""

    kind: str
    path: str
    name: str
    start: int
    end: int
    options: tuple[tuple[str, str], ...] = ()
    """Of the kind, such as the name of the text field."""

    def option(self, name: str) -> str:
        return dict(self.options)[name]


class Skipped(NamedTuple):
    """What was set aside of a file: all of it, what comes after some damage, or lines, records, pages; and why."""

    name: str
    why: str
    num_units: int = 0
    """How many lines, records, pages were left out; 0: the whole file, or all that comes after the damage."""
    first_byte: int = 0
    """Where in the file the first of these lies; with compressed files, of what comes out."""
    unit: str = "line"
    damaged: bool = True
    """Whether it counts as bad: an empty file does not."""

    def reason(self) -> str:
        if not self.num_units:
            return self.why
        units = f"1 {self.unit}" if self.num_units == 1 else f"{self.num_units} {self.unit}s"
        return f"{units} {self.why}, the first at byte {self.first_byte}"


@dataclass(frozen=True)
class Kind:
    """How one kind of source is listed and read."""

    files_are: str
    list_paths: Callable[[Path], list[Path]]
    read: Callable[[Part], Iterator[str | Skipped]]
    wants_path: bool = True
    wants_folder: bool = False
    splittable: Callable[[str], bool] = lambda name: False
    """Whether `read` can start in the middle of a file of this name."""
    needs: tuple[str, ...] = ()
    """What it imports of the extra `corpora`."""


class SkippedUnits:
    """Counts the lines, records or pages of one file that could not be read, by reason."""

    def __init__(self, name: str, unit: str):
        self._name, self._unit = name, unit
        self._found: dict[str, Skipped] = {}

    def add(self, why: str, position: int) -> None:
        before = self._found.get(why, Skipped(self._name, why, 0, position, self._unit))
        self._found[why] = before._replace(num_units=before.num_units + 1)

    def __iter__(self) -> Iterator[Skipped]:
        return iter(self._found.values())
