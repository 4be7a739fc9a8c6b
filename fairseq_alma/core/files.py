"""Write files and folders atomically. Readers never see an incomplete file, even if the writing process is killed."""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.fence import fence_of, held_fences
from fairseq_alma.core.holder import process_start
from fairseq_alma.core.json_types import value_of

_counter = itertools.count()


@contextmanager
def file_named(path: str | Path, temporary: Path | None = None) -> Iterator[None]:
    """Context manager that adds the path of the file that is written to an OSError that names none, as on a full disk.

    `temporary` is another name of the file, which is replaced by `path` in the error.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # If a write fails, torch.save raises a RuntimeError that does not name the cause. The OSError is its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        if cause.errno is not None and cause.filename in (None, str(temporary)):
            cause.filename = str(path)
        raise cause from (None if cause is error else error)


T = TypeVar("T")


@contextmanager
def written_aside(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """Context manager that yields a temporary path and renames it to `path` at the end of the block.

    The block must create a file or a folder at the yielded path. If the block raises an exception, the temporary file
    or folder is removed and `path` is not changed. An existing file at `path` is replaced; an existing folder is an
    error.

    If this process holds a lease of a folder above `path`, the temporary path is inside its fence (see `core.fence`).

    Args:
        path: final path of the file or folder. Missing parent folders are created.
        durable: if True, wait until the disk has stored the data and the rename. If False, the result survives if the
            process is killed, but a power failure may destroy it until `sync_unsynced` is called. Without a lease,
            use False only for results that can be computed again.

    Raises:
        LeaseLostError: if another process has taken over the lease. Then `path` is not changed.
        OSError: if the disk is full, if access is denied, or if a folder already exists at `path`.
    """
    path = Path(path)
    # Almost always, the folder exists. Then this check is faster than mkdir, and a run writes thousands of files.
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    # A file cannot be moved to another disk, to which a link inside a run folder may lead.
    fence = fence_of(path)
    is_fenced = fence is not None and fence.is_on_disk_of(path.parent)
    # Keep the suffix of `path`, because some libraries choose the file format by the suffix, and others append their
    # usual suffix if it is missing.
    name = f".{path.stem}.{os.getpid()}.tmp{path.suffix}"
    temporary = fence.place / f"{next(_counter)}{name}" if fence and is_fenced else path.with_name(name)
    try:
        with file_named(path, temporary):
            yield temporary
            if durable:
                sync(temporary)
            if fence and not is_fenced:
                fence.check()
            os.replace(temporary, path)
    except BaseException as error:
        remove(temporary)
        if fence and isinstance(error, OSError | RuntimeError):  # torch raises a RuntimeError if a folder is missing
            fence.check(error)
        raise
    if durable:
        sync_folder(path.parent)
    elif fence:
        fence.unsynced.add(path.absolute())


def remove(path: Path) -> None:
    """Remove a file, or a folder with everything in it. It need not exist.

    Raise LeaseLostError, and remove nothing, if another process has taken over the lease of a folder above it.
    """
    fence = fence_of(path)
    if fence and fence.place not in path.absolute().parents and fence.is_on_disk_of(path.parent):
        removed = fence.place / f"{next(_counter)}.removed"
        try:
            os.replace(path, removed)
        except FileNotFoundError:
            fence.check()
            return
        path = removed
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_unsynced(but: Collection[str] = ()) -> None:
    """Wait until the disk has stored all files that this process has written with durable=False under its leases.

    A done mark, which says that other files are complete, must be written after this call. It does not wait for files
    with names in `but`.
    """
    for fence in held_fences():
        chosen = {path for path in fence.unsynced if path.name not in but}
        folders: set[Path] = set()
        for path in chosen:
            with suppress(FileNotFoundError):  # it was removed again
                sync(path)
            folders.update(parent for parent in path.parents if parent.is_relative_to(fence.folder))
        for folder in folders:
            with suppress(FileNotFoundError):
                sync_folder(folder)
        fence.unsynced.difference_update(chosen)


def unfinished_files(folder: str | Path) -> list[Path]:
    """Return temporary files and folders in `folder` that `written_aside` left behind, or is just writing.

    Subfolders are not searched.
    """
    return list(Path(folder).glob(".*.tmp*"))


def remove_unfinished(path: Path) -> None:
    """Remove what `written_aside(path)` left behind in other processes that were killed.

    What another process of this machine is still writing stays.
    """
    name = re.compile(re.escape(f".{path.stem}.") + r"(\d+)\.tmp" + re.escape(path.suffix))
    for leftover in unfinished_files(path.absolute().parent):
        found = name.fullmatch(leftover.name)
        if found and (int(found[1]) == os.getpid() or process_start(int(found[1])) is None):
            remove(leftover)


def write_whole(path: str | Path, text: str, durable: bool = True) -> None:
    """Atomically replace the content of the file `path` with `text`. See `written_aside`."""
    with written_aside(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: str | Path, value: Any, durable: bool = True, indent: int = 2) -> None:
    """Atomically replace the content of the file `path` with `value` as indented JSON. See `written_aside`."""
    text = json.dumps(value, indent=indent, ensure_ascii=False) + "\n"
    # The text may contain a path that is not valid UTF-8. In a Python string, the invalid bytes of such a path are
    # characters that cannot be encoded as UTF-8 (lone surrogates). Write these characters as escapes such as \udc80,
    # because otherwise writing the file would fail.
    write_whole(path, text.encode("utf-8", errors="backslashreplace").decode("utf-8"), durable)


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own digest as an additional key, which `read_json` compares and removes."""
    value = json.loads(json.dumps(value))  # so that keys and lists are as they are when the file is read
    return {**value, _SEAL: _digest_of_value(value)}


