"""Read web archives in the formats WARC, WET and ARC, such as Common Crawl. Each document is the text of one page."""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.sources.base import MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, Skipped, SkippedUnits
from data_prep.sources.bounded import Failure, parse_in_batches
from data_prep.sources.compression import DamagedFile, Eager, open_plain
from data_prep.sources.text import TOO_LONG
from data_prep.sources.walk import files_below
from data_prep.sources.web_page import Content, Dropped, media_type_of, page_text

# ARCHIVE matches the names of archives. METADATA matches the names of files that describe archives. These files are not
# read, because they contain no page text.
ARCHIVE = re.compile(r"\.(?:arc|warc|wet)(?:\.|$)", re.IGNORECASE)
METADATA = re.compile(r"\.(?:wat|cdx|cdxj)(?:\.|$)", re.IGNORECASE)
# _URI matches an address as some crawlers write it: wget 1.19 and 1.20 write angle brackets around it,
# and browsertrix writes urn:text: before the address of a page in the record with its text.
_URI = re.compile(r"(<)?(?:urn:[\w-]+:(?=https?:))?(.*?)(?(1)>?)", re.DOTALL)

_NO_LENGTH = "the length is unknown"
_NO_TYPE = "the record has no type"
# The reasons for which a record is skipped, although the archive is not damaged.
_NO_TEXT = "page without text"
_OTHER_TYPE = "of a type that is not read, such as continuation"
_MAX_GAP_BYTES = 200
"""Maximum number of bytes between two records: line ends, and additional white space in the header of the first."""
_REVISIT = "revisit record, which refers to an earlier capture of the page"


def _list_paths(root: Path) -> list[Path]:
    """Return the paths of all web archives below a folder, without the files that only describe archives."""
    return [path for path in files_below(root) if ARCHIVE.search(path.name) and not METADATA.search(path.name)]


class _Page(NamedTuple):
    """What is known of a page before it is parsed."""

    position: int
    """Byte of the decompressed file at which its record begins; in ARC archives, the number of the record."""
    id: str
    """The address of the page."""
    date: str
    text: str = ""
    """The text, if the record contains nothing else (WET)."""


_Pages = Iterator[tuple[_Page, Content | None, int]]
"""For each record: the page; its content, or None if the text is known; the number of bytes."""


