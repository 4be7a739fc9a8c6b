"""Read Wikipedia dumps (pages-articles). Each article is one document, its title and its text without markup.

Tables and references are removed. Of the templates, those that usually stand inside a sentence are replaced by what a
reader sees (see `wiki_templates`); the others are removed. Redirects and pages of other namespaces (talk, templates,
categories, files) are skipped. Everything that is removed with a page or template is counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

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
from data_prep.sources.wiki_templates import shown_text

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
# Namespaces that each wiki has, whatever its language. The header of a dump lists the names in its language too.
_NAMESPACES = {
    "media": "-2", "special": "-1", "talk": "1", "user": "2", "user talk": "3", "project": "4", "project talk": "5",
    "file": "6", "image": "6", "file talk": "7", "mediawiki": "8", "mediawiki talk": "9", "template": "10",
    "template talk": "11", "help": "12", "help talk": "13", "category": "14", "category talk": "15",
}  # fmt: skip
_ARTICLES, _FILES, _CATEGORIES = "0", "6", "14"
# Names of the namespace of categories in the largest wikis, for dumps that do not list the names of their wiki.
_CATEGORY_NAMES = frozenset((
    "kategorie", "catégorie", "categoría", "categoria", "категория", "категорія", "kategoria", "luokka", "kategori",
    "categorie", "kategória", "kategorija", "категорија", "κατηγορία", "קטגוריה", "تصنيف", "رده", "श्रेणी", "分类",
    "分類", "カテゴリ", "분류", "หมวดหมู่", "thể loại", "kategorio",
))  # fmt: skip
_MEDIA_ENDING = re.compile(
    r"\.(?:jpe?g|jfif|png|apng|gif|svg|tiff?|webp|avif|xcf|bmp|djvu?|pdf|stl|og[gvax]|opus|spx|mp[234]|mpe?g|m4[av]|"
    r"flac|wave?|midi?|webm|mov|avi|mkv)\s*$",
    re.I,
)
"""Matches the name of a file. A link to it shows the file, also if the name of the namespace is not known."""
# Matches a link to the same article in another language. Exceptions: sites that are no wiki in another language.
_LANGUAGE = re.compile(r"(?!(?:doi|voy|rfc|wmf|mw|wp|re):)(?:[a-z]{2,3}(?:-[a-z]{2,})*|simple):")
_REDIRECT = re.compile(r"\s*#\w+\s*:?\s*\[\[[^\[\]\n]+\]\]")
"""Matches the beginning of a redirect in any language, such as #REDIRECT [[Whale]] or #WEITERLEITUNG [[Wale]]."""
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
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
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


class _Markup(NamedTuple):
    """What is needed to make the text of an article."""

    markup: str
    hidden: frozenset[str]
    """Names of the namespaces of files and categories, in lower case. All articles of a dump share this object, so a
    message to the child process contains it once."""


class _Text(NamedTuple):
    """The running text of an article."""

    text: str
    num_removed: int
    """Number of templates that were removed, because the text that they show is not known."""


def article_text(article: _Markup) -> _Text:
    """Return the running text of an article, with its headings.

    Raises:
        ValueError: if the markup has more brackets and tags, or more unclosed brackets and tags, than any real article.
    """
    import mwparserfromhell

    markup = article.markup
    if len(_OPENING.findall(markup)) > _MAX_OPENINGS:
        raise ValueError("too many templates, links, tables or tags for an article")
    if _num_unclosed(markup) * len(markup) > _MAX_UNCLOSED_CHARACTERS:
        raise ValueError("too many templates, links, tables or tags that are never closed")
    reader = _Reader(article.hidden)
    text = reader.visible_text(mwparserfromhell.parse(_QUOTES.sub("", markup), skip_style_tags=True))
    text = _EMPTY_BRACKETS.sub("", _SPACES.sub(" ", _DOUBLE_UNDERSCORE.sub("", text)))
    lines = [line.lstrip(" *#:;").rstrip(" ") for line in text.split("\n")]
    text = _BLANK_LINES.sub("\n\n", "\n".join(_without_empty_sections(lines))).strip()
    return _Text(text, reader.num_removed)


