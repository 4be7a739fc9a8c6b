"""Sources of text: list the files of a source, and read documents out of each kind of file.

A new kind of source is one line in KINDS: a function that lists its files, and one that reads the documents of a file
or of a part of a file.
"""

import glob
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.sources.base import Kind, Part, ReportProgress, Skipped, SourceFile, no_report
from data_prep.sources.books import BOOKS
from data_prep.sources.common_crawl import COMMON_CRAWL
from data_prep.sources.python_docs import PYTHON_DOCS, stdlib_root
from data_prep.sources.text import TEXT
from data_prep.sources.wikipedia import WIKIPEDIA

__all__ = [
    "KINDS", "Files", "Kind", "Part", "Skipped", "Source", "SourceFile",
    "fingerprint", "list_files", "merge_skipped", "needed_libraries", "read_documents", "split_into_parts",
]  # fmt: skip

KINDS = {
    "common-crawl": COMMON_CRAWL,
    "wikipedia": WIKIPEDIA,
    "books": BOOKS,
    "text": TEXT,
    "python-docs": PYTHON_DOCS,
}


@dataclass(frozen=True)
class Source:
    """A source of text, as `--source KIND:PATH@SHARE` gives it. Raises ValueError if one of the three is wrong."""

    kind: str
    path: str = ""
    """A file, a folder, or a pattern such as /data/CC-MAIN-*/*.wet.gz; empty for a kind without a path."""
    share: float | None = None
    """Fraction of the words of the stream that the source provides; None: in proportion to its size."""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"source kind '{self.kind}' is unknown: use one of {', '.join(KINDS)}")
        if KINDS[self.kind].wants_path and not self.path:
            raise ValueError(f"source '{self.kind}' names no path: write {self.kind}:PATH")
        if self.path and not KINDS[self.kind].wants_path:
            raise ValueError(f"source '{self}' takes no path: write {self.kind}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"source '{self}' has a share of {self.share}: it must be above 0 and at most 1")

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Return the source that the command line gives as `text:PATH`, `common-crawl:PATH@0.6` or `python-docs`."""
        kind, _, path = text.partition(":")
        last = path if path else kind
        before, at, share = last.rpartition("@")
        if at and not Path(last).exists():  # a folder may have an @ in its name
            try:
                number = float(share)
            except ValueError:
                return cls(kind, path)
            return cls(kind, before, number) if path else cls(before, "", number)
        return cls(kind, path)

    @property
    def name(self) -> str:
        """KIND:PATH, or KIND: the source without its share."""
        return f"{self.kind}:{self.path}" if self.path else self.kind

    def __str__(self):
        return self.name if self.share is None else f"{self.name}@{self.share!r}"


Files = Mapping[Source, Sequence[SourceFile]]
"""The files of each source."""


def list_files(source: Source) -> list[SourceFile]:
    """Return the files of a source, sorted by name.

    Raises:
        PrepError: the source does not exist or has no files of its kind.
    """
    kind = KINDS[source.kind]
    root = Path(source.path) if kind.wants_path else stdlib_root()
    if not root.exists() and glob.has_magic(source.path):
        return _list_pattern(source, kind)
    if not root.exists():
        raise PrepError(f"source {source}: no such file or folder as {root}. Check the path.")
    if root.is_file() and not kind.wants_folder:
        paths, root = [root], root.parent
    elif root.is_dir():
        paths = kind.list_paths(root)
    else:
        raise PrepError(f"source {source}: {root} is not a folder, and {source.kind} needs one.")
    if not paths:
        raise PrepError(f"source {source}: {root} holds no {kind.files_are}. Check the kind and the path.")
    return _described(paths, root)


def _list_pattern(source: Source, kind: Kind) -> list[SourceFile]:
    """Return the files that match a pattern, and the files of the kind in folders that match it.

    They are named relative to the last folder of the path without a wildcard.
    """
    root = Path(source.path)
    while glob.has_magic(str(root)):
        root = root.parent
    found: set[Path] = set()
    for match in map(Path, glob.glob(source.path, recursive=True)):  # noqa: PTH207, it may be absolute
        found.update(kind.list_paths(match) if match.is_dir() else [match])
    if not found:
        raise PrepError(f"source {source}: no file matches. Check the pattern, and put it between quotes.")
    return _described(sorted(found), root)


def _described(paths: Sequence[Path], root: Path) -> list[SourceFile]:
    """Return files with their names relative to `root`, sizes and times, sorted by name."""
    files = []
    for path in paths:
        status = path.stat()
        files.append(SourceFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(files, key=lambda file: file.name)


def needed_libraries(source: Source, files: Sequence[SourceFile]) -> set[str]:
    """Return the libraries outside the base installation that are needed to read these files."""
    needed = set(KINDS[source.kind].needs)
    for file in files:
        needed.update(_NEEDED_FOR.get(Path(file.name).suffix.lower(), ()))
    return needed


_NEEDED_FOR = {".epub": ("ebooklib", "resiliparse"), ".parquet": ("pyarrow",), ".zst": ("zstandard",)}


def fingerprint(files: Sequence[SourceFile]) -> str:
    """Return a digest of the names, sizes and modification times of files: it changes when a source is changed.

    The content is not read: with hundreds of gigabytes, finding out that there is nothing to do would take an hour.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def split_into_parts(
    source: Source, files: Sequence[SourceFile], part_bytes: int, options: dict[str, str] | None = None
) -> list[Part]:
    """Divide files into parts: one per file, or one per `part_bytes` bytes of a file that can be split.

    Args:
        source: the source of the files.
        files: its files.
        part_bytes: bytes per part.
        options: options of the kind of source, such as the name of the text field.
    """
    parts = []
    for file in files:
        step = part_bytes if KINDS[source.kind].splittable(file.name) else max(1, file.num_bytes)
        for start in range(0, max(1, file.num_bytes), step):
            end = min(start + step, file.num_bytes)
            given = tuple(sorted((options or {}).items()))
            parts.append(Part(source.kind, str(file.path), file.name, start, end, given))
    return parts


def read_documents(part: Part, report_progress: ReportProgress = no_report) -> Iterator[str | Skipped]:
    """Yield the documents of one part, and a Skipped with the reason for everything that is left out.

    Args:
        part: the part to read.
        report_progress: called while a long document is read.
    """
    for document in KINDS[part.kind].read(part, report_progress):
        if isinstance(document, str) and not document.isascii():
            try:
                document.encode("utf-8")
            except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
                document = document.encode("utf-8", "replace").decode("utf-8")
        yield document


def merge_skipped(skipped: Sequence[Skipped]) -> list[Skipped]:
    """Merge the entries of the parts of each file: return one entry per file and reason, sorted by name."""
    found: dict[tuple[str, str], Skipped] = {}
    for entry in skipped:
        key = (entry.name, entry.why)
        before = found.get(key)
        if before is not None:
            num_units, first_byte = before.num_units + entry.num_units, min(before.first_byte, entry.first_byte)
            entry = entry._replace(num_units=num_units, first_byte=first_byte)
        found[key] = entry
    return [found[key] for key in sorted(found)]
