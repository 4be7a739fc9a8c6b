"""Documents out of sources: which files a source has, and how each kind of file is read.

A new kind of source is one line in KINDS: how its files are listed, and how one file (or part of one)
yields documents.
"""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.sources.base import Kind, Part, Skipped, SourceFile
from data_prep.sources.books import BOOKS
from data_prep.sources.common_crawl import COMMON_CRAWL
from data_prep.sources.python_docs import PYTHON_DOCS, stdlib_root
from data_prep.sources.text import TEXT
from data_prep.sources.wikipedia import WIKIPEDIA

__all__ = [
    "KINDS", "Kind", "Part", "Skipped", "Source", "SourceFile",
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
    """One `--source KIND:PATH@SHARE`. Raises ValueError when the kind is unknown, a path or the share wrong."""

    kind: str
    path: str = ""
    """A file, a folder, or a pattern such as /data/CC-MAIN-*/*.wet.gz."""
    share: float | None = None
    """Of the words of the stream; None: what is there, in proportion."""

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
        """`text:PATH`, `common-crawl:PATH@0.6` or `python-docs`, as written on the command line."""
        kind, _, path = text.partition(":")
        holder = path if path else kind
        before, at, share = holder.rpartition("@")
        if at and not Path(holder).exists():  # a folder may have an @ in its name
            try:
                number = float(share)
            except ValueError:
                return cls(kind, path)
            return cls(kind, before, number) if path else cls(before, "", number)
        return cls(kind, path)

    @property
    def name(self) -> str:
        """Without the share."""
        return f"{self.kind}:{self.path}" if self.path else self.kind

    def __str__(self):
        return self.name if self.share is None else f"{self.name}@{self.share!r}"


def list_files(source: Source) -> list[SourceFile]:
    """The files of a source, sorted by name. Raises PrepError if it is missing, unreadable or has none."""
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
        raise PrepError(f"source {source}: {root} is not a folder, and {source.kind} wants one.")
    if not paths:
        raise PrepError(f"source {source}: {root} holds no {kind.files_are}. Check the kind and the path.")
    return _described(paths, root)


def _list_pattern(source: Source, kind: Kind) -> list[SourceFile]:
    """The files that match, and those of the kind in folders that match. Named from the last folder without magic."""
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
    files = []
    for path in paths:
        status = path.stat()
        files.append(SourceFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(files, key=lambda file: file.name)


def needed_libraries(source: Source, files: Sequence[SourceFile]) -> set[str]:
    """What reading these files imports beyond the base installation."""
    needed = set(KINDS[source.kind].needs)
    for file in files:
        needed.update(_NEEDED_FOR.get(Path(file.name).suffix.lower(), ()))
    return needed


_NEEDED_FOR = {".epub": ("ebooklib", "resiliparse"), ".parquet": ("pyarrow",), ".zst": ("zstandard",)}


def fingerprint(files: Sequence[SourceFile]) -> str:
    """Digest of names, sizes and modification times: tells in a moment whether a source was touched.

    Content is not read: at hundreds of gigabytes that would make "nothing to do" an hour's answer.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def split_into_parts(
    source: Source, files: Sequence[SourceFile], part_bytes: int, options: dict[str, str] | None = None
) -> list[Part]:
    """One part per file; files of a kind that can be split give one per `part_bytes` bytes."""
    parts = []
    for file in files:
        step = part_bytes if KINDS[source.kind].splittable(file.name) else max(1, file.num_bytes)
        for start in range(0, max(1, file.num_bytes), step):
            end = min(start + step, file.num_bytes)
            given = tuple(sorted((options or {}).items()))
            parts.append(Part(source.kind, str(file.path), file.name, start, end, given))
    return parts


def read_documents(part: Part) -> Iterator[str | Skipped]:
    """Yield the documents of one part, and for what is left out a Skipped that says why."""
    for document in KINDS[part.kind].read(part):
        if isinstance(document, str) and not document.isascii():
            try:
                document.encode("utf-8")
            except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
                document = document.encode("utf-8", "replace").decode("utf-8")
        yield document


def merge_skipped(skipped: Sequence[Skipped]) -> list[Skipped]:
    """One entry per file and reason, sorted by name, however many parts the file was read in."""
    found: dict[tuple[str, str], Skipped] = {}
    for entry in skipped:
        key = (entry.name, entry.why)
        before = found.get(key)
        if before is not None:
            num_units, first_byte = before.num_units + entry.num_units, min(before.first_byte, entry.first_byte)
            entry = entry._replace(num_units=num_units, first_byte=first_byte)
        found[key] = entry
    return [found[key] for key in sorted(found)]
