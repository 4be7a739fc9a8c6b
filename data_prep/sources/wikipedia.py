"""Read Wikipedia dumps (pages-articles). Each article is one document, its title and its text without markup.

Tables and references are removed. Redirects and pages of other namespaces (talk, templates, categories, files) are
skipped.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.sources.base import MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, Skipped, SkippedUnits
from data_prep.sources.bounded import Failure, parse_in_batches
from data_prep.sources.compression import (
    CHUNK_BYTES,
    DamagedFile,
    Eager,
    bzip2_streams,
    open_bzip2_streams,
    open_plain,
)
from data_prep.sources.text import TOO_LONG, paths_ending_in

_ARTICLES = 0
"""Number of the MediaWiki namespace that contains the articles."""
# Tags that are removed together with their content, because the content is not running text.
_DROPPED_TAGS = frozenset(
    [
        "ref",
        "references",
        "gallery",
        "math",
        "chem",
        "timeline",
        "score",
        "table",
        "syntaxhighlight",
        "source",
        "code",
        "pre",
        "imagemap",
        "templatestyles",
        "section",
        "inputbox",
        "hiero",
        "graph",
        "mapframe",
        "maplink",
    ]
)
# Matches the targets of links that show a picture or add the page to a category, in any language. These targets begin
# with a word and a colon, without a space after the colon. Such links are removed, because readers do not see them as
# text. Exception: a link of this form with a |, such as [[wikt:art|art]], is kept unless it shows a file (`_is_file`).
_FILE_LINK = re.compile(r"^\s*(?:[^\W\d_][\w -]{1,20}):(?!\s)", re.UNICODE)
_QUOTES = re.compile(r"'{5}|'{2,3}")
"""Matches the quote characters that mark bold and italic text in wiki markup."""
_HEADING = "\x02"
"""Character that marks a heading. It is placed before the level and the text of the heading.

