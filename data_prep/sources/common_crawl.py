"""Read web archives in the formats WARC, WET and ARC, such as Common Crawl. Each document is the text of one page."""

import io
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.sources.base import (
    BOM,
    MAX_DOCUMENT_BYTES,
    Document,
    Kind,
    Part,
    ReportProgress,
    Skipped,
    SkippedUnits,
)
from data_prep.sources.bounded import Failure, parse_in_batches
from data_prep.sources.compression import CHUNK_BYTES, DamagedFile, Eager, open_plain, zstd
from data_prep.sources.text import TOO_LONG
from data_prep.sources.walk import files_below

# ARCHIVE matches the names of archives. METADATA matches the names of files that describe archives. These files are not
# read, because they contain no page text.
ARCHIVE = re.compile(r"\.(?:arc|warc|wet)(?:\.|$)", re.IGNORECASE)
METADATA = re.compile(r"\.(?:wat|cdx|cdxj)(?:\.|$)", re.IGNORECASE)
# _URI matches an address as some crawlers write it: wget 1.19 and 1.20 write angle brackets around it,
# and browsertrix writes urn:text: before the address of a page in the record with its text.
_URI = re.compile(r"(<)?(?:urn:[\w-]+:(?=https?:))?(.*?)(?(1)>?)", re.DOTALL)
HTML = ("text/html", "application/xhtml+xml")

NO_LENGTH = "the length is unknown"
NO_TYPE = "the record has no type"
# The reasons for which a record is skipped, although the archive is not damaged.
NOT_200 = "HTTP status other than 200"
NO_PAGE = "not an HTML page or plain text"
NO_TEXT = "page without text"
NOT_DECODED = "the Content-Encoding cannot be decoded"
BINARY = "binary content that is declared as HTML or plain text"
OTHER_TYPE = "of a type that is not read, such as continuation"
REVISIT = "revisit record, which refers to an earlier capture of the page"


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


class _Dropped(NamedTuple):
    """The reason for which a record is skipped, although the archive is not damaged."""

    why: str


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
                        bad.add("not readable as a page", page.position)
                    continue
                text = page.text if text is None else text
                if isinstance(text, _Dropped):
                    bad.drop(text.why)
                elif not text or text.isspace():
                    bad.drop(NO_TEXT)
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
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    first_line = file.peek(64).lstrip().partition(b"\n")[0]
    # Parse strictly, to detect truncated records. Parse leniently only files in old WARC versions, and files with line
    # ends other than CR LF, because the strict parser rejects them.
    lenient = not first_line.endswith(b"\r") or first_line.startswith(b"WARC/0.")
    pages = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion | WarcRecordType.revisit
    described = WarcRecordType.warcinfo | WarcRecordType.request | WarcRecordType.metadata
    if file.peek(262)[257:262] == b"ustar":
        raise DamagedFile("the file is a tar archive, not a WARC or ARC archive. Unpack it with: tar -xf FILE")
    if not first_line.startswith(b"WARC/"):
        raise DamagedFile("damaged: the file does not begin with a WARC or ARC record")
    options = {"parse_http": False, "quirks_mode": lenient, "stream_detect": False}
    whole = Eager(file)
    records = iter(_call_library(ArchiveIterator, whole, WarcRecordType.any_type, **options))
    while True:
        record = _call_library(next, records, None)
        report_progress()
        # Check that the file ends with two line ends, as every complete record does. This check is needed because
        # fastwarc does not notice if the file ends within the header of a record. It may return an empty record then.
        is_empty = record is None or not record.content_length
        if is_empty and not lenient and not whole.tail.endswith(b"\n\r\n") and not file.peek(1):
            raise DamagedFile("cut short: the file ends within the header of a record")
        if record is None:
            return
        if not record.record_type & pages:
            if record.record_type == WarcRecordType.no_type:
                bad.add(NO_TYPE, record.stream_pos)
            elif not record.record_type & described:
                bad.drop(OTHER_TYPE)
            continue
        position, length, headers = record.stream_pos, record.content_length, record.headers
        if not headers.get("Content-Length", "").isdigit():
            bad.add(NO_LENGTH, position)
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
            bad.drop(REVISIT)
            continue
        page = _Page(position, _address(headers.get("WARC-Target-URI", "")), headers.get("WARC-Date", ""))
        content_type = headers.get("Content-Type", "")
        if record_type != "conversion" or _media_type(content_type) not in ("", "text/plain"):
            # Some crawlers write no Content-Type into the header of a response record.
            is_http = record.is_http or (record_type == "response" and block.startswith(b"HTTP/"))
            yield page, _Content(block, content_type, is_http), len(block)
            continue
        try:
            yield page._replace(text=block.decode("utf-8")), None, len(block)
        except UnicodeDecodeError:
            bad.add("not valid UTF-8", position)


