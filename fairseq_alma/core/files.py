"""Writing a file whole or not at all: a reader, or the next process after a kill, never sees half of one."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, text: str) -> None:
    """Replace `path` by `text` in one step. On return the bytes have reached the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """`write_whole` for a JSON value, indented for people."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises ValueError that names the file when it does not parse."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # both JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{path} is not whole JSON ({error}): restore it or remove it") from error


def sha256_of(path: str | Path) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
