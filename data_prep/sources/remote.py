"""Read sources on other machines through fsspec: paths such as s3://BUCKET/FOLDER, hf://datasets/NAME or file:///DIR.

A part of a file is downloaded to the work folder just before it is read, and removed after it. So any kind of source
can be remote, and the disk only needs space for one part per worker. fsspec needs a library for each protocol, for
example s3fs for s3://.
"""

import hashlib
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.errors import Passing, PrepError
from data_prep.sources.base import MAX_DOCUMENT_BYTES, Kind, Part, ReportProgress, SourceFile
from data_prep.sources.encodings import needs_recoding
from data_prep.sources.text import HEAD_BYTES, LINE_FILES, TEXT

_CHUNK_BYTES = 4 << 20
"""Number of bytes that are downloaded at a time."""
_ATTEMPTS = 4
"""Number of times that a download is tried."""
_WAIT_SECONDS = 2.0
"""Time to wait after the first failed attempt. It doubles with each further attempt."""
# What the file systems of fsspec call the version of a file, the most exact first.
_VERSIONS = (
    "ETag", "etag", "sha256", "blob_id", "oid", "md5Hash", "mtime", "LastModified", "last_modified", "modified",
)  # fmt: skip


def is_remote(path: str) -> bool:
    """Return True if a path is a URL that fsspec reads."""
    return "://" in path


def list_remote(source: str, kind: Kind, path: str) -> list[SourceFile]:
    """Return the files at a URL, sorted by name: a file, all files of the kind below a folder, or those of a pattern.

    The sizes and the versions (ETag or modification time) become part of the fingerprint of the source.

    Args:
        source: the name of the source, for messages.
        kind: the kind of the source.
        path: the URL.

    Raises:
        PrepError: if there are no files, or the file system cannot be reached.
    """
    try:
        system, root = _file_system(path)
        if any(character in root for character in "*?["):
            found, root = system.glob(root, detail=True), re.split(r"[*?\[]", root)[0].rpartition("/")[0]
            for folder in [name for name, info in found.items() if info.get("type") == "directory"]:
                found |= _files_below(kind, system, folder)
        elif system.isfile(root):
            found, root = {root: system.info(root)}, root.rpartition("/")[0]
        else:
            found = _files_below(kind, system, root)
    except PrepError:
        raise
    except Exception as error:  # each file system has its own errors
        raise PrepError(f"source {source} cannot be listed: {_message(error)}") from error
    files = [
        SourceFile(system.unstrip_protocol(name), name[len(root) :].strip("/"), int(info["size"]), _version(info))
        for name, info in found.items()
        if info.get("type") == "file"
    ]
    if not files:
        raise PrepError(f"source {source}: there are no files of this kind. Check the kind and the path.")
    return sorted(files, key=lambda file: file.name)


def _files_below(kind: Kind, system: Any, root: str) -> dict[str, Any]:
    """Return the files of a kind below a folder, at any depth: path -> what the file system says about it."""
    found = system.find(root, detail=True)
    return {name: info for name, info in found.items() if kind.is_wanted(name.rpartition("/")[2])}


def _file_system(path: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:  # ValueError: an unknown protocol
        raise PrepError(
            f"{path} cannot be read: {_message(error)}. URLs need fsspec (pip install 'fairseq-alma[corpora]') and the "
            "library for the protocol, for example s3fs for s3://."
        ) from error


def _version(info: dict) -> int:
    """Return the modification time of a file in nanoseconds, or a number that stands for its version."""
    for name in _VERSIONS:
        value = info.get(name)
        if isinstance(value, int | float) and name == "mtime":
            return round(value * 1e9)
        if value is not None:
            return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:7], "big")
    return 0


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def local_part(part: Part, folder: Path, report_progress: ReportProgress) -> Iterator[Part]:
    """Context manager that yields a part of a local file. If the file is remote, the part is downloaded first.

    The local file has the bytes of the part at the same positions. The bytes before the part are missing, except for
    the first line of a text file. If the last line of the part continues after it, the rest of the line is downloaded,
    too. A file in UTF-16 or UTF-32 belongs to its first part.

    Args:
        part: a part of a local or remote file.
        folder: the folder for the download, which is removed at the end.
        report_progress: called repeatedly during the download.

    Raises:
        Passing: if the file cannot be downloaded.
        PrepError: if the file became shorter.
    """
    if not is_remote(part.path):
        yield part
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="download.") as temporary:
        # Keep the name, because readers look at its ending.
        target = Path(temporary) / Path(part.name).name
        for attempt in range(_ATTEMPTS):
            try:
                _download(part, target, report_progress)
                break
            except PrepError:
                raise
            except Exception as error:  # each file system has its own errors
                if attempt + 1 == _ATTEMPTS:
                    raise Passing(
                        f"{part.path} cannot be downloaded: {_message(error)}. Run the same command again to continue."
                    ) from error
                _wait(_WAIT_SECONDS * 2**attempt, report_progress)
        yield part._replace(path=str(target))