def _num_unclosed(markup: str) -> int:
    """Return the number of templates, links, tables and tags that are opened but not closed."""
    unclosed = sum(max(0, markup.count(opening) - markup.count(closing)) for opening, closing in _PAIRS)
    tags: Counter[str] = Counter()
    for is_end_tag, name, is_empty_tag in _TAG.findall(markup):
        tags[name.lower()] += -1 if is_end_tag else 0 if is_empty_tag else 1
    return unclosed + sum(max(0, count) for name, count in tags.items() if name not in _NEVER_CLOSED)


class _Reader:
    """Reads the visible text of parsed markup, and counts the templates that it removes.

    Args:
        hidden: see `_Markup`.
    """

    def __init__(self, hidden: frozenset[str]):
        self._hidden = hidden
        self.num_removed = 0

    def visible_text(self, code: Any) -> str:
        """Return the visible text of parsed markup, without tables, files and references.

        Each heading in the returned text begins with the character _HEADING and the level of the heading.

        Tables, files and references are skipped while the nodes of the parsed markup are read. They are not deleted
        with mwparserfromhell's method `remove`, because `remove` searches the complete page for each node that it
        deletes.
        """
        from mwparserfromhell import nodes
        from mwparserfromhell.definitions import is_visible

        parts: list[str] = []
        for node in code.nodes:
            if isinstance(node, nodes.Text):
                parts.append(node.value)
            elif isinstance(node, nodes.Wikilink):
                parts.append(self._link_text(node))
            elif isinstance(node, nodes.Template):
                parts.append(self._template_text(node))
            elif isinstance(node, nodes.Tag):
                if node.contents and is_visible(str(node.tag)) and str(node.tag).strip().lower() not in _DROPPED_TAGS:
                    parts.append(self.visible_text(node.contents))
            elif isinstance(node, nodes.Heading):
                parts.append(f"{_HEADING}{node.level}{self.visible_text(node.title).strip()}")
            elif isinstance(node, nodes.ExternalLink):
                if not node.brackets:
                    parts.append(str(node.url))
                elif node.title is not None:
                    parts.append(self.visible_text(node.title))
            elif isinstance(node, nodes.HTMLEntity):
                # An HTML entity can encode any character, also the character _HEADING. Remove _HEADING here, because in
                # the returned text only headings may contain it.
                parts.append(node.normalize().replace(_HEADING, ""))
        return "".join(parts)

    def _link_text(self, link: Any) -> str:
        """Return the text of a link. A file, a category and a link to another language are not part of the text.

        A colon in front, as in [[:Category:Whales]], makes a link whose text is shown.
        """
        title = str(link.title).strip()
        if ":" in title and not title.startswith(":"):
            namespace = _name(title.partition(":")[0])
            if (
                namespace in self._hidden
                or _MEDIA_ENDING.search(title)
                or (link.text is None and _LANGUAGE.match(title))
            ):
                return ""
        return self.visible_text(link.title).lstrip(" :") if link.text is None else self.visible_text(link.text)

    def _template_text(self, template: Any) -> str:
        """Return the text that a template or parser function shows. An unknown template shows none, and is counted."""
        # The name of a parser function ends at a colon. Its first argument follows: {{formatnum:24567}}.
        name, colon, argument = str(template.name).partition(":")
        if _name(name) in ("template", "subst", "safesubst"):
            name, colon, argument = argument, "", ""
        if colon:
            argument = self.visible_text(template.name).partition(":")[2]
        name = _COMMENT.sub("", name)
        text = shown_text(_name(name), _Arguments(self, template, argument))
        if text is None:
            self.num_removed += 1
        return text or ""


