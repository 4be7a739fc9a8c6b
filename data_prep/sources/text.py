"""Read text files. A document is a line of plain text (as in fairseq), a JSON object in a line, or a row of Parquet or
Arrow."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_prep.compression import ENDINGS, DamagedFile, open_plain, plain_name
from data_prep.sources.base import BOM, MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, Skipped, SkippedUnits
from data_prep.sources.bounded import LimitExceeded, stream
from data_prep.sources.encodings import needs_recoding, recoded, why_no_utf8
from data_prep.sources.parquet import documents
from data_prep.sources.rows import NO_TEXT, TOO_LONG, date_field, first_of, id_fields, is_missing
from fairseq_alma.core.json_lines import JSON_LINES

COMPRESSED = tuple(ENDINGS)
LINE_FILES = (".txt", ".text", ".raw", ".tokens", *JSON_LINES)
"""Endings of the files that contain a document in each line."""
TABLES = (".parquet", ".arrow", ".feather")
"""Endings of the files that contain a document in each row."""
_DESCRIPTIONS = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Names of the files in which the library datasets describes a dataset."""


def _read(part: Part, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the documents of one part of a text, JSON lines, Parquet or Arrow file. See `Kind.read`."""
    name = Path(part.name).name.lower()
    if name.startswith("cache-") and name.endswith(".arrow"):
        yield Skipped(part.name, "a cache of the library datasets, not a file of the dataset", damaged=False)
    elif name.endswith(TABLES):
        yield from _read_table(part, report_progress)
    else:
        yield from _read_lines(part, bad, report_progress)


def _read_lines(part: Part, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield one document per line that is not blank.

    In a plain text file, the document is the line. In a JSON lines file, the document is the text in the field that the
    option `text_field` names. A line belongs to the part of the file that contains the line's first byte. A compressed
    file is a single part. A file in UTF-16 or UTF-32 belongs to its first part.
    """
    is_json = plain_name(part.name).lower().endswith(JSON_LINES)
    file, whole = _opened(part)
    with file:
        if whole and part.start > 0:
            return
        if is_json and (skipped := _other_json(part)):
            yield skipped
            return
        position = 0 if whole else part.start
        if position > 0:
            # Skip the rest of a line that began before this part. Start one byte before the part: if this byte is a
            # line end, only this byte is skipped, so a line that begins exactly at `part.start` is not lost.
            file.seek(position - 1)
            position += _skip_line(file, report_progress) - 1
        while (whole or position < part.end) and (line := file.readline(MAX_DOCUMENT_BYTES + 1)):
            report_progress()
            line_start, position = position, position + len(line)
            if line_start == 0:
                _check_line_ends(line, file, is_json)
            if len(line) > MAX_DOCUMENT_BYTES:
                position += 0 if line.endswith(b"\n") else _skip_line(file, report_progress)
                bad.add(TOO_LONG, line_start)
                continue
            identity, date = f"{part.name}:{line_start}", ""
            try:
                # Files that were joined have byte order marks in the middle. The mark is no part of the text.
                content = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8").lstrip("\ufeff")
                text, is_blank = content, not content or content.isspace()
                if is_json and not is_blank:
                    row = json.loads(content)
                    text = _field_of(row, part.option("text_field"))
                    identity = first_of(row, id_fields(part)) or identity
                    date = date_field(row, part)
            except UnicodeDecodeError:
                how = "if the file is in another encoding: iconv -f ENCODING -t UTF-8"
                bad.add("not valid UTF-8", line_start, how)
            except (ValueError, RecursionError):
                bad.add("not valid JSON", line_start)
            except KeyError as error:
                bad.add(error.args[0], line_start, *error.args[1:])
            else:
                if text and not text.isspace():
                    yield Document(text, identity, date)
                elif not is_blank:
                    bad.drop(NO_TEXT)


def _opened(part: Part) -> tuple[io.BufferedReader, bool]:
    """Open the content of a file as UTF-8, decompressed if the file name says that it is compressed.

    Also return True if the file can only be read as a whole.
    """
    is_compressed = part.name != plain_name(part.name)
    file = open_plain(part.path) if is_compressed else open(part.path, "rb")  # noqa: SIM115, the caller closes it
    try:
        head = file.peek()
        if needs_recoding(head):
            return recoded(file), True
        if why := why_no_utf8(head):
            raise DamagedFile(why)
    except DamagedFile:
        file.close()
        raise
    return file, is_compressed


def _check_line_ends(line: bytes, file: io.BufferedReader, is_json: bool) -> None:
    """Raise DamagedFile if a file of one line, as it seems, has other marks between its lines."""
    is_ended, line = line.endswith(b"\n"), line.rstrip()
    if b"\r" in line:
        name, command = "\\r", r"tr '\r' '\n'"
    elif not is_json and "\u2028".encode() in line:
        name, command = "U+2028", r"sed 's/\xe2\x80\xa8/\n/g'"
    else:
        return
    if is_ended and file.peek(1):
        return
    raise DamagedFile(f"the file has {name} and no \\n at the line ends. Convert it with: {command} FILE > FILE.txt")


def _other_json(part: Part) -> Skipped | None:
    """Return a Skipped object if a file contains no JSON lines, but one JSON array or object over many lines.

    Also return one for a file in which the library datasets describes a dataset.
    """
    try:
        with _opened(part)[0] as file:
            line = file.readline(HEAD_BYTES).removeprefix(BOM)
            while line.isspace():
                line = file.readline(HEAD_BYTES)
    except DamagedFile:  # the reader reports the damage, after the lines before it
        return None
    if Path(part.name).name in _DESCRIPTIONS and f'"{part.option("text_field")}":'.encode() not in line:
        return Skipped(part.name, "the file describes a dataset, whose text is in .arrow files", damaged=False)
    if line.strip() == b"{":
        # Do not count the file as damaged, because it is probably not part of the corpus, but describes it.
        why = (
            "the file is one JSON object over several lines, not JSON lines. Convert it with: jq -c . FILE > FILE.jsonl"
        )
        return Skipped(part.name, why, damaged=False)
    if not line.lstrip().startswith(b"["):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the array has several lines, or its first line is longer than HEAD_BYTES
        row = [{}]
    if not any(isinstance(value, dict) for value in row):
        return None
    why = "the file is one JSON array, not one JSON object per line. Convert it with: jq -c '.[]' FILE > FILE.jsonl"
    return Skipped(part.name, why)


HEAD_BYTES = 1 << 20
"""Maximum number of bytes that are read to see whether a file contains JSON lines."""


def _skip_line(file: BinaryIO, report_progress: ReportProgress) -> int:
    """Skip the rest of a line without storing it in memory. Return the number of bytes skipped."""
    count = 0
    while chunk := file.readline(1 << 20):
        report_progress()
        count += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return count


def _field_of(row: object, name: str) -> str:
    """Return the text in the field `name` of a JSON object."""
    if not isinstance(row, dict):
        raise KeyError("the line is not a JSON object")
    if name not in row:
        raise KeyError(f"the JSON object has no field '{name}'", f"with the fields {', '.join(row)[:200] or 'none'}")
    if is_missing(row[name]):
        return ""
    if not isinstance(row[name], str):
        raise KeyError(f"the field '{name}' is not text")
    return row[name]


def _read_table(part: Part, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield one document per row of a Parquet or Arrow file. The file is read in the child process (see `bounded`)."""
    try:
        for found in stream(documents, part, report_progress):
            for one in found:
                yield one if isinstance(one, Skipped) else Document(*one)
    except LimitExceeded as error:
        yield Skipped(part.name, str(error))


TEXT = Kind(
    "*.txt, *.json, *.jsonl, *.parquet or *.arrow file",
    _read,
    # Files with other endings may be something else than documents: they are read only if the user names them.
    wanted=r"\.(?:parquet|arrow|feather|(?:txt|json|jsonl|ndjson)(?:\.(?:gz|bz2|zst|xz))?)\Z",
    splittable=lambda name: not name.lower().endswith((*TABLES, *COMPRESSED)),
    is_readable=lambda name: name.lower().endswith(TABLES) or plain_name(name).lower().endswith(LINE_FILES),
    endings=f"{', '.join(TABLES)}; {', '.join(LINE_FILES)}, also with {', '.join(COMPRESSED)}",
)