def _read(part: Part, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the text of each page in one archive, and Skipped objects, which describe the content that was skipped.

    If the archive is damaged, the pages before the damage are yielded.
    """
    if part.start == part.end:
        yield Skipped(part.name, "empty file", damaged=False)
        return
    bad = SkippedUnits(part.name, "record")
    try:
        with open_plain(part.path) as file:
            first_line = file.peek(1 << 12)[: 1 << 12].lstrip()
            read = _read_arc if first_line.startswith(b"filedesc:") else _read_warc
            pages = read(file, bad, report_progress)
            for page, text in parse_in_batches(f"{page_text.__module__}:{page_text.__name__}", pages, report_progress):
                if isinstance(text, Failure):
                    # If a parser fails on a page, only this page is bad, not the archive. If a page exceeds a limit,
                    # the archive is not even damaged.
                    if text.is_limit:
                        bad.add(text.why, page.position, page.id, damaged=False)
                    else:
                        bad.add("not readable as a page", page.position)
                    continue
                text = page.text if text is None else text
                if isinstance(text, Dropped):
                    bad.drop(text.why)
                elif not text or text.isspace():
                    bad.drop(_NO_TEXT)
                else:
                    yield Document(text, page.id, page.date)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


def _read_warc(file: io.BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> _Pages:
    """Yield each page in a WARC or WET archive.

    Args:
        file: the decompressed archive.
        bad: counts the records that are skipped.
        report_progress: called for each record.

    Raises:
        DamagedFile: where the archive is damaged.
    """
    from fastwarc.warc import WarcRecordType

    pages = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion | WarcRecordType.revisit
    described = WarcRecordType.warcinfo | WarcRecordType.request | WarcRecordType.metadata
    for record in _warc_records(file, bad, report_progress):
        if not record.record_type & pages:
            if record.record_type == WarcRecordType.no_type:
                bad.add(_NO_TYPE, record.stream_pos)
            elif not record.record_type & described:
                bad.drop(_OTHER_TYPE)
            continue
        position, length, headers = record.stream_pos, record.content_length, record.headers
        if not headers.get("Content-Length", "").isdigit():
            bad.add(_NO_LENGTH, position)
            continue
        if _is_damaged(headers):
            bad.add("damaged header", position)
            continue
        if length > MAX_DOCUMENT_BYTES:
            _call_library(record.reader.consume)
            bad.add(TOO_LONG, position, damaged=False)
            continue
        block = _call_library(record.reader.read)
        if len(block) < length:
            raise DamagedFile(f"cut short: the record at byte {position:,} has {len(block):,} of its {length:,} bytes")
        record_type = str(record.record_type)
        if record_type == "revisit":
            bad.drop(_REVISIT)
            continue
        page = _Page(position, _address(headers.get("WARC-Target-URI", "")), headers.get("WARC-Date", ""))
        content_type = headers.get("Content-Type", "")
        if record_type != "conversion" or media_type_of(content_type) not in ("", "text/plain"):
            # Some crawlers write no Content-Type into the header of a response record.
            is_http = record.is_http or (record_type == "response" and block.startswith(b"HTTP/"))
            yield page, Content(block, content_type, is_http), len(block)
            continue
        try:
            yield page._replace(text=block.decode("utf-8")), None, len(block)
        except UnicodeDecodeError:
            bad.add("not valid UTF-8", position)


def _warc_records(file: io.BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Any]:
    """Yield each record in a WARC or WET archive, as a WarcRecord of fastwarc.

    A record must be read before the next one is taken. See `_read_warc` for the arguments and errors.
    """
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    first_line = file.peek(64).lstrip().partition(b"\n")[0]
    # Parse strictly, to detect truncated records. Parse leniently only files in old WARC versions, and files with line
    # ends other than CR LF, because the strict parser rejects them.
    is_old = first_line.startswith(b"WARC/0.")
    lenient = is_old or not first_line.endswith(b"\r")
    if file.peek(262)[257:262] == b"ustar":
        raise DamagedFile("the file is a tar archive, not a WARC or ARC archive. Unpack it with: tar -xf FILE")
    if not first_line.startswith(b"WARC/"):
        raise DamagedFile("damaged: the file does not begin with a WARC or ARC record")
    options = {"parse_http": False, "quirks_mode": lenient, "stream_detect": False}
    whole = Eager(file)
    records = iter(_call_library(ArchiveIterator, whole, WarcRecordType.any_type, **options))
    end = 0
    while True:
        record = _call_library(next, records, None)
        report_progress()
        # If a header is damaged, fastwarc may pass over everything up to a later record.
        if record is not None:
            if not is_old and record.stream_pos - end > _MAX_GAP_BYTES:
                bad.add("bytes that belong to no record", end)
            end = record.stream_pos + _num_header_bytes(record) + record.content_length
        # Check that the file ends with two line ends, as every complete record does. This check is needed because
        # fastwarc does not notice if the file ends within the header of a record. It may return an empty record then.
        is_empty = record is None or not record.content_length
        if is_empty and not lenient and not whole.tail.endswith(b"\n\r\n") and not file.peek(1):
            raise DamagedFile("cut short: the file ends within the header of a record")
        if record is None:
            return
        yield record


def _num_header_bytes(record: Any) -> int:
    """Return the length of the header of a record, apart from additional white space."""
    lines = [record.headers.status_line, *map(": ".join, record.headers.items()), ""]
    return sum(len(line.encode("utf-8", "replace")) + 2 for line in lines)


def _is_damaged(headers: Any) -> bool:
    """Return True if the headers of a record contain zero bytes, or if those of two records were joined."""
    fields = [(name.lower(), value) for name, value in headers.items()]
    return any("\0" in name or "\0" in value for name, value in fields) or (
        sum(name in ("warc-type", "content-length") for name, _ in fields) > 2
    )


def _address(uri: str) -> str:
    """Return the address of a page, without what some crawlers write around it."""
    return _URI.fullmatch(uri.strip())[2]  # type: ignore[index]


def _call_library(function: Callable, *arguments, **options) -> Any:
    """Call a library function and return its result.

    Raises:
        DamagedFile: if the function raises any error, including a panic (fatal error) of compiled code.
    """
    try:
        return function(*arguments, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        # The library may have called `read` of our file, which raised DamagedFile, and may have turned DamagedFile into
        # `error`. In this case, raise the original DamagedFile, because its message says what is wrong with the file.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, DamagedFile):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DamagedFile(f"damaged: the content cannot be read ({reason})") from error


def _read_arc(file: io.BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> _Pages:
    """Yield each page in an archive in the format ARC, the predecessor of WARC.

    The library warcio is used, because fastwarc cannot read ARC. See `_read_warc` for the arguments and errors.
    """
    from warcio.archiveiterator import ArchiveIterator

    records = iter(ArchiveIterator(file, no_record_parse=True))
    number = 0
    while True:
        number += 1
        record = _call_library(next, records, None)
        report_progress()
        if record is None:
            return
        if record.rec_type != "response":
            continue
        length = record.rec_headers.get_header("length") or ""
        block = _call_library(record.raw_stream.read, MAX_DOCUMENT_BYTES + 1)
        if not length.isdigit():
            bad.add(_NO_LENGTH, number)
            continue
        if len(block) > MAX_DOCUMENT_BYTES:
            bad.add(TOO_LONG, number, damaged=False)
            continue
        if len(block) < record.length:
            raise DamagedFile(f"cut short: record {number:,} has {len(block):,} of its {record.length:,} bytes")
        headers = record.rec_headers
        page = _Page(number, _address(headers.get_header("uri") or ""), headers.get_header("archive-date") or "")
        yield page, Content(block, headers.get_header("content-type") or "", block.startswith(b"HTTP/")), len(block)


COMMON_CRAWL = Kind(
    "*.warc, *.wet or *.arc file (plain, gz, bz2 or zst)",
    _list_paths,
    _read,
    needs=("fastwarc", "resiliparse", "warcio"),
)
