"""Sources of text: list the files of a source, and read the documents in these files.

A source is a set of files with text, for example the Wikipedia dumps in a folder. The kind of a source is the format of
its files. To add a new kind, add a `Kind` object to KINDS.
"""

import glob
import hashlib
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.compression import DamagedFile
from data_prep.errors import PrepError
from data_prep.sources.base import Document, Part, ReportProgress, Skipped, SkippedUnits, SourceFile, no_report
from data_prep.sources.books import BOOKS
from data_prep.sources.common_crawl import COMMON_CRAWL
from data_prep.sources.python_docs import PYTHON_DOCS, module_files, stdlib_root
from data_prep.sources.remote import HUGGING_FACE, is_remote, list_dataset, list_remote, local_part
from data_prep.sources.text import TABLES, TEXT
from data_prep.sources.walk import files_below, paths_matching
from data_prep.sources.wikipedia import WIKIPEDIA
from fairseq_alma.core.errors import SettingError

KINDS = {
    "common-crawl": COMMON_CRAWL,
    "wikipedia": WIKIPEDIA,
    "books": BOOKS,
    "text": TEXT,
    "python-docs": PYTHON_DOCS,
    "hf": HUGGING_FACE,
}


@dataclass(frozen=True)
class Source:
    """A source of text, written as `--source KIND:PATH@SHARE`.

    Raises:
        SettingError: if the kind, the path or the share is invalid.
    """

    kind: str
    path: str = ""
    """A file, a folder, or a pattern such as /data/CC-MAIN-*/*.wet.gz; empty for kinds that need no path.

    It can also be a URL that fsspec reads, such as s3://BUCKET/FOLDER. For the kind `hf`, it is the name of a dataset
    of the Hugging Face Hub."""
    share: float | None = None
    """Fraction of the words in the stream that come from this source.

    None: no share is given. All sources without a share together provide the remaining fraction, in proportion to their
    numbers of words.
    """

    def __post_init__(self):
        if self.kind not in KINDS:
            example = "" if self.path else f" (a source is KIND:PATH, for example text:{self.kind})"
            raise SettingError(f"source kind '{self.kind}' is unknown: use one of {', '.join(KINDS)}{example}")
        if KINDS[self.kind].wants_path and not self.path:
            raise SettingError(f"source '{self.kind}' needs a path: write {self.kind}:PATH")
        if self.path and not KINDS[self.kind].wants_path:
            raise SettingError(f"source '{self}' has a path, but this kind accepts none: write {self.kind}")
        if self.share is not None and not 0 < self.share <= 1:
            raise SettingError(f"source '{self}' has a share of {self.share}: the share must be above 0 and at most 1")

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Return the source that is written as a text such as `text:PATH`, `common-crawl:PATH@0.6` or `python-docs`.

        Raises:
            SettingError: if the kind, the path or the share is invalid.
        """
        kind, _, path = text.partition(":")
        last = path if path else kind
        before, at, share = last.rpartition("@")
        # Do not split the text at the @ if the complete path exists, because the @ is then a part of the path.
        if at and not Path(last).exists():
            try:
                number = float(share)
            except ValueError:
                return cls(kind, path)
            return cls(kind, before, number) if path else cls(before, "", number)
        return cls(kind, path)

    @property
    def name(self) -> str:
        """The text KIND:PATH or KIND that names the source, without its share."""
        return f"{self.kind}:{self.path}" if self.path else self.kind

    def __str__(self):
        return self.name if self.share is None else f"{self.name}@{self.share!r}"


Files = Mapping[Source, Sequence[SourceFile]]
"""Type of a mapping from each source to its files."""


def list_files(source: Source) -> list[SourceFile]:
    """Return the files of a source, sorted by name.

    Raises:
        PrepError: if the source does not exist or has no files of this kind.
    """
    kind, path = KINDS[source.kind], Path(source.path)
    if source.kind == "hf":
        return list_dataset(source.path)
    if not kind.wants_path:
        return _described(module_files(), stdlib_root())
    if is_remote(source.path):
        files = list_remote(source.name, kind, source.path)
        _check_readable(source, [file.name for file in files])
        return files
    if kind.wants_folder and path.exists() and not path.is_dir():
        raise PrepError(f"source {source}: {path} is not a folder, and {source.kind} needs one.")
    found: set[Path] = set()
    for match in _matches(path):
        found.update([file for file in files_below(match) if kind.is_wanted(file.name)] if match.is_dir() else [match])
    if not found and path.is_dir():
        names = [file.name for file in files_below(path)]
        others = [name for name, one in KINDS.items() if one.wants_path and any(map(one.is_wanted, names))]
        hint = f"It has files that {' or '.join(f'{name}:{path}' for name in others)} reads. " if others else ""
        raise PrepError(f"source {source}: {path} contains no {kind.files_are}. {hint}Check the kind and the path.")
    if not found and glob.has_magic(source.path):
        raise PrepError(
            f"source {source}: no file matches this pattern. Check the pattern, and put it in quotes, so that the "
            "shell does not change it."
        )
    if not found:
        raise PrepError(f"source {source}: {path} does not exist. Check the path.")
    _check_readable(source, [file.name for file in found])
    root = path
    while not root.is_dir():  # the folder of a file; the longest part of a pattern that contains no wildcard
        root = root.parent
    return _described(_each_once(found), root)


def _matches(path: Path) -> list[Path]:
    """Return the files and folders that a path or a pattern names."""
    return [path] if path.exists() else paths_matching(str(path))


NOT_READ = "files: not read because of the ending"
"""The beginning of the reasons for which files in the folders of a source are left out (see `endings_left_out`)."""


def endings_left_out(source: Source) -> Counter[str]:
    """Return the endings of the files in the folders of a source that are not read, with the number of files.

    An ending is a text such as ".csv", or ".md, which books: reads" if another kind of source reads these files. Files
    whose names begin with a dot are not counted, and files on other machines are not looked at.
    """
    kind = KINDS[source.kind]
    if not kind.wants_path or source.kind == "hf" or is_remote(source.path):
        return Counter()
    files = {path for match in _matches(Path(source.path)) if match.is_dir() for path in files_below(match)}
    left_out = (path for path in files if not kind.is_wanted(path.name) and not path.name.startswith("."))
    return Counter(_ending_of(path) for path in left_out)


def _ending_of(path: Path) -> str:
    """Return the ending of a file that is not read, see `endings_left_out`."""
    other = next((name for name, kind in KINDS.items() if kind.is_wanted(path.name)), None)
    return (path.suffix.lower() or "none") + (f", which {other}: reads" if other else "")


def _each_once(paths: Iterable[Path]) -> list[Path]:
    """Return paths of files without those that lead to a file of another path through a link to its folder.

    The path without links is kept, otherwise the shortest one.
    """
    real_folders: dict[Path, Path] = {}
    chosen: dict[tuple[Path, str], Path] = {}
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        folder = real_folders.setdefault(path.parent, path.parent.resolve())
        if path.parent == folder or (folder, path.name) not in chosen:
            chosen[folder, path.name] = path
    return sorted(chosen.values())


def _check_readable(source: Source, names: Iterable[str]) -> None:
    """Raise PrepError if a file that the user gave has an ending that this kind of source cannot read."""
    kind = KINDS[source.kind]
    for name in sorted(names):
        if not kind.is_readable(name):
            raise PrepError(
                f"source {source}: it is unknown how to read {name}. The known endings are {kind.endings}. "
                "Rename or convert the file, or link to it under a name with a known ending."
            )


def _described(paths: Sequence[Path], root: Path) -> list[SourceFile]:
    """Return a SourceFile for each path, sorted by name. The name is the path relative to `root`."""
    files = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise PrepError(f"{path} cannot be read ({error.strerror}). Remove it, or make it readable.") from error
        if not stat.S_ISREG(mode := status.st_mode):
            what = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
            raise PrepError(f"{path} is {what}, not a file. Remove it, or write its content to a file.")
        files.append(SourceFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(files, key=lambda file: file.name)


def needed_libraries(source: Source, files: Sequence[SourceFile]) -> set[str]:
    """Return the names of the optional Python libraries that are needed to read these files of a source."""
    endings = {Path(file.name).suffix.lower() for file in files}
    return {*KINDS[source.kind].needs, *(_NEEDED_FOR[ending] for ending in endings & _NEEDED_FOR.keys())}


# The optional library that is needed to read files with each of these endings.
_NEEDED_FOR = {".epub": "resiliparse", ".zst": "zstandard"} | dict.fromkeys(TABLES, "pyarrow")


def fingerprint(files: Sequence[SourceFile]) -> str:
    """Return a digest of the names, sizes and modification times of files. It shows whether a source has changed."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\0{file.mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def split_into_parts(
    source: Source, files: Sequence[SourceFile], part_bytes: int, options: dict[str, str] | None = None
) -> list[Part]:
    """Divide files into parts, which different processes can read at the same time.

    Args:
        source: the source that the files belong to.
        files: the files of the source.
        part_bytes: maximum number of bytes in a part of a file that can be split. Any other file is a single part.
        options: see `Part.options`.
    """
    parts, given = [], tuple(sorted((options or {}).items()))
    for file in files:
        # To find the first article in a part of a bzip2 file, the rest of the file is needed. So download it only once.
        is_split = KINDS[source.kind].splittable(file.name)
        is_split &= not (is_remote(str(file.path)) and file.name.lower().endswith(".bz2"))
        step = part_bytes if is_split else max(1, file.num_bytes)
        for start in range(0, max(1, file.num_bytes), step):
            end = min(start + step, file.num_bytes)
            parts.append(Part(source.kind, str(file.path), file.name, start, end, given))
    return parts