class _Arguments(Mapping[str, str]):
    """The visible text of the arguments of a template. Only the arguments that are used are read, and each one once.

    Args:
        reader: reads the text of the arguments.
        template: the template, parsed.
        first: the first argument of a parser function; empty for a template.
    """

    def __init__(self, reader: _Reader, template: Any, first: str):
        self._reader = reader
        self._codes = {str(param.name).strip(): param.value for param in template.params}
        self._texts = {"1": first.strip()} if first else {}

    def __getitem__(self, name: str) -> str:
        if name not in self._texts:
            self._texts[name] = self._reader.visible_text(self._codes[name]).strip()
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._codes)

    def __len__(self) -> int:
        return len(self._codes)


def _name(text: str) -> str:
    """Return a name of a template or namespace in the form that is compared: lower case, single spaces."""
    return " ".join(text.replace("_", " ").split()).lower()


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
            articles = _short_enough(_articles(file, bad), bad)
            for article, result in parse_in_batches(f"{__name__}:{article_text.__name__}", articles, report_progress):
                if isinstance(result, Failure):
                    why = result.why if result.is_limit else f"not readable ({result.why})"
                    bad.add(why, article.number, article.title if result.is_limit else "", damaged=not result.is_limit)
                    continue
                bad.drop(_UNKNOWN_TEMPLATE, result.num_removed, "template")
                if result.text:
                    text = f"{article.title}\n\n{result.text}" if article.title else result.text
                    yield Document(text, article.title, article.date)
                else:
                    bad.drop(_NO_TEXT)
    except DamagedFile as error:
        yield Skipped(part.name, str(error))
    yield from bad


_NO_TEXT = "no text"
_UNKNOWN_TEMPLATE = "the text that it shows is not known"


def _short_enough(articles: Iterator["_Article"], bad: SkippedUnits) -> Iterator[tuple["_Article", _Markup, int]]:
    """Yield each article, what is needed to make its text, and its length, without the articles that are too long."""
    for article in articles:
        if len(article.markup) > MAX_DOCUMENT_BYTES:
            bad.add(TOO_LONG, article.number)
        else:
            yield article, _Markup(article.markup, article.hidden), len(article.markup)


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
    hidden: frozenset[str]
    """See `_Markup`."""


