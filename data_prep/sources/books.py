"""Read books. Each text, Markdown or EPUB file is one document. Project Gutenberg's header and licence are removed."""

import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

from data_prep.sources.base import BOM, MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, Skipped
from data_prep.sources.bounded import Failure, parse
from data_prep.sources.compression import BOMB_FLOOR_BYTES, BOMB_RATIO, DamagedFile
from data_prep.sources.text import TOO_LONG, paths_ending_in

# Project Gutenberg adds text before and after a book.
# _START matches the line before the book: "*** START OF THE PROJECT GUTENBERG EBOOK ...", in old files "... THIS ...".
# _OLD_START matches the last line of the small print, a legal text that old files have before or after the book.
# _END matches the line after the book.
# _LICENCE is used instead of _END if _START and _OLD_START found no line before the book. _LICENCE does not match a
# line that begins with "End of Project Gutenberg", because such a line may also occur in an ordinary text.
# _PRODUCED matches the note that says who made the electronic text.
_START = re.compile(
    r"^[ \t]*\*{3}[ \t]*START OF (?:THE|THIS) PROJECT GUTENBERG[^\n*]*(?:\n[^\n*]+)?\*{3}[ \t\r]*$", re.I | re.M
)
_END = re.compile(
    r"^[ \t]*(?:\*{3}[ \t]*END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)", re.I | re.M
)
_LICENCE = re.compile(r"^[ \t]*\*{3}[ \t]*END OF (?:THE|THIS) PROJECT GUTENBERG", re.I | re.M)
_OLD_START = re.compile(r"^\*END\*?[ \t]*THE SMALL PRINT![^\n]*$", re.I | re.M)
_PRODUCED = re.compile(
    r"\s*(?:Produced by|E-text prepared by|Transcribed from)[^\n]*\n(?:[^\S\n]*\S[^\n]*\n)*(?=[^\S\n]*\n)", re.I
)


def without_gutenberg(text: str) -> str:
    """Remove the header, producer note and licence of Project Gutenberg from a text. Return other texts unchanged."""
    start = _START.search(text)
    if start is None:
        old = _OLD_START.search(text)
        # Old files have the small print (a legal text) before or after the book. If there is more text after the small
        # print than before it, the small print is before the book.
        start = old if old and len(text) - old.end() > old.start() else None
    end = (_END if start else _LICENCE).search(text, start.end() if start else 0)
    if start is None and end is None:
        return text
    body = text[start.end() if start else 0 : end.start() if end else len(text)]
    produced = _PRODUCED.match(body)
    body = (body[produced.end() :] if produced else body).strip()
    return f"{body}\n" if body else text


def _read(part: Part, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the book in a file, or a Skipped object if the file is empty, cannot be read or exceeds a limit."""
    try:
        if part.name.lower().endswith(".epub"):
            text = parse(f"{__name__}:{_epub_text.__name__}", part.path, report_progress)
        else:
            text = _plain_text(part)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
        return
    if isinstance(text, Failure):
        yield Skipped(part.name, text.why, damaged=not text.is_limit)
    elif text and not text.isspace():
        yield Document(without_gutenberg(text), part.name)
    else:
        yield Skipped(part.name, "empty file", damaged=False)


def _plain_text(part: Part) -> str:
    """Return the text of a plain text or Markdown file.

    Raises:
        DamagedFile: if the file is too long or not valid UTF-8.
    """
    if part.end > MAX_DOCUMENT_BYTES:
        raise DamagedFile(TOO_LONG)
    try:
        return Path(part.path).read_bytes().removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"the text is not valid UTF-8 at byte {error.start}") from error


def _epub_text(path: str) -> str:
    """Return the text of the chapters of an EPUB file, in the reading order that the EPUB defines (its spine).

    An EPUB file is a zip archive. It is read in memory, and nothing is unpacked to disk. This function runs in the
    child process (see `bounded`).

    Raises:
        DamagedFile: if the file cannot be read or is too large.
    """
    from ebooklib import ITEM_DOCUMENT, epub
    from resiliparse.extract.html2text import extract_plain_text

    try:
        _check_size(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore ebooklib's warnings that its defaults will change
            book = _without_media(epub.EpubReader)(path, {"ignore_ncx": True}).load()
        chapters, length, html_length = [], 0, 0
        for name, _ in book.spine:
            item = book.get_item_with_id(name)
            if item is not None and item.get_type() == ITEM_DOCUMENT and not isinstance(item, epub.EpubNav):
                html = item.get_content().decode("utf-8", "replace")
                html_length += len(html)
                # Limit the total length of the chapters, because an EPUB can list the same chapter many times. The
                # number of unpacked bytes, which is limited too, includes this chapter only once.
                if html_length > _MAX_UNPACKED_BYTES:
                    raise DamagedFile(TOO_LONG)
                chapters.append(extract_plain_text(html, main_content=False, alt_texts=False).strip())
                length += len(chapters[-1])
                if length > MAX_DOCUMENT_BYTES:
                    raise DamagedFile(TOO_LONG)
    except (DamagedFile, MemoryError):
        raise
    except Exception as error:  # catch all: zipfile, ebooklib and the XML parser raise many types of errors
        raise DamagedFile(
            f"damaged: the file is not readable as EPUB ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    text = "\n\n".join(filter(None, chapters))
    if len(text) > MAX_DOCUMENT_BYTES:
        raise DamagedFile(TOO_LONG)
    return text


_MAX_UNPACKED_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Maximum number of bytes that are unpacked from an EPUB file, without pictures and other media."""


def _check_size(path: str) -> None:
    """Raise DamagedFile if an EPUB file says that it is a decompression bomb."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    packed = sum(member.compress_size for member in members)
    if unpacked > BOMB_FLOOR_BYTES + BOMB_RATIO * packed:
        raise DamagedFile(
            f"the file is a decompression bomb: its {packed:,} bytes would decompress to {unpacked:,} bytes"
        )


def _without_media(reader: type) -> type:
    """Return a subclass of ebooklib's EpubReader that unpacks no media, and at most _MAX_UNPACKED_BYTES bytes in total.

    ebooklib reads all files of an EPUB into memory, although only the chapters are needed.
    """

    class TextReader(reader):
        num_bytes = 0

        def read_file(self, name: str) -> bytes:
            if name.lower().endswith(_MEDIA):
                return b""
            # The size that the archive states can be wrong, so read at most one byte too many.
            with self.zf.open(posixpath.normpath(name)) as file:
                content = file.read(_MAX_UNPACKED_BYTES - self.num_bytes + 1)
            self.num_bytes += len(content)
            if self.num_bytes > _MAX_UNPACKED_BYTES:
                raise DamagedFile(
                    f"the file is too large: its texts decompress to more than the {_MAX_UNPACKED_BYTES:,} bytes that "
                    "are accepted"
                )
            return content

    return TextReader


_MEDIA = (
    *(".jpg", ".jpeg", ".png", ".gif", ".svg", ".webp", ".bmp", ".tif", ".tiff"),
    *(".mp3", ".m4a", ".mp4", ".m4v", ".ogg", ".oga", ".ogv", ".wav", ".webm", ".pdf"),
    *(".ttf", ".otf", ".woff", ".woff2", ".css", ".js"),
)
"""Endings of the files in an EPUB that contain no text of the book."""

BOOKS = Kind("*.txt, *.md or *.epub file", paths_ending_in(".txt", ".md", ".epub"), _read, wants_folder=True)