def _wait(seconds: float, report_progress: ReportProgress) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report_progress()
        time.sleep(min(1.0, seconds))


def _download(part: Part, target: Path, report_progress: ReportProgress) -> None:
    """Copy a part of a remote file to a local file."""
    system, path = _file_system(part.path)
    # Readers look at the byte before the part, to know whether a line begins with the part.
    position, end = max(0, part.start - 1), part.end
    with system.open(path, "rb") as source, open(target, "wb") as file:
        last = b""
        if part.name.lower().endswith(LINE_FILES):
            # Readers look at the first line of the file, to know the encoding and whether the file has JSON lines.
            head = b""
            while b"\n" not in head.lstrip() and len(head) < HEAD_BYTES and (content := source.read(1 << 16)):
                head += content
            file.write(head)
            if needs_recoding(head):
                end, last = (0 if part.start else system.size(path)), b"\n"
        source.seek(position)
        file.seek(position)
        while position < end:
            content = source.read(min(_CHUNK_BYTES, end - position))
            if not content:
                raise PrepError(
                    f"{part.path} has become shorter since alma-prep listed it: {position:,} bytes. Restore it, or "
                    "remove the stream folder and run the same command again."
                )
            report_progress()
            file.write(content)
            position += len(content)
            last = content[-1:]
        limit = end + MAX_DOCUMENT_BYTES + 1
        while last != b"\n" and position < limit and (content := source.read(1 << 16)):
            file.write(content)
            position += len(content)
            last = content[-1:] if b"\n" not in content else b"\n"


_DEFAULT_SPLIT = "train"


def list_dataset(path: str) -> list[SourceFile]:
    """Return the Parquet files of a dataset of the Hub, sorted by name.

    Args:
        path: NAME, NAME:CONFIG, NAME::SPLIT or NAME:CONFIG:SPLIT. Without a split, the split train is read. CONFIG can
            be omitted if the dataset has only one.

    Raises:
        PrepError: if there is no such dataset, config or split, or if the Hub stores only its first part as Parquet.
    """
    if path.startswith(("/", ".", "~")):
        raise PrepError(f"source hf:{path}: this is a path, not the name of a dataset of the Hub. Write text:{path}.")
    name, config, split = [*path.split(":"), "", ""][:3]
    split = split or _DEFAULT_SPLIT
    files = list_remote(f"hf:{path}", TEXT, f"hf://datasets/{name}@refs/convert/parquet")
    # The names are CONFIG/SPLIT/0000.parquet, or CONFIG/partial-SPLIT/0000.parquet if only a part was converted.
    folders = sorted({file.name.rpartition("/")[0] for file in files})
    configs = sorted({folder.partition("/")[0] for folder in folders})
    if config not in configs and (config or len(configs) > 1):
        raise PrepError(
            f"source hf:{path}: the dataset has the configs {', '.join(configs)}: write hf:{name}:CONFIG:{split}."
        )
    config = config or configs[0]
    found = [file for file in files if file.name.startswith(f"{config}/{split}/")]
    if found:
        return found
    if f"{config}/partial-{split}" in folders:
        raise PrepError(
            f"source hf:{path}: the Hub stores only the first 5 GB of this split as Parquet. Give the files of the "
            f"dataset itself, for example text:hf://datasets/{name}/FOLDER/*.json.gz."
        )
    splits = [folder.partition("/")[2] for folder in folders if folder.startswith(f"{config}/")]
    raise PrepError(f"source hf:{path}: {config} has no split {split}: use one of {', '.join(splits)}.")


HUGGING_FACE = Kind("Parquet file", TEXT.read, needs=("pyarrow", "huggingface_hub"))
