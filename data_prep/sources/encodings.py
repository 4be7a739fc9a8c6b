"""Recognise the encoding of a text from its first bytes, and read UTF-16 and UTF-32 as UTF-8."""

import codecs
import io
from collections.abc import Iterator

from data_prep.compression import CHUNK_BYTES, DamagedFile, reader

# UTF-32 is tested before UTF-16, because the mark of UTF-32-LE begins with the mark of UTF-16-LE.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_FORMATS = {
    b"\x1f\x8b": "gzip", b"BZh91AY&SY": "bzip2", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z", b"PAR1\x15": "Parquet", b"ARROW1\0": "Arrow", b"%PDF-1.": "PDF",
}  # fmt: skip
"""The first bytes of files that are no text, whatever their name says."""
# A sequence with which ISO-2022 switches to the characters of Japan or Korea. All its bytes are ASCII.
_ISO_2022 = {b"\x1b$B": "ISO-2022-JP", b"\x1b$@": "ISO-2022-JP", b"\x1b$)C": "ISO-2022-KR"}
HEAD_BYTES = 1 << 16
"""Number of bytes at the start of a file that are enough for the functions of this module."""


def marked_encoding(head: bytes) -> str | None:
    """Return the codec of a text that begins with a byte order mark, or None. The codec removes the mark."""
    return next((codec for mark, codec in _MARKS.items() if head.startswith(mark)), None)


def looks_like_utf16(head: bytes) -> str | None:
    """Return "UTF-16LE" or "UTF-16BE" if a text without a mark is probably in this encoding, or None.

    ASCII characters, at least spaces and line ends, have a NUL byte in UTF-16: in UTF-16LE at the odd positions, in
    UTF-16BE at the even positions. Text in UTF-8 has no NUL bytes.
    """
    head = head[:HEAD_BYTES]
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) * 100 < len(head) or min(even, odd) * 10 > max(even, odd):
        return None
    return None if even == odd else "UTF-16LE" if odd > even else "UTF-16BE"


def why_no_utf8(head: bytes) -> str | None:
    """Return why a file without a byte order mark is not read as UTF-8, or None.

    The bytes of a compressed file, of UTF-16 or of ISO-2022 can be valid UTF-8.
    """
    for start, name in _FORMATS.items():
        if head.startswith(start):
            return (
                f"the content is that of a {name} file, not text. Give the file the name of its format, or convert it"
            )
    for switch, name in _ISO_2022.items():
        if switch in head:
            return f"the file looks like {name}, not UTF-8. {how_to_convert(name)}"
    if guess := looks_like_utf16(head):
        return f"the file looks like {guess} without a byte order mark, not UTF-8. {how_to_convert(guess)}"
    return None


def how_to_convert(encoding: str) -> str:
    """Return the sentence that says how to convert a file to UTF-8, for messages."""
    return f"Replace the file by the output of: iconv -f {encoding} -t UTF-8 FILE"


def needs_recoding(head: bytes) -> bool:
    """Return True if a file begins with the byte order mark of UTF-16 or UTF-32."""
    return marked_encoding(head) not in (None, "utf-8-sig")


def recoded(file: io.BufferedReader) -> io.BufferedReader:
    """Return a file object that reads a file in UTF-16 or UTF-32, which begins with a byte order mark, as UTF-8.

    Halves of UTF-16 pairs become bytes that are not valid UTF-8. So only the lines that contain them are bad.

    Args:
        file: the file, of which nothing has been read yet.
    """
    return reader(_utf8(file), file)


def _utf8(file: io.BufferedReader) -> Iterator[bytes]:
    name = marked_encoding(file.peek()) or "utf-8"
    decoder = codecs.getincrementaldecoder(name)("surrogatepass")
    content = b" "
    while content:
        content = file.read1(CHUNK_BYTES)
        try:
            yield decoder.decode(content, not content).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise DamagedFile(f"damaged: the file is not valid {name.upper()} ({error.reason})") from error
