"""Read web archives in the formats WARC, WET and ARC, such as Common Crawl. Each document is the text of one page."""

import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_prep.sources.base import (
    MAX_DOCUMENT_BYTES,
    Document,
    Kind,
    Part,
    ReportProgress,
    Skipped,
    SkippedUnits,
)
from data_prep.sources.bounded import Failure, parse_in_batches
from data_prep.sources.compression import DamagedFile, Eager, open_plain
from data_prep.sources.text import TOO_LONG
from data_prep.sources.walk import files_below

# ARCHIVE matches the names of archives. METADATA matches the names of files that describe archives. These files are not
# read, because they contain no page text.
ARCHIVE = re.compile(r"\.(?:arc|warc|wet)(?:\.|$)", re.IGNORECASE)
METADATA = re.compile(r"\.(?:wat|cdx|cdxj)(?:\.|$)", re.IGNORECASE)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
HTML = ("text/html", "application/xhtml+xml")


def _list_paths(root: Path) -> list[Path]:
    """Return the paths of all web archives below a folder, without the files that only describe archives."""
    return [path for path in files_below(root) if ARCHIVE.search(path.name) and not METADATA.search(path.name)]


class _Content(NamedTuple):
    """The content of a record whose text is not known yet. The child process receives it and finds the text."""

    block: bytes
    content_type: str
    is_http: bool
    """True if `block` is an HTTP response, False if it is the page itself."""


class _Page(NamedTuple):
    """What is known of a page before it is parsed."""

    position: int
    """Byte of the decompressed file at which its record begins; in ARC archives, the number of the record."""
    id: str
    """The address of the page."""
    date: str
    text: str = ""
    """The text, if the record contains nothing else (WET)."""


_Pages = Iterator[tuple[_Page, _Content | None, int]]
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
            for page, text in parse_in_batches(f"{__name__}:{_text_of.__name__}", pages, report_progress):
                if isinstance(text, Failure):
                    # If a parser fails on a page, only this page is bad, not the archive. If a page exceeds a limit,
                    # the archive is not even damaged.
                    if text.is_limit:
                        bad.add(text.why, page.position, page.id, damaged=False)
                    else:
                        bad.add(TOO_LONG if text.why == TOO_LONG else "not readable as a page", page.position)
                    continue
                text = page.text if text is None else text
                if text and not text.isspace():
                    yield Document(text, page.id, page.date)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


def _read_warc(file: BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> _Pages:
    """Yield each page in a WARC or WET archive.

    Args:
        file: the decompressed archive.
        bad: counts the records that are skipped.
        report_progress: called for each record.

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
        report_progress()
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
        headers = record.headers
        page = _Page(position, headers.get("WARC-Target-URI", ""), headers.get("WARC-Date", ""))
        if str(record.record_type) != "conversion":
            yield page, _Content(block, headers.get("Content-Type", ""), record.is_http), len(block)
            continue
        try:
            yield page._replace(text=block.decode("utf-8")), None, len(block)
        except UnicodeDecodeError:
            bad.add("not valid UTF-8", position)


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


def _text_of(content: _Content) -> str:
    """Return the text of a page, or "" if it is not HTML or plain text with HTTP status 200.

    This function runs in the child process, because any page may make the parsers compute for minutes.

    Raises:
        Exception: any error of the parsers, or ValueError if the text is too long.
    """
    block, content_type, charset = content.block, content.content_type, None
    if content.is_http:
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
    text = page_text(block, content_type, charset)
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ValueError(TOO_LONG)
    return text


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


def page_text(content: bytes, content_type: str, charset: str | None) -> str:
    """Return the text that a visitor of a web page would see.

    Call this function only in the child process (`_text_of`), because HTML may make the parser compute for minutes.

    Args:
        content: the bytes of the page.
        content_type: the value of the Content-Type header of the page.
        charset: the character encoding; None: use the encoding in `content_type`, or else guess it from `content`.

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
    return _main_text(text)


def _main_text(html: str) -> str:
    """Return the text of the main content of an HTML page, without other text such as menus."""
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(html, main_content=True, alt_texts=False, preserve_formatting=True).strip()


def _read_arc(file: BufferedReader, bad: SkippedUnits, report_progress: ReportProgress) -> _Pages:
    """Yield each page in an archive in the format ARC, the predecessor of WARC.

    The library warcio is used, because fastwarc cannot read ARC. See `_read_warc` for the arguments and errors.
    """
    from warcio.archiveiterator import ArchiveIterator

    records = iter(ArchiveIterator(file, arc2warc=False))
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
        content = _call_library(record.content_stream().read, MAX_DOCUMENT_BYTES + 1)
        if not length.isdigit() or len(content) > MAX_DOCUMENT_BYTES:
            bad.add(TOO_LONG if length.isdigit() else "the length is unknown", number)
            continue
        if record.http_headers is None or record.http_headers.get_statuscode() != "200":
            continue
        headers = record.rec_headers
        page = _Page(number, headers.get_header("uri") or "", headers.get_header("archive-date") or "")
        content_type = record.http_headers.get_header("Content-Type") or ""
        yield page, _Content(content, content_type, is_http=False), len(content)


COMMON_CRAWL = Kind(
    "*.warc, *.wet or *.arc file (plain, gz, bz2 or zst)",
    _list_paths,
    _read,
    needs=("fastwarc", "resiliparse", "warcio"),
)
