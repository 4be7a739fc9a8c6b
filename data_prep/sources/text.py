"""Read text files. A document is a line of plain text (as in fairseq), a JSON object in a line, or a Parquet row."""

import datetime
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.sources.base import BOM, MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, Skipped, SkippedUnits
from data_prep.sources.compression import DamagedFile, open_plain

TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
COMPRESSED = (".gz", ".bz2", ".zst")
JSON_LINES = (".jsonl", ".ndjson")


def paths_ending_in(*endings: str) -> Callable[[Path], list[Path]]:
    """Return a function that lists all files below a folder, at any depth, whose names end with one of `endings`."""

    def list_paths(root: Path) -> list[Path]:
        return [
            Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.lower().endswith(endings)
        ]

    return list_paths


def plain_name(name: str) -> str:
    """Return a file name without the ending of a compressed file (.gz, .bz2, .zst), if it has one."""
    return next((name[: -len(ending)] for ending in COMPRESSED if name.lower().endswith(ending)), name)


def _read(part: Part, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the documents of one part of a text, JSON lines or Parquet file."""
    if part.start == part.end:
        yield Skipped(part.name, "empty file", damaged=False)
    elif part.name.lower().endswith(".parquet"):
        yield from _read_parquet(part)
    else:
        yield from _read_lines(part)


def _read_lines(part: Part) -> Iterator[Document | Skipped]:
    """Yield one document per line that is not blank.

    In a plain text file, the document is the line. In a JSON lines file, the document is the text in the field that the
    option `text_field` names.

    A line belongs to the part of the file that contains the line's first byte. A compressed file is a single part.
    """
    bad = SkippedUnits(part.name, "line")
    is_json = plain_name(part.name).lower().endswith(JSON_LINES)
    try:
        # If the file name ends with .gz, .bz2 or .zst, read the complete file, because compressed files are not split
        # into parts.
        whole = part.name != plain_name(part.name)
        with open_plain(part.path) if whole else open(part.path, "rb") as file:
            position = 0 if whole else part.start
            if position > 0:
                # Skip the rest of a line that began before this part. Start one byte before the part: if this byte is
                # a line end, only this byte is skipped, so a line that begins exactly at `part.start` is not lost.
                file.seek(position - 1)
                position += _skip_line(file) - 1
            while (whole or position < part.end) and (line := file.readline(MAX_DOCUMENT_BYTES + 1)):
                line_start, position = position, position + len(line)
                if len(line) > MAX_DOCUMENT_BYTES:
                    position += 0 if line.endswith(b"\n") else _skip_line(file)
                    bad.add(TOO_LONG, line_start)
                    continue
                if line_start == 0:
                    line = line.removeprefix(BOM)
                identity, date = f"{part.name}:{line_start}", ""
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                    if is_json and text and not text.isspace():
                        row = json.loads(text)
                        text = _field_of(row, part.option("text_field"))
                        identity = _first_of(row, _id_fields(part)) or identity
                        date = _first_of(row, [part.option("date_field")])
                except UnicodeDecodeError:
                    bad.add("not valid UTF-8", line_start)
                except (ValueError, RecursionError):
                    bad.add("not valid JSON", line_start)
                except KeyError as error:
                    bad.add(error.args[0], line_start, *error.args[1:])
                else:
                    if text and not text.isspace():
                        yield Document(text, identity, date)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


def _skip_line(file: BinaryIO) -> int:
    """Skip the rest of a line without storing it in memory. Return the number of bytes skipped."""
    count = 0
    while chunk := file.readline(1 << 20):
        count += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return count


def _field_of(row: object, name: str) -> str:
    """Return the text in the field `name` of a JSON object.

    Raises:
        KeyError: if the object has no such field, or the field contains no text. The arguments of the error are the
            reason for skipping the line, and optionally the fields that the object has. See `SkippedUnits.add`.
    """
    if not isinstance(row, dict):
        raise KeyError("the line is not a JSON object")
    if name not in row:
        raise KeyError(f"the JSON object has no field '{name}'", f"with the fields {', '.join(row)[:200] or 'none'}")
    if not isinstance(row[name], str):
        raise KeyError(f"the field '{name}' is not text")
    text = row[name]
    # Replace lone surrogates (halves of UTF-16 pairs), because JSON can contain them, but UTF-8 cannot encode them.
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def _id_fields(part: Part) -> list[str]:
    """Return the names of the fields that may name a document, the most wanted one first."""
    return [part.option("id_field")] if part.option("id_field") else ["id", "url"]


def _first_of(row: dict, fields: list[str]) -> str:
    """Return the value of the first of some fields that a row has, as text; an empty text if it has none of them."""
    for field in fields:
        value = row.get(field)
        if isinstance(value, datetime.date):  # also a point in time
            return value.isoformat()
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return ""


_ROWS = 16
"""Number of Parquet rows read at a time. The number is small, because a row may decompress to 16 MiB or more."""


def _read_parquet(part: Part) -> Iterator[Document | Skipped]:
    """Yield one document per row of a Parquet file: the text in the column that the option `text_field` names."""
    import pyarrow
    import pyarrow.parquet

    field = part.option("text_field")
    bad = SkippedUnits(part.name, "row")
    try:
        with pyarrow.parquet.ParquetFile(part.path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                yield Skipped(part.name, f"no column '{field}': the columns are {', '.join(columns)}")
                return
            number = 0
            wanted = {*_id_fields(part), part.option("date_field")}
            more = sorted(wanted.intersection(columns) - {field})
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field, *more]):
                for index, value in enumerate(batch.column(field)):
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError:
                        bad.add("not valid UTF-8", number)
                        number += 1
                        continue
                    # `as_py` raises these errors, for example, if the value is a date that Python cannot represent.
                    # Such a value is not text, so it is skipped below.
                    except (ValueError, OverflowError):
                        text = None
                    if not isinstance(text, str):
                        bad.add(f"the column '{field}' is not text", number)
                    elif len(text) > MAX_DOCUMENT_BYTES:
                        bad.add(TOO_LONG, number)
                    elif text and not text.isspace():
                        row = {name: _value_of(batch.column(name)[index]) for name in more}
                        identity = _first_of(row, _id_fields(part)) or f"{part.name}:{number}"
                        yield Document(text, identity, _first_of(row, [part.option("date_field")]))
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        yield Skipped(part.name, f"damaged: not readable as Parquet ({str(error).splitlines()[0][:200]})")
    yield from bad


def _value_of(value: Any) -> object:
    """Return a value of a Parquet column as a Python object, or None if Python cannot represent it."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):  # also UnicodeDecodeError
        return None


_ENDINGS = (".txt", *JSON_LINES)

TEXT = Kind(
    "*.txt, *.jsonl or *.parquet file",
    paths_ending_in(".parquet", *_ENDINGS, *(end + packed for end in _ENDINGS for packed in COMPRESSED)),
    _read,
    splittable=lambda name: not name.lower().endswith((".parquet", *COMPRESSED)),
)
