"""Write the file with the documents that cleaning removed (see `removed`)."""

import json
from pathlib import Path
from typing import IO, Any, Self


class RemovedFile:
    """A context manager that writes JSON objects, one per line, to a file that is compressed with Zstandard.

    Without any object, no file is written.

    Args:
        path: the file, with the ending .jsonl.zst; None: nothing is written.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, **fields: Any) -> None:
        """Write a JSON object with these fields."""
        if self._path is None:
            return
        if self._file is None:
            import zstandard

            self._file = zstandard.open(self._path, "wb")
        # File names that are not valid UTF-8 contain halves of UTF-16 pairs. JSON can only express them as escapes.
        text = json.dumps(fields, ensure_ascii=False)
        self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")