_MAX_PAGE_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Maximum number of bytes of XML in a page. The XML parser keeps a page in memory until the page ends."""


def _articles(file: "Eager | _Streams", bad: SkippedUnits) -> Iterator[_Article]:
    """Yield each article of a dump. Pages that are not articles are added to `bad`.

    A file can contain several dumps, one after another.

    Raises:
        DamagedFile: if the dump is damaged, or has a page so long that it could fill the memory. The articles before
            the damage are yielded first.
    """
    number, num_bytes, dump, content = 0, 0, _Dump(), b" "
    while content:
        content = file.read(CHUNK_BYTES)
        error: expat.ExpatError | None = None
        rest: bytes | None = content
        while rest is not None and error is None:
            try:
                rest = dump.feed(rest)
            except expat.ExpatError as raised:
                error = raised
            num_bytes = 0 if dump.has_progress else num_bytes + len(content)
            for page in dump.pages:
                number += 1
                why = dump.why_no_article(page)
                if why:
                    bad.drop(why)
                else:
                    yield _Article(page.get("title", ""), page["text"], page.get("date", ""), number, dump.hidden)
            if rest is not None:  # another dump follows
                dump = _Dump()
        if error:
            raise DamagedFile(f"damaged: not readable as a MediaWiki dump after page {number} ({error})") from error
        if num_bytes > _MAX_PAGE_BYTES:
            raise DamagedFile(f"a page of the dump has more than {_MAX_PAGE_BYTES >> 20} MiB")


class _Dump:
    """Parses the XML of one dump, piece by piece.

    Only the elements in _FIELDS are read. Other elements are ignored, because other programs than MediaWiki write
    elements of their own.
    """

    _FIELDS = {  # noqa: RUF012
        "siteinfo/namespaces/namespace": "namespace",
        "page/title": "title",
        "page/ns": "ns",
        "page/redirect": "redirect",
        "page/revision/timestamp": "date",
        "page/revision/model": "model",
        "page/revision/format": "format",
        "page/revision/text": "text",
    }
    """Path of an element below the root -> key of its text in a page."""

    def __init__(self) -> None:
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.EntityDeclHandler = self._refuse
        self._path: list[str] = []
        self._pieces: list[str] | None = None
        self._page: dict[str, str] = {}
        self._key = ""
        self._namespaces = dict(_NAMESPACES)
        # The bytes from the piece with the end of the root on, and the number of bytes before them.
        self._held, self._num_before, self._is_over = b"", 0, False
        self.pages: list[dict[str, str]] = []
        """The pages that ended in the last piece."""
        self.has_progress = False
        """True if a page or a revision ended in the last piece."""
        self.hidden = frozenset(_CATEGORY_NAMES | {"file", "image", "category"})
        """See `_Markup`."""

    def feed(self, content: bytes) -> bytes | None:
        """Parse the next bytes of the dump; at the end, b"".

        Returns:
            The bytes that follow the dump, if another dump follows, otherwise None.

        Raises:
            expat.ExpatError: if this is no XML.
            DamagedFile: if this is another kind of XML.
        """
        self.pages, self.has_progress = [], False
        if not self._is_over:
            self._num_before, self._held = self._num_before + len(self._held), b""
        self._held += content
        try:
            self._parser.Parse(content, not content)
        except expat.ExpatError:
            if not self._is_over:
                raise
            return self._held[self._parser.ErrorByteIndex - self._num_before :]
        return None

    def why_no_article(self, page: Mapping[str, str]) -> str:
        """Return the reason why a page is not an article with text; an empty text if it is one."""
        namespace = page.get("ns")
        if not namespace:  # dumps from before 2012 have no element <ns>
            name, colon, _ = page.get("title", "").partition(":")
            namespace = self._namespaces.get(_name(name), _ARTICLES) if colon else _ARTICLES
        if namespace != _ARTICLES:
            return "not an article (another namespace)"
        if "redirect" in page or _REDIRECT.match(page.get("text", "")):
            return "a redirect"
        # Dumps from before 2012 have no element <model> either. Some pages have only one of the two elements.
        if page.get("model", "wikitext") != "wikitext" or ("model" not in page and page.get("format", _WIKI) != _WIKI):
            return "not wikitext"
        return "" if page.get("text", "").strip() else _NO_TEXT

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(":")[2]
        if not self._path and name != "mediawiki":
            raise DamagedFile(
                f"not a MediaWiki dump: the first XML element is <{name[:50]}>, not <mediawiki>. Use the files whose "
                "names contain pages-articles"
            )
        self._path.append(name)
        path = self._where()
        if path == "page":
            self._page = {}
        elif path == "page/revision":
            self._page = {key: self._page[key] for key in ("title", "ns", "redirect") if key in self._page}
        elif path in self._FIELDS:
            self._pieces, self._key = [], attributes.get("key", "")

    def _text(self, text: str) -> None:
        if self._pieces is not None:
            self._pieces.append(text)

    def _end(self, name: str) -> None:
        path = self._where()
        if path in self._FIELDS and self._pieces is not None:
            text, self._pieces = "".join(self._pieces), None
            if path.startswith("page/"):
                self._page[self._FIELDS[path]] = text if path.endswith("/text") else text.strip()
            elif text.strip():
                self._namespaces[_name(text)] = self._key
                if self._key in (_FILES, _CATEGORIES):
                    self.hidden |= {_name(text)}
        elif path == "page":
            self.pages.append(self._page)
        self.has_progress |= path in ("page", "page/revision")
        self._path.pop()
        self._is_over = not self._path

    def _where(self) -> str:
        """Return the path of the current element below the root; an empty text for the root and deep elements."""
        return "/".join(self._path[1:]) if len(self._path) <= 4 else ""

    def _refuse(self, *declaration: object) -> None:
        """Refuse the declaration of an entity: no dump has one, and entities can multiply a text without limit."""
        raise DamagedFile("not a MediaWiki dump: it declares XML entities")


_WIKI = "text/x-wiki"

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
    needs=("mwparserfromhell",),
)