The text of an article cannot contain this character. XML does not allow the character itself, and `_visible_text`
removes it if an HTML entity encodes it.
"""
_DOUBLE_UNDERSCORE = re.compile(r"__[A-Z]+__")
"""Matches the switches for the page layout, such as __NOTOC__ (no table of contents)."""
_EMPTY_BRACKETS = re.compile(r" ?\([\s,;:–-]{0,20}\)")
"""Matches round brackets that are empty, because the template or link inside them was removed."""
_SPACES = re.compile(r"[ \t\xa0]+")
_BLANK_LINES = re.compile(r"\n\s*\n+")
# Limit on the number of opening brackets and tags. No real article has so many. An article with more is not parsed,
# because it may have been made to hang parsers.
_MAX_OPENINGS = 20_000
_OPENING = re.compile(r"\{\{|\[\[|\{\||<[a-zA-Z]")
# Limit on (number of unclosed brackets and tags) x (page length). A limit is needed because the parser reads the rest
# of the page again for each unclosed bracket or tag. At the limit, parsing takes seconds.
_MAX_UNCLOSED_CHARACTERS = 100_000_000
_PAIRS = (("{{", "}}"), ("[[", "]]"), ("{|", "|}"))
_TAG = re.compile(r"<(/?)([a-zA-Z]+)(?:[^<>]*?(/)\s*>)?", re.ASCII)
# HTML tags that need no end tag. They are not counted as unclosed tags.
_NEVER_CLOSED = frozenset(("br", "wbr", "hr", "img", "meta", "link", "li", "dt", "dd", "th", "td", "tr"))


def article_text(markup: str) -> str:
    """Return the running text of an article, with its headings.

    Raises:
        ValueError: if the markup has more brackets and tags, or more unclosed brackets and tags, than any real article.
    """
    import mwparserfromhell

    if len(_OPENING.findall(markup)) > _MAX_OPENINGS:
        raise ValueError("too many templates, links, tables or tags for an article")
    if _num_unclosed(markup) * len(markup) > _MAX_UNCLOSED_CHARACTERS:
        raise ValueError("too many templates, links, tables or tags that are never closed")
    text = _visible_text(mwparserfromhell.parse(_QUOTES.sub("", markup), skip_style_tags=True))
    text = _EMPTY_BRACKETS.sub("", _SPACES.sub(" ", _DOUBLE_UNDERSCORE.sub("", text)))
    lines = [line.lstrip(" *#:;").rstrip(" ") for line in text.split("\n")]
    return _BLANK_LINES.sub("\n\n", "\n".join(_without_empty_sections(lines))).strip()


def _num_unclosed(markup: str) -> int:
    """Return the number of templates, links, tables and tags that are opened but not closed."""
    unclosed = sum(max(0, markup.count(opening) - markup.count(closing)) for opening, closing in _PAIRS)
    tags: Counter[str] = Counter()
    for is_end_tag, name, is_empty_tag in _TAG.findall(markup):
        tags[name.lower()] += -1 if is_end_tag else 0 if is_empty_tag else 1
    return unclosed + sum(max(0, count) for name, count in tags.items() if name not in _NEVER_CLOSED)


def _visible_text(code: Any) -> str:
    """Return the visible text of parsed markup, without tables, files and references.

    Each heading in the returned text begins with the character _HEADING and the level of the heading.

    Tables, files and references are skipped while the nodes of the parsed markup are read. They are not deleted with
    mwparserfromhell's method `remove`, because `remove` searches the complete page for each node that it deletes.
    """
    from mwparserfromhell import nodes
    from mwparserfromhell.definitions import is_visible

    parts: list[str] = []
    for node in code.nodes:
        if isinstance(node, nodes.Text):
            parts.append(node.value)
        elif isinstance(node, nodes.Wikilink):
            # Skip [[File:...]], [[Category:...]] and [[de:...]], because readers of the page do not see them as text.
            # Keep [[:Category:...]] (with a colon in front), because readers see this link as text.
            if _FILE_LINK.match(str(node.title)) and (node.text is None or _is_file(str(node))):
                continue
            parts.append(_visible_text(node.title if node.text is None else node.text))
        elif isinstance(node, nodes.Tag):
            if node.contents and is_visible(str(node.tag)) and str(node.tag).strip().lower() not in _DROPPED_TAGS:
                parts.append(_visible_text(node.contents))
        elif isinstance(node, nodes.Heading):
            parts.append(f"{_HEADING}{node.level}{_visible_text(node.title).strip()}")
        elif isinstance(node, nodes.ExternalLink):
            if not node.brackets:
                parts.append(str(node.url))
            elif node.title is not None:
                parts.append(_visible_text(node.title))
        elif isinstance(node, nodes.HTMLEntity):
            # An HTML entity can encode any character, also the character _HEADING. Remove _HEADING here, because in the
            # returned text only headings may contain it.
            parts.append(node.normalize().replace(_HEADING, ""))
    return "".join(parts)


def _without_empty_sections(lines: list[str]) -> list[str]:
    """Return the lines without the headings of sections that contain no text.

    A heading in `lines` begins with the character _HEADING and the level of the heading. Both are removed from the
    headings that are kept.
    """
    kept: list[str] = []
    # Keep a heading only if its section contains text, directly or in a subsection. A subsection has a larger heading
    # level than its section, and levels are 1 to 6. Read the lines from the last to the first, and keep a heading if
    # its level is smaller than `keep_below`:
    # - A line with text sets `keep_below` to 9, so the nearest heading above the text is kept.
    # - A heading that is kept sets `keep_below` to its own level. Above it, a heading of the same or a larger level is
    #   kept only if more text is found, but the heading of the section that contains it is always kept.
    keep_below = 0
    for line in reversed(lines):
        if not line.startswith(_HEADING):
            kept.append(line)
            keep_below = 9 if line else keep_below
            continue
        level = int(line[1])
        if level < keep_below:
            kept.append(line[2:])
            keep_below = level
    return kept[::-1]


def _is_file(link: str) -> bool:
    """Return True if a link shows a file, such as a picture. Such a link contains a file name followed by a |."""
    return bool(re.search(r"\.(?:jpe?g|png|gif|svg|tiff?|webp|ogg|ogv|oga|webm|pdf|djvu|mid)\s*\|", link, re.I))


def _read(part: Part, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the articles in one part of a dump, and Skipped objects, which describe the content that was skipped.

    If the part is damaged, the articles before the damage are yielded.
    """
    if part.start == part.end:
        yield Skipped(part.name, "empty file", damaged=False)
        return
    bad = SkippedUnits(part.name, "page")
    if part.start > 0:
        first, last = bzip2_streams(part.path, part.start, part.end)
        if first == last:  # no bzip2 stream of the dump begins in this part, so the part has no articles to read
            return
    try:
        with closing(_open_part(part)) as file:
            articles = _short_enough(_pages(file), bad)
            for article, text in parse_in_batches(f"{__name__}:{article_text.__name__}", articles, report_progress):
                if isinstance(text, Failure):
                    why = text.why if text.is_limit else f"not readable ({text.why})"
                    bad.add(why, article.number, article.title if text.is_limit else "", damaged=not text.is_limit)
                elif text:
                    yield Document(f"{article.title}\n\n{text}", article.title, article.date)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


