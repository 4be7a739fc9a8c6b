"""Write files and folders so that a reader, or the next process after a kill, never sees half of one."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import RunError


@contextmanager
def written_aside(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`; when the block ends, rename what was written there to `path`.

    The block writes a file, or makes a folder, at the yielded path. If the block raises, the temporary file or
    folder is removed and `path` stays as it was. The rename replaces a file; a folder must not exist yet.

    Args:
        path: the final place. Its parent folders are created.
        durable: if True, the bytes and the rename have reached the disk on return. If False, the result survives
            a kill of the process, but perhaps not a power cut: for results that can be computed again.

    Raises:
        OSError: no space, no access, or a folder that exists already.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays: some writers choose the format by it, others append the one they expect.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def unfinished_files(folder: str | Path, name: str = "*") -> list[Path]:
    """Return the temporary files and folders that processes killed inside `written_aside` left in a folder.

    Args:
        folder: where to look.
        name: the final name of a file or folder; by default every name.
    """
    return list(Path(folder).glob(f".{Path(name).stem}.*.tmp*"))


def write_whole(path: str | Path, text: str, durable: bool = True) -> None:
    """Replace the content of `path` by `text` in one step. See `written_aside` for `durable` and errors."""
    with written_aside(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: str | Path, value: Any, durable: bool = True) -> None:
    """Replace the content of `path` by a JSON value, indented for people. See `written_aside` for `durable`."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Python represents a path that is not UTF-8 by lone surrogates. JSON stores them as escapes.
    write_whole(path, text.encode("utf-8", errors="backslashreplace").decode("utf-8"), durable)


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        RunError: the file is not valid JSON; the message names it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # both JSONDecodeError and UnicodeDecodeError
        raise RunError(f"{path} is not whole JSON ({error}): restore it or remove it") from error


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal. Reads one megabyte at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Make the disk store the content of a file, or of every file and folder below a folder."""
    if path.is_dir():
        for below in path.rglob("*"):
            sync_folder(below) if below.is_dir() else _sync_file(below)
        sync_folder(path)
    else:
        _sync_file(path)


def sync_folder(folder: Path) -> None:
    """Make the disk store the names in a folder. Without it, a power cut may undo a rename."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep the order themselves. Other errors are real.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