_SEAL = "sha256_of_this_file"


def _digest_of_value(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raise ValueError if the text is not valid JSON, if an object has a key twice, or if lists are nested too deeply.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object has a key twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


@overload
def read_json(path: str | Path, *, advice: str = ...) -> Any: ...
@overload
def read_json(path: str | Path, kind: type[T], *, advice: str = ...) -> T: ...
def read_json(path: str | Path, kind: Any = Any, *, advice: str = "restore the file or remove it") -> Any:
    """Return the value in a JSON file.

    Args:
        path: the file.
        kind: the declared type of the value (see `fairseq_alma.core.json_types`). For a dataclass, an object of this
            class is returned.
        advice: what the user can do if the file is damaged, for the message.

    Raises:
        RunError: if the file is not valid JSON, if the value does not have the declared type, or if it has changed
            since it was `sealed`. The message contains the path.
    """
    try:
        value = parse_json(Path(path).read_bytes())
        if isinstance(value, dict) and (seal := value.pop(_SEAL, None)) not in (None, _digest_of_value(value)):
            raise RunError(f"{path} is damaged ({_SEAL} is {seal}, expected {_digest_of_value(value)}): {advice}")
    # Catch ValueError, because it is the base class of the two possible errors, JSONDecodeError and UnicodeDecodeError.
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}): {advice}") from error
    try:
        return value_of(value, kind)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): {advice}") from error


def read_text(path: Path, setting: str) -> str:
    """Return the text in a file that `setting` names, with its line ends. Raise SettingError if it is not UTF-8.

    A byte order mark at its beginning is no text.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(f"{setting} is not text in UTF-8 ({error}): convert it") from error


def sha256_of(path: str | Path, on_block: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal. The file is read in blocks to save memory.

    `on_block` is called after each block, because a large file takes minutes.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            on_block()
    return digest.hexdigest()


def sha256_once(path: str | Path) -> str:
    """Return what `sha256_of` returns. This process reads the file only once, as long as nobody replaces it."""
    return _once(sha256_of, str(path), _state_of(path))


def check_zip(path: str | Path) -> None:
    """Compare the checksums of the parts of a zip file, such as a checkpoint: torch does not compare them.

    This process reads the file only once, as long as nobody replaces it. Raise ValueError if a part is damaged, and
    BadZipFile if the file is not a zip file.
    """
    if damaged := _once(_damaged_part, str(path), _state_of(path)):
        raise ValueError(f"the checksum of {damaged} is wrong")


@cache
def _once(compute: Callable[[str], Any], path: str, state: tuple[int, ...]) -> Any:
    return compute(path)


def _state_of(path: str | Path) -> tuple[int, ...]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _damaged_part(path: str) -> str | None:
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def digest_of_code(parts: Sequence[str]) -> str:
    """Return one digest of several Python files in the package `fairseq_alma`. It changes when one of them is edited.

    `parts` are paths of files and folders, relative to the package. Subfolders of a folder are not included.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for part in parts:
        for path in [package / part] if part.endswith(".py") else sorted((package / part).glob("*.py")):
            digest.update(f"{path.relative_to(package)} {sha256_of(path)}".encode())
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until the disk has stored the content of a file, or of a folder with all files and subfolders in it."""
    if path.is_dir():
        for below in path.rglob("*"):
            sync_folder(below) if below.is_dir() else _sync_file(below)
        sync_folder(path)
    else:
        _sync_file(path)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has stored the file names in a folder. Otherwise, a power failure may undo a rename."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Raise the error, unless it is one of the four errors that occur on network file systems without fsync for
        # folders. These file systems store renames in the order in which they were made, so fsync is not needed.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