def read_documents_of(part: Part, folder: Path, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield what `read_documents` yields, also for a part of a remote file, see `local_part`."""
    with local_part(part, folder, report_progress) as local:
        yield from read_documents(local, report_progress)


def read_documents(part: Part, report_progress: ReportProgress = no_report) -> Iterator[Document | Skipped]:
    """Yield the documents in one part of a file. For content that is skipped, yield a Skipped object with the reason.

    If the file is damaged, the documents before the damage are yielded.

    Args:
        part: the part of a file to read.
        report_progress: called repeatedly while a long document is read.
    """
    kind = KINDS[part.kind]
    if part.start == part.end:
        if kind.wants_path:  # in the standard library, empty modules are normal
            yield Skipped(part.name, "empty file", damaged=False)
        return
    if Path(part.name).name.startswith("._"):
        with open(part.path, "rb") as file:
            if file.read(4) == _APPLE_DOUBLE:
                yield Skipped(part.name, "a file in which macOS keeps attributes of another file", damaged=False)
                return
    bad = SkippedUnits(part.name, kind.unit)
    try:
        for document in kind.read(part, bad, report_progress):
            yield document if isinstance(document, Skipped) else Document(*map(_encodable, document))
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


_APPLE_DOUBLE = b"\0\5\x16\7"
"""The first bytes of the files ._NAME that macOS writes beside each file NAME on disks and in archives of others."""


def _encodable(text: str) -> str:
    """Return the text with halves of UTF-16 pairs replaced by question marks, because UTF-8 cannot encode them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def merge_skipped(skipped: Iterable[Skipped]) -> list[Skipped]:
    """Merge the Skipped objects of different parts of the same file.

    Return one Skipped object per file and reason, sorted by file name.
    """
    found: dict[tuple[str, str], Skipped] = {}
    for entry in skipped:
        key = (entry.name, entry.why)
        if key in found:
            first = min(found[key], entry, key=lambda one: one.first_byte)
            entry = first._replace(num_units=found[key].num_units + entry.num_units)
        found[key] = entry
    return [found[key] for key in sorted(found)]