def _short_enough(articles: Iterator["_Article"], bad: SkippedUnits) -> Iterator[tuple["_Article", str, int]]:
    """Yield each article, its markup and its length, without the articles that are too long."""
    for article in articles:
        if len(article.markup) > MAX_DOCUMENT_BYTES:
            bad.add(TOO_LONG, article.number)
        else:
            yield article, article.markup, len(article.markup)


def _open_part(part: Part) -> "Eager | _Streams":
    """Return a file-like object from which a part of a dump can be read as if it were a complete dump."""
    if part.start == 0 and part.end == Path(part.path).stat().st_size:
        return Eager(open_plain(part.path))
    return _Streams(part.path, *bzip2_streams(part.path, part.start, part.end))


class _Streams:
    """A file-like object that reads consecutive bzip2 streams of a multistream dump as if they were a complete dump.

    A multistream dump consists of many bzip2 streams that can be decompressed independently. `read` returns the XML
    header of the dump, then the content of the chosen streams, and then the XML end tag.

    Args:
        path: the dump, a .bz2 file.
        first: byte at which the first chosen stream begins.
        last: byte at which the last chosen stream ends.
    """

    _END = b"</mediawiki>"

    def __init__(self, path: str, first: int, last: int):
        # Also read the first bzip2 stream of the dump if it is not one of the chosen streams, because it contains the
        # XML header.
        head = [(0, bzip2_streams(path, 1, 1)[0])] if first > 0 else []
        self._files = [open_bzip2_streams(path, *where) for where in [*head, (first, last)]]
        self._current, self._tail = 0, b""

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of XML, or b"" at the end.

        At most `size` bytes are read from the file, or CHUNK_BYTES if `size` is not positive. The end tag, which is not
        in the file, is returned last and always whole.
        """
        while self._current < len(self._files):
            data = self._files[self._current].read1(size if size > 0 else CHUNK_BYTES)
            if data:
                self._tail = (self._tail + data)[-64:]
                return data
            self._current += 1
        if self._tail.rstrip().endswith(self._END):
            return b""
        self._tail = self._END
        return self._END

    def close(self) -> None:
        """Close the files from which the XML header and the bzip2 streams are read."""
        for file in self._files:
            file.close()


class _Article(NamedTuple):
    """An article of a dump, as of its last revision."""

    title: str
    markup: str
    date: str
    number: int
    """Number of the page in the dump, counted from 1."""


class _LimitedPages:
    """A file-like object that reads a dump, and raises DamagedFile if a page is so long that it could fill the memory.

    The XML parser keeps a page in memory until the page ends.
    """

    def __init__(self, file: "Eager | _Streams"):
        self._file, self._num_bytes = file, 0

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        end = max(content.rfind(b"</page>"), content.rfind(b"</revision>"))
        self._num_bytes = len(content) - end if end >= 0 else self._num_bytes + len(content)
        if self._num_bytes > _MAX_PAGE_BYTES:
            raise DamagedFile(f"a page of the dump has more than {_MAX_PAGE_BYTES >> 20} MiB")
        return content


_MAX_PAGE_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Maximum number of bytes of XML in a page."""


def _pages(file: "Eager | _Streams") -> Iterator[_Article]:
    """Yield each article of a dump.

    Raises:
        DamagedFile: if the dump is damaged. The articles before the damage are yielded first.
    """
    import mwxml

    number = 0
    try:
        for page in mwxml.Dump.from_file(_LimitedPages(file)):
            number += 1
            if page.namespace != _ARTICLES or page.redirect:
                continue
            text, date = None, ""
            for revision in page:
                text = revision.text
                date = revision.timestamp.long_format() if revision.timestamp else ""
            if text:
                # Replace lone surrogates (halves of UTF-16 pairs), because UTF-8 cannot encode them. A dump can contain
                # them as XML character references.
                text = text.encode("utf-8", "replace").decode("utf-8")
                yield _Article(page.title or "", text, date, number)
    except DamagedFile:
        raise
    except Exception as error:
        # Catch all exceptions: XML parse errors, mwxml errors, and errors from values that mwxml cannot convert.
        raise DamagedFile(f"damaged: not readable as a MediaWiki dump after page {number} ({error})") from error


DUMP = re.compile(r"\.xml(?:\.|-|$)", re.IGNORECASE)
"""Pattern in the name of a file that is read from a folder."""


def _list_paths(root: Path) -> list[Path]:
    """Return the paths of all Wikipedia dumps below a folder, at any depth."""
    return [path for path in paths_ending_in("")(root) if DUMP.search(path.name)]


WIKIPEDIA = Kind(
    "*.xml file (plain, gz, bz2 or zst)",
    _list_paths,
    _read,
    splittable=lambda name: "multistream" in name.lower() and name.lower().endswith(".bz2"),
    needs=("mwxml", "mwparserfromhell"),
)
