"""Find the text of a web page: decompress the HTTP response, decode the characters, and take the main content."""

import html
import io
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from data_prep.compression import PIECE_BYTES, zstd
from data_prep.sources.base import BOM, MAX_DOCUMENT_BYTES
from data_prep.sources.text import TOO_LONG

_XHTML = "application/xhtml+xml"
_HTML = ("text/html", _XHTML)


class Content(NamedTuple):
    """The content of a record whose text is not known yet. The child process receives it and finds the text."""

    block: bytes
    content_type: str
    is_http: bool
    """True if `block` is an HTTP response, False if it is the page itself."""


class Dropped(NamedTuple):
    """The reason for which a page is skipped, although the archive is not damaged."""

    why: str


def page_text(content: Content) -> str | Dropped:
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
            return Dropped("HTTP status other than 200")
        content_type = response.http_headers.get("Content-Type", "")
    media_type = media_type_of(content_type)
    if media_type not in (*_HTML, "text/plain"):
        return Dropped("not an HTML page or plain text")
    if content.is_http:
        block, is_decoded = _decode(response.reader.read(), _codings(response.http_headers))
    if len(block) > MAX_DOCUMENT_BYTES:
        return Dropped(TOO_LONG)
    text = _to_text(block, content_type, media_type in _HTML)
    if text is None:
        is_binary = "binary content that is declared as HTML or plain text"
        return Dropped(is_binary if is_decoded else "the Content-Encoding cannot be decoded")
    if media_type in _HTML:
        text = _main_text(as_html(text) if media_type == _XHTML else text)
    return Dropped(TOO_LONG) if len(text) > MAX_DOCUMENT_BYTES else text


def media_type_of(content_type: str) -> str:
    """Return the media type in the value of a Content-Type header, such as "text/html"."""
    return re.split(r"[;,\s]", content_type.strip(), maxsplit=1)[0].lower()


def _main_text(html: str) -> str:
    """Return the text of the main content of an HTML page, without other text such as menus."""
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(html, main_content=True, alt_texts=False, preserve_formatting=True).strip()


def _http(block: bytes) -> Any:
    """Parse an HTTP response. Return a fastwarc WarcRecord with the headers and the body, which is not decoded."""
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
        return self._decompressor.process(data, output_buffer_limit=MAX_DOCUMENT_BYTES + 1)


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
_CHUNK = re.compile(rb"\s{0,9}([0-9a-fA-F]{1,16})[ \t]*(?:;[^\n]*)?\r?\n")
_CUT_SIZE = re.compile(rb"\s*+[0-9a-fA-F]{0,16}+\s*+")


def _decode(body: bytes, codings: list[str]) -> tuple[bytes, bool]:
    """Decompress the body of an HTTP response, and join its chunks.

    Many crawlers store the body decoded, but the headers unchanged. Therefore a coding is ignored if the body is not in
    this coding.
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
    # If the size of a chunk is wrong, keep the rest as it is.
    rest = b"" if chunk or _CUT_SIZE.fullmatch(body, position) else body[position:]
    return b"".join([*chunks, rest]) or body


def _unpack(body: bytes, make: Callable) -> bytes | None:
    """Decompress a body. Return None if it is not in the format of the decompressors that `make` returns.

    If the body is cut short, return what there is, except for formats that have no typical first bytes.
    """
    file, pieces, num_bytes = io.BytesIO(body), [], 0
    member = make()
    while num_bytes <= MAX_DOCUMENT_BYTES and (data := file.read(PIECE_BYTES)):
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


_CHARSET = re.compile(r"charset\s*=\s*(?:[\"']\s*)?([\w.:-]+)", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_META = re.compile(rb"<meta\b((?:[^<>\"']|\"[^\"]*\"|'[^']*')*+)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(rb"(?<![\w-])([\w-]++)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'>]+)")
_XML_ENCODING = re.compile(rb"\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]+)")
_HEAD_BYTES = 1 << 13
"""Number of bytes in which the declaration of the encoding is searched. Browsers first read 1024 bytes, but load the
page again if they find a later declaration."""
_BOMS = ((BOM, "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
AS_IN_BROWSERS = {
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
        detected = "" if encoding else detect_encoding(content) or "utf-8"
        name = encoding or AS_IN_BROWSERS.get(detected.replace("-", "_"), detected)
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
        encodings.append(AS_IN_BROWSERS.get(known, known))
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


# If the first subset has no end, then no other one has.
_SUBSET, _SUBSET_END = re.compile(r"<!DOCTYPE[^<>\[]*\[", re.I), re.compile(r"\]\s*>")
_CDATA = re.compile(r"<!\[CDATA\[(.*?)(\]\]>|\Z)", re.S)
_EMPTY = re.compile(
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)([a-z][\w:.-]*)((?:\s[^<>]*)?)/>",
    re.I,
)
_PREFIX = re.compile(r"xmlns:([\w.-]+)\s*=\s*[\"']http://www\.w3\.org/1999/xhtml[\"']")


def as_html(xhtml: str) -> str:
    """Return an XHTML document as HTML, which has other rules.

    In HTML, <title/> and <script/> do not end, so that the document becomes the title; CDATA sections and definitions
    of entities are comments; elements with a prefix are no paragraphs.
    """
    if (subset := _SUBSET.search(xhtml)) and (end := _SUBSET_END.search(xhtml, subset.end())):
        xhtml = xhtml[: subset.start()] + xhtml[end.end() :]
    xhtml = _CDATA.sub(lambda section: html.escape(section[1], quote=False) if section[2] else section[0], xhtml)
    if prefix := _PREFIX.search(xhtml):
        xhtml = re.sub(rf"(</?){re.escape(prefix[1])}:", r"\1", xhtml)
    return _EMPTY.sub(r"<\1\2></\1>", xhtml)
