"""Files of JSON objects, one per line, to which lines are appended."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.fence import fence_of
from fairseq_alma.core.files import file_named, parse_json, write_whole
from fairseq_alma.core.json_types import value_of

T = TypeVar("T")
JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of the names of files that contain a JSON object in each line."""


class JsonLines:
    """A file with one JSON object per line. A process that is killed can damage at most the line that it writes.

    An incomplete last line is ignored, and the next `append` removes it. Only one process at a time may append lines.
    If `durable`, the disk has stored the line when `append` returns. The file need not exist yet.
    """

    def __init__(self, path: str | Path, durable: bool = True):
        self.path = Path(path)
        self._durable = durable
        self._num_bytes = -1
        """Size of the file after the last `append` of this object; -1 before the first one."""

    def append(self, *values: dict[str, Any]) -> None:
        """Append each object as a line. First remove an incomplete last line, which a killed process may have left.

        Raise LeaseLostError if another process has taken over the folder.
        """
        lines = "".join(json.dumps(value) + "\n" for value in values)
        if not self.path.exists():
            write_whole(self.path, lines, self._durable)
            self._num_bytes = len(lines.encode())
            return
        fence = fence_of(self.path)
        with file_named(self.path), open(self.path, "r+b") as file:
            if fence:
                fence.check()  # after the file was opened, see `fairseq_alma.core.fence`
            # Read the file only if this object did not write its end. Otherwise, n lines would need time O(n^2).
            if file.seek(0, os.SEEK_END) != self._num_bytes:
                file.seek(len(self.complete_lines()))
                file.truncate()
            file.write(lines.encode())
            self._num_bytes = file.tell()
            if self._durable:
                file.flush()
                os.fsync(file.fileno())
            elif fence:
                fence.unsynced.add(self.path.absolute())

    def keep_if(self, is_kept: Callable[[dict[str, Any]], bool], kind: Any = dict[str, Any]) -> list[dict[str, Any]]:
        """Atomically remove the objects for which `is_kept` returns False. Return the others. See `values`."""
        values = self.values(kind)
        kept = [value for value in values if is_kept(value)]
        if len(kept) < len(values):
            write_whole(self.path, "".join(json.dumps(value) + "\n" for value in kept), self._durable)
            self._num_bytes = -1
        return kept

    def complete_lines(self) -> bytes:
        """Return the content of the file without an incomplete last line; empty if the file does not exist."""
        # Return bytes instead of text, because a damaged file may not be valid UTF-8, and because `append` needs the
        # number of bytes of the complete lines.
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def values(self, kind: Any = dict[str, Any]) -> list[dict[str, Any]]:
        """Return the objects of all complete lines, in order, each of the declared type `kind`. See `parsed`."""
        return self.parsed(lambda value: value_of(value, kind))

    def parsed(self, parse: Callable[[Any], T]) -> list[T]:
        """Return what `parse` makes of the value of each complete line, in order.

        If a line is damaged, or `parse` raises ValueError, raise a RunError that names the file and the line.
        """
        found = []
        for number, line in enumerate(self.complete_lines().split(b"\n")[:-1], start=1):
            try:
                found.append(parse(parse_json(line)))
            except ValueError as error:
                raise RunError(
                    f"{self.path}, line {number} is damaged ({error}): restore the file from a backup"
                ) from error
        return found
