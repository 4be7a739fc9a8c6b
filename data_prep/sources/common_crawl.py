"""Read web archives in the formats WARC, WET and ARC, such as Common Crawl. Each document is the text of one page."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from data_prep.compression import DamagedFile, open_plain
from data_prep.sources.base import Document, Kind, Part, ReportProgress, SkippedUnits
from data_prep.sources.bounded import Failure, parse_in_batches
from data_prep.sources.records import Record, arc_records, warc_records
from data_prep.sources.web_page import Content, Dropped, media_type_of, page_text

# The names of archives, without those of files that describe archives, which contain no page text.
_ARCHIVE = r"(?s)\A(?!.*\.(?:wat|cdxj?)(?:\.|\Z)).*\.(?:arc|warc|wet)(?:\.|\Z)"
# _URI matches an address as some crawlers write it: wget 1.19 and 1.20 write angle brackets around it,
# and browsertrix writes urn:text: before the address of a page in the record with its text.
_URI = re.compile(r"(<)?(?:urn:[\w-]+:(?=https?:))?(.*?)(?(1)>?)", re.DOTALL)

_PAGES = ("response", "resource", "conversion")
_DESCRIPTIONS = ("warcinfo", "request", "metadata")


class _Page(NamedTuple):
    """What is known of a page before it is parsed."""

    position: int
    """Byte of the decompressed file at which its record begins."""
    id: str
    """The address of the page."""
    date: str
    text: str = ""
    """The text, if the record contains nothing else (WET)."""


def _read(part: Part, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document]:
    """Yield the text of each page in one archive. See `Kind.read`."""
    with open_plain(part.path) as file:
        first_line = file.peek(1 << 12)[: 1 << 12].lstrip()
        if first_line[257:262] == b"ustar":
            raise DamagedFile("the file is a tar archive, not a WARC or ARC archive. Unpack it with: tar -xf FILE")
        if not first_line.startswith((b"WARC/", b"filedesc:")):
            raise DamagedFile("damaged: the file does not begin with a WARC or ARC record")
        read = arc_records if first_line.startswith(b"filedesc:") else warc_records
        pages = _pages(read(file, bad, report_progress), bad)
        for page, found in parse_in_batches(page_text, pages, report_progress):
            text = page.text if found is None else found
            # If a parser fails on a page, only this page is bad, not the archive. If a page exceeds a limit, the
            # archive is not even damaged.
            if isinstance(text, Failure) and text.is_limit:
                bad.add(text.why, page.position, page.id, damaged=False)
            elif isinstance(text, Failure):
                bad.add("not readable as a page", page.position)
            elif isinstance(text, Dropped):
                bad.drop(text.why)
            elif not text or text.isspace():
                bad.drop("page without text")
            else:
                yield Document(text, page.id, page.date)


def _pages(records: Iterator[Record], bad: SkippedUnits) -> Iterator[tuple[_Page, Content | None, int]]:
    """Yield for each record with a page: the page; its content, or None if the text is known; the number of bytes."""
    for record in records:
        headers, block = record.headers, record.block
        record_type = headers.get("warc-type", "").lower()
        if not record_type:
            bad.add("the record has no type", record.position)
        elif record_type == "revisit":
            bad.drop("revisit record, which refers to an earlier capture of the page")
        elif record_type not in (*_PAGES, *_DESCRIPTIONS):
            bad.drop("of a type that is not read, such as continuation")
        if record_type not in _PAGES:
            continue
        # The address without what some crawlers write around it.
        address = _URI.fullmatch(headers.get("warc-target-uri", "").strip())[2]  # type: ignore[index]
        page = _Page(record.position, address, headers.get("warc-date", ""))
        content_type = headers.get("content-type", "")
        if record_type != "conversion" or media_type_of(content_type) not in ("", "text/plain"):
            # Some crawlers write no Content-Type into the header of a response record.
            is_http = content_type.lower().startswith("application/http")
            is_http = is_http or (record_type == "response" and block.startswith(b"HTTP/"))
            yield page, Content(block, content_type, is_http), len(block)
            continue
        try:
            yield page._replace(text=block.decode("utf-8")), None, len(block)
        except UnicodeDecodeError:
            bad.add("not valid UTF-8", record.position)


COMMON_CRAWL = Kind(
    "*.warc, *.wet or *.arc file (plain, gz, bz2 or zst)", _read, "record", _ARCHIVE, needs=("fastwarc", "resiliparse")
)
