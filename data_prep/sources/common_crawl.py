"""Read web archives in the formats WARC, WET and ARC, such as Common Crawl. Each document is the text of one page."""

import os
import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from data_prep.sources.base import (
    MAX_DOCUMENT_BYTES,
    Document,
    Kind,
    Part,
    ReportProgress,
    Skipped,
    SkippedUnits,
    no_report,
)
from data_prep.sources.bounded import Bounded
from data_prep.sources.compression import DamagedFile, Eager, open_plain
from data_prep.sources.text import TOO_LONG

# ARCHIVE matches the names of archives. METADATA matches the names of files that describe archives. These files are not
# read, because they contain no page text.
ARCHIVE = re.compile(r"\.(?:arc|warc|wet)(?:\.|$)", re.IGNORECASE)
METADATA = re.compile(r"\.(?:wat|cdx|cdxj)(?:\.|$)", re.IGNORECASE)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
HTML = ("text/html", "application/xhtml+xml")


def _list_paths(root: Path) -> list[Path]:
    """Return the paths of all web archives below a folder, without the files that only describe archives."""
    return [
        Path(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if ARCHIVE.search(name) and not METADATA.search(name)
    ]


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
            yield from read(file, bad, report_progress)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


def _read_warc(file: BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document]:
    """Yield the text of each page in a WARC or WET archive.

    Args:
        file: the decompressed archive.
        bad: counts the records that are skipped.
        report_progress: called while a page with many tags is parsed.

    Raises:
        DamagedFile: where the archive is damaged.
    """
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    first_line = file.peek(64).lstrip().partition(b"\n")[0]
    # Parse strictly, to detect truncated records. Parse leniently only files in old WARC versions, and files with line
    # ends other than CR LF, because the strict parser rejects them.
    lenient = not first_line.endswith(b"\r") or first_line.startswith(b"WARC/0.")
    wanted = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
    if not first_line.startswith(b"WARC/"):
        raise DamagedFile("damaged: the file does not begin with a WARC or ARC record")
    options = {"parse_http": False, "quirks_mode": lenient, "stream_detect": False}
    whole = Eager(file)
    records = iter(_call_library(ArchiveIterator, whole, wanted, **options))
    while True:
        record = _call_library(next, records, None)
        if record is None:
            # Check that the file ends with two line ends, as every complete record does. This check is needed because
            # fastwarc does not notice if the file ends within the header of a record.
            if not lenient and not whole.tail.endswith(b"\n\r\n"):
                raise DamagedFile("cut short: the file ends within the header of a record")
            return
        position, length = record.stream_pos, record.content_length
        if length > MAX_DOCUMENT_BYTES:
            _call_library(record.reader.consume)
            bad.add(TOO_LONG, position)
            continue
        block = _call_library(record.reader.read)
        if len(block) < length:
            raise DamagedFile(f"cut short: the record at byte {position:,} has {len(block):,} of its {length:,} bytes")
        try:
            is_text = str(record.record_type) == "conversion"
            text = block.decode("utf-8") if is_text else _call_library(_page_of, record, block, report_progress)
        except UnicodeDecodeError:
            bad.add("not valid UTF-8", position)
        except DamagedFile:  # skip a page if a parser failed on it, because only this page is bad, not the archive
            bad.add("not readable as a page", position)
        else:
            if len(text) > MAX_DOCUMENT_BYTES:
                bad.add(TOO_LONG, position)
            elif text and not text.isspace():
                headers = record.headers
                yield Document(text, headers.get("WARC-Target-URI", ""), headers.get("WARC-Date", ""))


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


def _page_of(record: Any, block: bytes, report_progress: ReportProgress) -> str:
    """Return the text of the page in a WARC record, or "" if it is not HTML or plain text with HTTP status 200.

    Args:
        record: the WARC record, of type response or resource.
        block: the content of the record.
        report_progress: called while a page with many tags is parsed.
    """
    content_type, charset = record.headers.get("Content-Type", ""), None
    if record.is_http:
        try:
            response = _http(block, "all")
        except OSError:
            # Decoding failed, probably because the crawler stored the content decompressed, although the header says
            # that it is compressed. Therefore use the content unchanged.
            response = _http(block, "none")
        if response.http_headers.status_code != 200:
            return ""
        content_type, charset = response.http_content_type or "", response.http_charset
        block = response.reader.read(MAX_DOCUMENT_BYTES + 1)
    return page_text(block, content_type, charset, report_progress)


def _http(block: bytes, decode: Literal["all", "none"]) -> Any:
    """Parse an HTTP response. Return a fastwarc WarcRecord with the HTTP headers and the content.

    Args:
        block: the bytes of the response.
        decode: "all" decompresses the content and joins its chunks as the HTTP header says; "none" leaves it unchanged.

    Raises:
        OSError: if the content cannot be decoded.
    """
    from fastwarc.warc import WarcRecord

    response = WarcRecord()
    response.is_http = True
    response.set_bytes_content(block)
    response.parse_http(auto_decode=decode, quirks_mode=True)
    return response


def page_text(
    content: bytes, content_type: str, charset: str | None, report_progress: ReportProgress = no_report
) -> str:
    """Return the text that a visitor of a web page would see.

    Args:
        content: the bytes of the page.
        content_type: the value of the Content-Type header of the page.
        charset: the character encoding; None: use the encoding in `content_type`, or else guess it from `content`.
        report_progress: called while a page with many tags is parsed.

    Returns:
        The main content for HTML, the complete text for plain text, and "" for other types.
    """
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    content_type, _, more = content_type.partition(";")
    content_type = content_type.strip().lower()
    if charset is None and (said := _CHARSET.search(more)):
        charset = said[1]
    if content_type not in (*HTML, "text/plain") or len(content) > MAX_DOCUMENT_BYTES:
        return ""
    # If the encoding in `charset` is unknown to browsers (for example misspelled), guess the encoding from `content`.
    known = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    text = bytes_to_str(content, known or detect_encoding(content) or "utf-8")
    if content_type == "text/plain":
        return text
    if text.count("<") < _MANY_TAGS:
        return _main_text(text)
    return _main_text_bounded(text, report_progress=report_progress)


def _main_text(html: str) -> str:
    """Return the text of the main content of an HTML page, without other text such as menus."""
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(html, main_content=True, alt_texts=False, preserve_formatting=True).strip()


_MANY_TAGS = 3000
"""Pages with at least this many tags are parsed with a CPU time limit, because parsing nested tags can take minutes."""
# Use one child process per worker, because starting a process for every page would take longer than parsing it.
_main_text_bounded = Bounded(f"{__name__}:{_main_text.__name__}")


def _read_arc(file: BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document]:
    """Yield the text of each page in an archive in the format ARC, the predecessor of WARC.

    The library warcio is used, because fastwarc cannot read ARC. See `_read_warc` for the arguments and errors.
    """
    from warcio.archiveiterator import ArchiveIterator

    records = iter(ArchiveIterator(file, arc2warc=False))
    number = 0
    while True:
        number += 1
        record = _call_library(next, records, None)
        if record is None:
            return
        if record.rec_type != "response":
            continue
        length = record.rec_headers.get_header("length") or ""
        content = _call_library(record.content_stream().read, MAX_DOCUMENT_BYTES + 1)
        if not length.isdigit() or len(content) > MAX_DOCUMENT_BYTES:
            bad.add(TOO_LONG if length.isdigit() else "the length is unknown", number)
            continue
        if record.http_headers is None or record.http_headers.get_statuscode() != "200":
            continue
        try:
            content_type = record.http_headers.get_header("Content-Type") or ""
            text = _call_library(page_text, content, content_type, None, report_progress)
        except DamagedFile:
            bad.add("not readable as a page", number)
        else:
            if text and not text.isspace():
                headers = record.rec_headers
                yield Document(text, headers.get_header("uri") or "", headers.get_header("archive-date") or "")


COMMON_CRAWL = Kind(
    "*.warc, *.wet or *.arc file (plain, gz, bz2 or zst)",
    _list_paths,
    _read,
    needs=("fastwarc", "resiliparse", "warcio"),
)