def _is_damaged(headers: Any) -> bool:
    """Return True if the headers of a record contain zero bytes, or if those of two records were joined."""
    fields = [(name.lower(), value) for name, value in headers.items()]
    return any("\0" in name or "\0" in value for name, value in fields) or (
        sum(name in ("warc-type", "content-length") for name, _ in fields) > 2
    )


def _address(uri: str) -> str:
    """Return the address of a page, without what some crawlers write around it."""
    return _URI.fullmatch(uri.strip())[2]  # type: ignore[index]


def _media_type(content_type: str) -> str:
    """Return the media type in the value of a Content-Type header, such as "text/html"."""
    return re.split(r"[;,\s]", content_type.strip(), maxsplit=1)[0].lower()


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


def _text_of(content: _Content) -> "str | _Dropped":
    """Return the text of a page, or the reason for which it is skipped.

    For HTML, the text is what a visitor of the page would read as the main content; for plain text, it is everything.

    This function runs in the child process, because any page may make the parsers compute for minutes.

    Raises:
        Exception: any error of the parsers.
    """
    block, content_type, is_decoded = content.block, content.content_type, True
    if content.is_http:
        response = _http(block)
        if response.http_headers is None or response.http_headers.status_code != 200:
            return _Dropped(NOT_200)
        content_type = response.http_headers.get("Content-Type", "")
    media_type = _media_type(content_type)
    if media_type not in (*HTML, "text/plain"):
        return _Dropped(NO_PAGE)
    if content.is_http:
        block, is_decoded = _decode(response.reader.read(), _codings(response.http_headers))
    if len(block) > MAX_DOCUMENT_BYTES:
        return _Dropped(TOO_LONG)
    text = _to_text(block, content_type, media_type in HTML)
    if text is None:
        return _Dropped(BINARY if is_decoded else NOT_DECODED)
    text = text if media_type == "text/plain" else _main_text(text)
    return _Dropped(TOO_LONG) if len(text) > MAX_DOCUMENT_BYTES else text


def _http(block: bytes) -> Any:
    """Parse an HTTP response. Return a fastwarc WarcRecord with the headers and the body, which is not decoded.

    Raises:
        OSError: if the headers cannot be parsed.
    """
    from fastwarc.warc import WarcRecord

    response = WarcRecord()
    response.is_http = True
    response.set_bytes_content(block)
    response.parse_http(auto_decode="none", quirks_mode=True)
    return response


def _codings(headers: Any) -> list[str]:
    """Return the encodings of a body in the order in which they were applied, such as ["gzip", "chunked"]."""
    fields = [(name.strip().lower(), value) for name, value in headers.items()]
    values = [value for wanted in ("content-encoding", "transfer-encoding") for name, value in fields if name == wanted]
    return [coding.strip().lower() for value in values for coding in value.split(",")]


# Decode the body of an HTTP response


class _Brotli:
    """A Brotli decompressor with the interface of the zlib decompressors."""

    unused_data = b""

    def __init__(self) -> None:
        import brotli

        self._decompressor = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return self._decompressor.is_finished()

    def decompress(self, data: bytes) -> bytes:
        return self._decompressor.process(data)


_zlib = partial(zlib.decompressobj, wbits=47)  # in zlib, wbits=47 means the gzip or the zlib format
_raw_deflate = partial(zlib.decompressobj, wbits=-15)
# Some servers send "deflate" without the header of the zlib format, which the standard demands.
_DECOMPRESSORS: dict[str, tuple[Callable, ...]] = {
    "gzip": (_zlib,),
    "x-gzip": (_zlib,),
    "deflate": (_zlib, _raw_deflate),
    "br": (_Brotli,),
    "zstd": (zstd,),
    "compress": (),
    "x-compress": (),
}
"""For each content coding, the functions that make a decompressor; none if it cannot be decompressed."""
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;[^\n]*)?\r?\n")
_LINE_END = re.compile(rb"\r?\n")


