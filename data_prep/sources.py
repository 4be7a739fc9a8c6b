"""Documents out of sources: which files a source has, and how each kind of file is read.

A new kind of source is one line in KINDS: how its files are listed, and how one file (or part of one)
yields documents.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data_prep import python_docs
from data_prep.errors import PrepError

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One `--source KIND:PATH`. Raises ValueError when the kind is unknown or a path is missing or too many."""

    kind: str
    path: str = ""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"source kind '{self.kind}' is unknown: use one of {', '.join(KINDS)}")
        if KINDS[self.kind].wants_path and not self.path:
            raise ValueError(f"source '{self.kind}' names no path: write {self.kind}:PATH")
        if self.path and not KINDS[self.kind].wants_path:
            raise ValueError(f"source '{self}' takes no path: write {self.kind}")

    @classmethod
    def parse(cls, text: str) -> "Source":
        """`text:PATH`, `books:DIR` or `python-docs`, as written on the command line."""
        kind, _, path = text.partition(":")
        return cls(kind, path)

    def __str__(self):
        return f"{self.kind}:{self.path}" if self.path else self.kind


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
    path: Path
    name: str
    start: int
    end: int


class Skipped(NamedTuple):
    """A file that was left out, or lines of it, and why."""

    name: str
    why: str
    num_lines: int = 0
    """How many lines were left out; 0: the whole file."""
    first_byte: int = 0
    """Where in the file the first of these lines starts."""

    def reason(self) -> str:
        if not self.num_lines:
            return self.why
        lines = "1 line" if self.num_lines == 1 else f"{self.num_lines} lines"
        return f"{lines} {self.why}, the first at byte {self.first_byte}"


def list_files(source: Source) -> list[SourceFile]:
    """The files of a source, sorted by name. Raises PrepError if it is missing, unreadable or has none."""
    kind = KINDS[source.kind]
    root = Path(source.path) if kind.wants_path else python_docs.stdlib_root()
    if not root.exists():
        raise PrepError(f"source {source}: no such file or folder as {root}. Check the path.")
    if root.is_file() and not kind.wants_folder:
        paths, root = [root], root.parent
    elif root.is_dir():
        paths = kind.list_paths(root)
    else:
        raise PrepError(f"source {source}: {root} is not a folder, and {source.kind} wants one.")
    files = []
    for path in paths:
        status = path.stat()
        files.append(SourceFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    if not files:
        raise PrepError(f"source {source}: {root} holds no {kind.files_are}. Check the kind and the path.")
    return sorted(files, key=lambda file: file.name)


def fingerprint(files: list[SourceFile]) -> str:
    """Digest of names, sizes and modification times: tells in a moment whether a source was touched.

    Content is not read: at hundreds of gigabytes that would make "nothing to do" an hour's answer.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def split_into_parts(source: Source, files: list[SourceFile], part_bytes: int) -> list[Part]:
    """One part per file; files of a kind that can be split give one per `part_bytes` bytes."""
    parts = []
    for file in files:
        step = part_bytes if KINDS[source.kind].splittable else max(1, file.num_bytes)
        for start in range(0, max(1, file.num_bytes), step):
            end = min(start + step, file.num_bytes)
            parts.append(Part(source.kind, file.path, file.name, start, end))
    return parts


def read_documents(part: Part) -> Iterator[str | Skipped]:
    """Yield the documents of one part, and for what is left out a Skipped that says why."""
    yield from KINDS[part.kind].read(part)


def merge_skipped(skipped: list[Skipped]) -> list[Skipped]:
    """One entry per file, sorted by name, however many parts the file was read in."""
    by_file: dict[str, Skipped] = {}
    for entry in skipped:
        before = by_file.get(entry.name)
        if before is not None:
            num_lines, first_byte = (
                before.num_lines + entry.num_lines,
                min(before.first_byte, entry.first_byte),
            )
            entry = entry._replace(num_lines=num_lines, first_byte=first_byte)
        by_file[entry.name] = entry
    return [by_file[name] for name in sorted(by_file)]


def _paths_ending_in(*endings: str) -> Callable[[Path], list[Path]]:
    def list_paths(root: Path) -> list[Path]:
        return [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(endings)]

    return list_paths


def _read_lines(part: Part) -> Iterator[str | Skipped]:
    """One document per line that is not blank, without its line end: fairseq's convention.

    A line belongs to the part in which its first byte lies.
    """
    if part.start == part.end:
        yield Skipped(part.name, "empty file")
        return
    num_bad, first_bad = 0, 0
    with open(part.path, "rb") as file:
        position = part.start
        if position > 0:
            # From one byte earlier: if that is a line end, the line that starts here is ours.
            file.seek(position - 1)
            position += len(file.readline()) - 1
        while position < part.end and (line := file.readline()):
            line_start, position = position, position + len(line)
            if line_start == 0:
                line = line.removeprefix(BOM)
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                first_bad = first_bad if num_bad else line_start
                num_bad += 1
                continue
            if text and not text.isspace():
                yield text
    if num_bad:
        yield Skipped(part.name, "not valid UTF-8", num_bad, first_bad)


def _read_whole(part: Part) -> Iterator[str | Skipped]:
    """One document per file."""
    content = part.path.read_bytes().removeprefix(BOM)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield Skipped(part.name, f"not valid UTF-8 at byte {error.start}")
        return
    if text and not text.isspace():
        yield text
    else:
        yield Skipped(part.name, "empty file")


def _read_docstrings(part: Part) -> Iterator[str | Skipped]:
    """One document per module that has docstrings."""
    try:
        text = python_docs.docstrings(part.path.read_bytes())
        text.encode("utf-8")  # a docstring may hold a lone surrogate, which no file can
    except (SyntaxError, ValueError) as error:
        yield Skipped(part.name, f"not readable as Python: {type(error).__name__}")
        return
    if text:
        yield text


@dataclass(frozen=True)
class Kind:
    """How one kind of source is listed and read."""

    files_are: str
    list_paths: Callable[[Path], list[Path]]
    read: Callable[[Part], Iterator[str | Skipped]]
    wants_path: bool = True
    wants_folder: bool = False
    splittable: bool = False
    """Whether `read` can start in the middle of a file."""


KINDS = {
    "text": Kind("*.txt file", _paths_ending_in(".txt"), _read_lines, splittable=True),
    "books": Kind("*.txt or *.md file", _paths_ending_in(".txt", ".md"), _read_whole, wants_folder=True),
    "python-docs": Kind("*.py file", lambda root: python_docs.module_files(), _read_docstrings, wants_path=False),
}
