"""Read books. Each text, Markdown or EPUB file is one document. Project Gutenberg's header and licence are removed."""

import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.compression import DamagedFile
from data_prep.sources.base import MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, Skipped, SkippedUnits
from data_prep.sources.bounded import Failure, parse
from data_prep.sources.encodings import HEAD_BYTES, how_to_convert, marked_encoding, why_no_utf8
from data_prep.sources.epub import read_epub
from data_prep.sources.text import TOO_LONG

# Project Gutenberg adds text before and after a book.
# _START matches the line before the book: "*** START OF THE PROJECT GUTENBERG EBOOK ...", in old files "... THIS ...".
# _OLD_START matches the last line of the small print, a legal text that old files have before or after the book.
# _END matches the line after the book.
# _LICENCE is used instead of _END if _START and _OLD_START found no line before the book. _LICENCE does not match a
# line that begins with "End of Project Gutenberg", because such a line may also occur in an ordinary text.
# _PRODUCED matches the note that says who made the electronic text.
_START = re.compile(
    r"^[ \t]*\*{3}[ \t]*START OF (?:THE|THIS) PROJECT GUTENBERG[^\n*]*(?:\n[^\n*]+)?\*{3}[ \t]*$", re.I | re.M
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


def _read(part: Part, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the book in a file. See `Kind.read`."""
    if part.name.lower().endswith(".epub"):
        found = parse(read_epub, (part.path, part.name), report_progress)
    else:
        found = _plain_text(part), []
    if isinstance(found, Failure):
        yield Skipped(part.name, found.why, damaged=not found.is_limit)
        return
    text, skipped = found
    if text and not text.isspace():
        yield Document(without_gutenberg(text), part.name)
    elif not skipped:
        yield Skipped(part.name, "empty file", damaged=False)
    yield from skipped


def _plain_text(part: Part) -> str:
    """Return the text of a plain text or Markdown file, in which each line ends with a line feed.

    Otherwise, the lines of books that were written on other systems would end with another token.
    """
    if part.end > MAX_DOCUMENT_BYTES:
        raise DamagedFile(TOO_LONG)
    content = Path(part.path).read_bytes()
    codec = marked_encoding(content)
    if not codec and (why := why_no_utf8(content[:HEAD_BYTES])):
        raise DamagedFile(why)
    try:
        return content.decode(codec or "utf-8").lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        if codec:
            raise DamagedFile(
                f"the text begins with the mark of {codec}, but is not valid at byte {error.start}"
            ) from error
        hint = f"{how_to_convert('WINDOWS-1252')} (if it is in Windows-1252)"
        raise DamagedFile(f"the text is not valid UTF-8 at byte {error.start}. {hint}") from error


BOOKS = Kind("*.txt, *.md or *.epub file", _read, wanted=r"\.(?:txt|md|epub)\Z", wants_folder=True)