def _decode(body: bytes, codings: list[str]) -> tuple[bytes, bool]:
    """Decompress the body of an HTTP response, and join its chunks.

    Many crawlers store the body decoded, but the headers unchanged. Therefore a coding is ignored if the body is not in
    this coding.

    Args:
        body: the body.
        codings: the encodings in the order in which they were applied; see `_codings`.

    Returns:
        The decoded body; at most a few KB more than MAX_DOCUMENT_BYTES, if it is longer. And False if a coding was
        ignored.
    """
    is_decoded = True
    for coding in reversed(codings):
        if coding == "chunked":
            body = _join_chunks(body)
        elif coding in _DECOMPRESSORS:
            for make in _DECOMPRESSORS[coding]:
                unpacked = _unpack(body, make)
                if unpacked is not None:
                    body = unpacked
                    break
            else:
                is_decoded = False
    return body, is_decoded


def _join_chunks(body: bytes) -> bytes:
    """Join the chunks of a body. Return the body unchanged if it has none. If it is cut short, return what there is."""
    chunks, position = [], 0
    while (chunk := _CHUNK.match(body, position)) and (num_bytes := int(chunk[1], 16)):
        chunks.append(body[chunk.end() : chunk.end() + num_bytes])
        position = chunk.end() + num_bytes
        if line_end := _LINE_END.match(body, position):
            position = line_end.end()
    return b"".join(chunks) or body


