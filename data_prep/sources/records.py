"""Split web archives in the formats WARC (also WET) and ARC into records.

Both formats put a header with a length before each block of bytes. Many programs wrote such archives, and not all of
them as the standards say: header names in lower case, other line ends, lengths that are wrong. So each block is checked
to end where the next record begins. After bytes that belong to no record, reading continues at the next record.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from data_prep.compression import CHUNK_BYTES, DamagedFile
from data_prep.sources.base import MAX_DOCUMENT_BYTES, ReportProgress, SkippedUnits
from data_prep.sources.text import TOO_LONG

_MAX_HEADER_BYTES = 1 << 20
_MAX_START_BYTES = 1 << 10
_WARC_START = re.compile(rb"WARC/\d[\d.]*[ \t]*\r?\n?")
_WARC_ENDING = re.compile(rb"()(" + _WARC_START.pattern + rb")\Z")
# The header of an ARC record: address, IP address, date, media type, in version 2 more fields, and the length.
_ARC_START = re.compile(rb"(?>([a-zA-Z][\w+.-]*:[^\n]*?) (\S+) (\d{8,18}) )(?:([^\n]*)[^\S\n])?(\S+)[ \t]*+\r?\n?")
# If no header begins at the first address of a line, then none begins at a later one.
_ARC_ENDING = re.compile(rb"\A((?:[a-zA-Z][\w+.-]*+(?!:)|[^a-zA-Z])*+)(" + _ARC_START.pattern + rb")\Z")
_LINE_END = re.compile(rb"\r\n?|\n")
_ONCE = ("warc-type", "warc-date", "warc-record-id", "content-length")


class Record(NamedTuple):
    """A record of a web archive."""

    position: int
    """Byte of the decompressed file at which the record begins."""
    headers: dict[str, str]
    """The headers by their name in lower case. ARC records have the headers of WARC records of the type response."""
    block: bytes


def warc_records(file: io.BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Record]:
    """Yield each record of a WARC or WET archive.

    Args:
        file: the decompressed archive.
        bad: counts the records that cannot be read.
        report_progress: called for each record.

    Raises:
        DamagedFile: if the archive is cut short or cannot be decompressed.
    """
    return _Records(file, bad, report_progress, _WARC_START, _WARC_ENDING).read(_Records.warc_header)


def arc_records(file: io.BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Record]:
    """Yield each record of an ARC archive but the first, which describes the archive. See `warc_records`."""
    records = _Records(file, bad, report_progress, _ARC_START, _ARC_ENDING).read(_Records.arc_header)
    return (record for record in records if not record.headers["warc-target-uri"].startswith("filedesc:"))


class _Records:
    """Reads one archive. See `warc_records` for the arguments that are not described here."""

    def __init__(
        self, file: io.BufferedReader, bad: SkippedUnits, report_progress: ReportProgress, start: re.Pattern[bytes],
        ending: re.Pattern[bytes],
    ):  # fmt: skip
        self._file, self._bad, self._report_progress = file, bad, report_progress
        self._start, self._ending = start, ending
        self._position = 0
        self._held: io.BytesIO | None = None  # bytes that are read again, before those of the file

    def read(self, read_header: Callable[["_Records", bytes], dict[str, str] | None]) -> Iterator[Record]:
        """Yield each record. `read_header` returns the headers after a first line; None if they are damaged."""
        line = self._next_text()
        while line:
            self._report_progress()
            position = self._position - len(line)
            if not self._start.fullmatch(line):
                self._bad.add("bytes that belong to no record", position)
                line = self._from_start(line) or self._next_start()
                continue
            headers = read_header(self, line)
            length = (headers or {}).get("content-length", "")
            if not (length.isascii() and length.isdigit()):
                self._bad.add("damaged header" if headers is None else "the length is unknown", position)
                line = self._next_start()
                continue
            block = self._block(int(length), position)
            line = self._line()
            if line and not line.strip():  # the first of two line ends after a block, or a line of its text
                after = self._line()
                line = line + after if after.strip() and not self._start.fullmatch(after) else after
            if (line.strip() and not self._start.fullmatch(line)) or (block and len(block) < int(length)):
                # The length is wrong: the record ends where the next one begins.
                block, line = self._corrected(block, line, position)
            if block is None:
                self._bad.add(TOO_LONG, position, damaged=False)
            else:
                yield Record(position, headers or {}, block)
            line = line if line.strip() or not line else self._next_text()

    def warc_header(self, line: bytes) -> dict[str, str] | None:
        """Return the headers that follow the first line of a WARC record."""
        lines, num_bytes = [], 0
        while (line := self._line()).strip():
            lines.append(line)
            num_bytes += len(line)
            if num_bytes >= _MAX_HEADER_BYTES:
                return None
            if not line.endswith(b"\n"):
                break
        if not line.endswith(b"\n") and not self._file.peek(1):
            raise DamagedFile("cut short: the file ends within the header of a record")
        header = b"".join(lines)
        if b"\0" in header:
            return None
        headers: dict[str, str] = {}
        folded: dict[str, list[str]] = {}
        name = ""
        for text in _decoded(header).split("\n"):
            if text[:1] in (" ", "\t"):  # a long value continues on this line
                folded.setdefault(name, [headers.get(name, "")]).append(text.strip())
                continue
            name, _, value = text.partition(":")
            name = name.strip().lower()
            if name in headers and name in _ONCE:  # the headers of two records were joined
                return None
            headers[name] = value.strip()
            folded.pop(name, None)
        return headers | {name: " ".join(filter(None, pieces)) for name, pieces in folded.items()}

    def arc_header(self, line: bytes) -> dict[str, str]:
        """Return the headers in the first line of an ARC record."""
        uri, _, date, media_type, length = self._start.fullmatch(line).groups(b"")  # type: ignore[union-attr]
        values = map(_decoded, (b"response", uri, date, media_type, length))
        names = ("warc-type", "warc-target-uri", "warc-date", "content-type", "content-length")
        return dict(zip(names, values, strict=True))

    def _corrected(self, block: bytes | None, line: bytes, position: int) -> tuple[bytes | None, bytes]:
        """Return the block of a record whose length is wrong, and the first line of the next record."""
        content = (block or b"") + line
        starts = self._starts(content)
        start = next(starts, None)
        if start is not None:  # the length is too large: it covers the next record, at least its beginning
            self._bad.add("the record has fewer bytes than its length says", position)
            following = content[start:]
            if len(following) <= _MAX_HEADER_BYTES:
                self._position -= len(following)
                self._held = io.BytesIO(following + (self._held.read() if self._held else b""))
                line = self._line()
            else:
                for _ in (start, *starts):
                    self._bad.add("the wrong length of the record before covers it", position)
                line = self._from_start(line) or self._next_start()
            return content[:start].rstrip(b"\r\n"), line
        self._bad.add("the record has more bytes than its length says", position, damaged=False)
        pieces, num_bytes, following = [block], len(block or b""), self._from_start(line)
        while line and not following:
            pieces.append(line if num_bytes <= MAX_DOCUMENT_BYTES else None)
            num_bytes += len(line)
            self._report_progress()
            line = self._line()
            following = self._from_start(line)
        pieces.append(line.removesuffix(following))
        if None in pieces or num_bytes > MAX_DOCUMENT_BYTES:
            return None, following
        return b"".join(filter(None, pieces)).rstrip(b"\r\n"), following

    def _starts(self, content: bytes) -> Iterator[int]:
        """Yield the position of each line that is the first of a record."""
        start = 0
        for end in itertools.chain((found.end() for found in _LINE_END.finditer(content)), (len(content),)):
            if self._start.fullmatch(content, start, end):
                yield start
            start = end

    def _line(self) -> bytes:
        line = self._held.readline() if self._held else b""
        if not line.endswith(b"\n"):
            self._held = None
            line += self._file.readline(_MAX_HEADER_BYTES)
        self._position += len(line)
        return line

    def _next_text(self) -> bytes:
        """Return the next line that is not blank; b"" if there is none."""
        while (line := self._line()) and not line.strip():
            self._report_progress()
        return line

    def _next_start(self) -> bytes:
        """Return the next first line of a record, without other bytes before it; b"" if there is none."""
        found = b""
        while not found and (line := self._line()):
            self._report_progress()
            found = self._from_start(line)
        return found

    def _from_start(self, line: bytes) -> bytes:
        """Return the first line of a record at the end of a line; b"" if there is none."""
        if self._start.fullmatch(line):
            return line
        found = self._ending.search(line[-_MAX_START_BYTES:])
        return found[2] if found else b""

    def _block(self, num_bytes: int, position: int) -> bytes | None:
        """Return the next bytes of the file, or None if they are too many for a document."""
        before = self._position
        block = self._held.read(min(num_bytes, MAX_DOCUMENT_BYTES)) if self._held else b""
        block += self._file.read(min(num_bytes, MAX_DOCUMENT_BYTES) - len(block))
        self._position += len(block)
        while self._position - before < num_bytes and (
            more := self._file.read(min(num_bytes + before - self._position, CHUNK_BYTES))
        ):
            self._position += len(more)
            self._report_progress()
        if self._position - before < num_bytes and next(self._starts(block), None) is None:
            found = self._position - before
            raise DamagedFile(f"cut short: the record at byte {position:,} has {found:,} of its {num_bytes:,} bytes")
        return block if num_bytes <= MAX_DOCUMENT_BYTES else None


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("latin-1")
