"""Writing a file whole or not at all: a reader, or the next process after a kill, never sees half of one."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import RunError


def write_whole(path: str | Path, text: str, durable: bool = True) -> None:
    """Replace `path` by `text` in one step. If durable, the bytes have reached the disk on return.

    What is not durable outlives any kill of the process, but perhaps not a power cut: for what can be computed
    again, and is written more often than a disk likes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def write_json(path: str | Path, value: Any, durable: bool = True) -> None:
    """`write_whole` for a JSON value, indented for people."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A path whose bytes are not UTF-8 reaches us with lone surrogates: in JSON they are spelled as escapes.
    write_whole(path, text.encode("utf-8", errors="backslashreplace").decode("utf-8"), durable)


def read_json(path: str | Path) -> Any:
    """The value in a JSON file of a run folder.

    Raises:
        RunError: it does not parse; the message names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # both JSONDecodeError and UnicodeDecodeError
        raise RunError(f"{path} is not whole JSON ({error}): restore it or remove it") from error


def sha256_of(path: str | Path) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Have the disk take a rename: without it a power cut may undo it, and keep what was written after it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot, and order by themselves. A full or failing disk is told.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