def _unpack(body: bytes, make: Callable) -> bytes | None:
    """Decompress a body. Return None if it is not in the format of the decompressors that `make` returns.

    If the body is cut short, return what there is, except for formats that have no typical first bytes.
    """
    file, pieces, num_bytes = io.BytesIO(body), [], 0
    member = make()
    while num_bytes <= MAX_DOCUMENT_BYTES and (data := file.read(CHUNK_BYTES // 64)):
        try:
            pieces.append(member.decompress(data))
        except MemoryError:
            raise
        except Exception:  # each library has its own error types
            return None
        num_bytes += len(pieces[-1])
        if member.eof:
            # A gzip file may have several members. Other bytes after the end are ignored, as browsers do.
            file.seek(-len(member.unused_data), io.SEEK_CUR)
            if not body.startswith(b"\x1f\x8b", file.tell()):
                return b"".join(pieces)
            member = make()
    if num_bytes <= MAX_DOCUMENT_BYTES and (make in (_raw_deflate, _Brotli) or (body and not num_bytes)):
        return None
    return b"".join(pieces)


# Find the character encoding of a page


_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_META = re.compile(rb"<meta\b((?:[^>\"']|\"[^\"]*\"|'[^']*')*)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(rb"([\w-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'>]+)")
_XML_ENCODING = re.compile(rb"\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]+)")
_HEAD_BYTES = 1 << 13
"""Number of bytes in which the declaration of the encoding is searched. Browsers first read 1024 bytes, but load the
page again if they find a later declaration."""
_BOMS = ((BOM, "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_AS_IN_BROWSERS = {
    "big5": "big5hkscs",
    "euc_jp": "euc_jis_2004",
    "euc_kr": "cp949",
    "gbk": "gb18030",
    "iso8859-11": "cp874",
    "shift_jis": "cp932",
}
"""For each encoding of Python, the larger one that browsers use under the same name."""
_CONTROLS = bytes([*range(9), 11, *range(14, 27), *range(28, 32)])
"""The bytes that make a browser treat content as binary (the binary data bytes of the MIME Sniffing Standard)."""
_SIGNATURES = (b"%PDF-", b"%!PS-", b"PK\x03\x04", b"{\\rtf")
"""First bytes of files that are not text, but may contain few of the _CONTROLS."""


def _to_text(content: bytes, content_type: str, is_html: bool) -> str | None:
    """Return the characters of a page, or None if its content is binary.

    The encoding is found in the order of browsers (https://html.spec.whatwg.org/#determining-the-character-encoding):
    from the byte order mark, from `content_type`, from the page itself, or else by guessing. Unlike in browsers, an
    encoding is not used if most characters other than ASCII are invalid in it.
    """
    from resiliparse.parse.encoding import detect_encoding

    encodings = _declared_encodings(content, content_type, is_html)
    if encodings and encodings[0].startswith("utf-16"):
        content, encodings = content.decode(encodings[0], "replace").encode("utf-8", "replace"), ["utf-8"]
    start = content[: 1 << 14]
    num_controls = len(start) - len(start.translate(None, _CONTROLS))
    if num_controls > 2 + len(start) // 50 or start.lstrip().startswith(_SIGNATURES):
        return None
    if encodings[:1] in ([], ["cp1252"]) and not content.isascii():
        # Servers declare windows-1252 (under the name ISO-8859-1) by default, also for pages in UTF-8.
        encodings = ["utf-8", *encodings]
    text = ""
    for encoding in [*encodings, None]:
        name = encoding or detect_encoding(content) or "utf-8"
        try:
            text = content.decode(name)
            break
        except UnicodeDecodeError:
            text = content.decode(name, "replace")
        num_invalid = text.count("\ufffd") - content.count(b"\xef\xbf\xbd")
        if 2 * num_invalid <= len(text) - len(text.encode("ascii", "ignore")):
            break
    return text.removeprefix("\ufeff")


def _declared_encodings(content: bytes, content_type: str, is_html: bool) -> list[str]:
    """Return the Python names of the encodings that a page declares and browsers know, the most important one first."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    for bom, encoding in _BOMS:
        if content.startswith(bom):
            return [encoding]
    # In UTF-16, every second byte of markup, spaces and English text is zero.
    even, odd = content[:1024:2].count(0), content[1:1024:2].count(0)
    if even + odd > min(len(content), 1024) // 8 and (8 * even < odd or 8 * odd < even):
        return ["utf-16-le" if even < odd else "utf-16-be"]
    in_header = _CHARSET.search(content_type)
    labels = [in_header and in_header[1], _declared_in_html(content[:_HEAD_BYTES]) if is_html else None]
    encodings: list[str] = []
    for label in labels:
        known = map_encoding_to_html5(label, fallback_utf8=False) if label else None
        if known is None:
            continue
        # UTF-16 is also declared for pages in other encodings, which have no zero bytes, and for binary content.
        if known.startswith("utf-16") and (b"\0" not in content or "\ufffd" in content[:2000].decode(known, "replace")):
            continue
        encodings.append(_AS_IN_BROWSERS.get(known, known))
    return encodings


def _declared_in_html(head: bytes) -> str | None:
    """Return the name of the encoding that an HTML page declares in a meta element or XML declaration, if any."""
    for meta in _META.finditer(_COMMENT.sub(b"", head)):
        said = {name.lower(): value.strip(b"\"' \t/") for name, value in _ATTRIBUTE.findall(meta[1])}
        if b"charset" in said:
            return said[b"charset"].decode("latin-1")
        is_content_type = said.get(b"http-equiv", b"").lower() == b"content-type"
        if is_content_type and (charset := _CHARSET.search(said.get(b"content", b"").decode("latin-1"))):
            return charset[1]
    declared = _XML_ENCODING.match(head)
    return declared[1].decode("latin-1") if declared else None


def _main_text(html: str) -> str:
    """Return the text of the main content of an HTML page, without other text such as menus."""
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(html, main_content=True, alt_texts=False, preserve_formatting=True).strip()


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
            bad.add(NO_LENGTH, number)
            continue
        if len(block) > MAX_DOCUMENT_BYTES:
            bad.add(TOO_LONG, number, damaged=False)
            continue
        if len(block) < record.length:
            raise DamagedFile(f"cut short: record {number:,} has {len(block):,} of its {record.length:,} bytes")
        headers = record.rec_headers
        page = _Page(number, _address(headers.get_header("uri") or ""), headers.get_header("archive-date") or "")
        yield page, _Content(block, headers.get_header("content-type") or "", block.startswith(b"HTTP/")), len(block)


COMMON_CRAWL = Kind(
    "*.warc, *.wet or *.arc file (plain, gz, bz2 or zst)",
    _list_paths,
    _read,
    needs=("fastwarc", "resiliparse", "warcio"),
)
