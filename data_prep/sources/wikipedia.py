"""Read Wikipedia dumps (pages-articles). Each article is one document, its title and its text without markup.

Redirects and pages of other namespaces (talk, templates, categories, files) are skipped. They and the templates that
are removed from articles (see `wiki_markup`) are counted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from data_prep.compression import DamagedFile, open_bzip2_streams, open_plain
from data_prep.sources.base import MAX_DOCUMENT_BYTES, Document, Kind, Part, ReportProgress, SkippedUnits
from data_prep.sources.bounded import Failure, parse_in_batches
from data_prep.sources.text import TOO_LONG
from data_prep.sources.wiki_markup import Markup, article_text, comparable_name

# Namespaces that each wiki has, whatever its language. The header of a dump lists the names in its language too.
_NAMESPACES = {
    "media": "-2", "special": "-1", "talk": "1", "user": "2", "user talk": "3", "project": "4", "project talk": "5",
    "file": "6", "image": "6", "file talk": "7", "mediawiki": "8", "mediawiki talk": "9", "template": "10",
    "template talk": "11", "help": "12", "help talk": "13", "category": "14", "category talk": "15",
}  # fmt: skip
_ARTICLES, _FILES, _CATEGORIES = "0", "6", "14"
_MAX_NAMESPACES = 1000
"""Maximum number of names of namespaces that are read from the header of a dump. A wiki has about 50."""
# Names of the namespace of categories in the largest wikis, for dumps that do not list the names of their wiki.
_CATEGORY_NAMES = frozenset((
    "kategorie", "catégorie", "categoría", "categoria", "категория", "категорія", "kategoria", "luokka", "kategori",
    "categorie", "kategória", "kategorija", "категорија", "κατηγορία", "קטגוריה", "تصنيف", "رده", "श्रेणी", "分类",
    "分類", "カテゴリ", "분류", "หมวดหมู่", "thể loại", "kategorio",
))  # fmt: skip
_REDIRECT = re.compile(r"\s*#\w+\s*(?::\s*)?\[\[[^\[\]\n]+\]\]")
"""Matches the beginning of a redirect in any language, such as #REDIRECT [[Whale]] or #WEITERLEITUNG [[Wale]]."""
_WIKI = "text/x-wiki"

_NO_TEXT = "no text"


def _read(part: Part, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document]:
    """Yield the articles in one part of a dump. See `Kind.read`."""
    articles = _articles(_pieces(part), bad, report_progress)
    items = ((article, article.markup, len(article.markup.markup)) for article in articles)
    for article, result in parse_in_batches(article_text, items, report_progress):
        if isinstance(result, Failure) and result.is_limit:
            bad.add(result.why, article.number - 1, article.title, damaged=False)
        elif isinstance(result, Failure):
            bad.add(f"not readable ({result.why})", article.number - 1)
        else:
            bad.drop("the text that it shows is not known", result.num_removed, "template")
            if result.text:
                text = f"{article.title}\n\n{result.text}" if article.title else result.text
                yield Document(text, article.title, article.date)
            else:
                bad.drop(_NO_TEXT)


def _pieces(part: Part) -> Iterator[bytes]:
    """Yield the XML in a part of a dump, some bytes at a time, as if the part were a complete dump; b"" at the end.

    A multistream dump consists of many bzip2 streams that can be decompressed independently. The XML header is in the
    first one, and only the last part has the XML end tag.

    Nothing is yielded for a part in which no stream begins.
    """
    is_whole = part.start == 0 and part.end == Path(part.path).stat().st_size
    opened = open_plain(part.path) if is_whole else open_bzip2_streams(part.path, part.start, part.end)
    if opened is None:
        return
    with opened as file:
        tail = b""
        # `read1` returns the bytes before damage, and only then raises the error.
        while piece := file.read1(_PIECE_BYTES):
            yield piece
            tail = (tail + piece)[-64:]
    if not is_whole and not tail.rstrip().endswith(_END):
        yield _END
    yield b""


class _Article(NamedTuple):
    """An article of a dump, as of its last revision."""

    title: str
    markup: Markup
    date: str
    number: int
    """Number of the page in the dump, counted from 1."""


_PAGE, _END = b"<page>", b"</mediawiki>"
"""The first bytes of a page, and the last ones of a dump. After damage in a page, reading continues with the next one.
"""
_PIECE_BYTES = 1 << 15
"""Number of bytes of XML that are parsed at a time. After an error in a page, the rest of them is parsed again."""
_MAX_TAG_BYTES = 1 << 17
"""Maximum length of a tag or comment. The XML parser begins again at its start with each piece."""
_MAX_PAGE_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Maximum number of bytes of XML in a page. The XML parser keeps a page in memory until the page ends."""


def _articles(pieces: Iterable[bytes], bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[_Article]:
    """Yield each article of a dump, whose XML `pieces` are. Pages that are not articles are added to `bad`.

    A file can contain several dumps, one after another.
    """
    number, num_bytes, dump = 0, 0, _Dump()
    skipped: bytes | None = None  # after damage: the last bytes that were read, until the next page begins
    for content in pieces:
        report_progress()
        rest: bytes | None = content
        if skipped is not None:
            rest = _from_page(skipped + content)
            skipped = (skipped + content)[-len(_PAGE) :] if rest is None and content else None
        while rest is not None:
            error: expat.ExpatError | None = None
            try:
                rest = dump.feed(rest)
            except expat.ExpatError as raised:
                error = raised
            num_bytes = 0 if dump.has_progress else num_bytes + len(content)
            for page in dump.pages:
                number += 1
                if why := dump.why_no_article(page):
                    bad.drop(why)
                elif len(page["text"]) > MAX_DOCUMENT_BYTES:
                    bad.add(TOO_LONG, number - 1)
                else:
                    markup = Markup(page["text"], dump.hidden)
                    yield _Article(page.get("title", ""), markup, page.get("date", ""), number)
            bad.drop("neither a page nor information about the site", dump.num_others, "element")
            if error:
                if not content or (not number and not dump.has_pages):
                    raise DamagedFile(
                        f"damaged: not readable as a MediaWiki dump after page {number} ({error})"
                    ) from error
                number += 1
                bad.add("not readable as XML", number - 1)
                remaining = dump.after_error()
                rest, dump = _from_page(remaining), dump.resumed()
                skipped = remaining[-len(_PAGE) :] if rest is None else None
            elif rest is not None:  # another dump follows
                dump = _Dump()
        if num_bytes > _MAX_PAGE_BYTES:
            raise DamagedFile(f"a page of the dump has more than {_MAX_PAGE_BYTES >> 20} MiB")


def _from_page(content: bytes) -> bytes | None:
    """Return the bytes from the beginning of the first page on; None if none begins."""
    start = content.find(_PAGE)
    return content[start:] if start >= 0 else None


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
        self.has_pages = False
        """True if a page has begun."""
        self.pages: list[dict[str, str]] = []
        """The pages that ended in the last piece."""
        self.num_others = 0
        """Number of elements that ended in the last piece and are neither pages nor information about the site."""
        self.has_progress = False
        """True if a page or a revision ended in the last piece."""
        self.hidden = frozenset(_CATEGORY_NAMES | {"file", "image", "category"})
        """See `Markup`."""

    def feed(self, content: bytes) -> bytes | None:
        """Parse the next bytes of the dump; at the end, b""."""
        self.pages, self.num_others, self.has_progress = [], 0, False
        # White space after the root is not kept, because a file can contain gigabytes of it.
        if not self._is_over or self._held.rstrip()[-1:] in (b">", b""):
            self._num_before, self._held = self._num_before + len(self._held), b""
        self._held += content
        try:
            self._parser.Parse(content, not content)
        except expat.ExpatError:
            if not self._is_over:
                raise
            return self.after_error()
        if self._num_before + len(self._held) - self._parser.CurrentByteIndex > _MAX_TAG_BYTES:
            raise DamagedFile(f"a tag or comment of the dump has more than {_MAX_TAG_BYTES >> 10} KiB")
        return None

    def after_error(self) -> bytes:
        """Return the bytes of the last piece from the error on."""
        return self._held[max(0, self._parser.ErrorByteIndex - self._num_before) :]

    def resumed(self) -> "_Dump":
        """Return an object that continues with a later page of this dump, after an error."""
        other = _Dump()
        other._namespaces, other.hidden, other.has_pages = self._namespaces, self.hidden, True
        other.feed(b"<mediawiki>")
        return other

    def why_no_article(self, page: Mapping[str, str]) -> str:
        """Return the reason why a page is not an article with text; an empty text if it is one."""
        namespace = page.get("ns")
        if not namespace:  # dumps from before 2012 have no element <ns>
            name, colon, _ = page.get("title", "").partition(":")
            namespace = self._namespaces.get(comparable_name(name), _ARTICLES) if colon else _ARTICLES
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
            self._page, self.has_pages = {}, True
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
            elif text.strip() and len(self._namespaces) < _MAX_NAMESPACES:
                self._namespaces[comparable_name(text)] = self._key
                if self._key in (_FILES, _CATEGORIES):
                    self.hidden |= {comparable_name(text)}
        elif path == "page":
            self.pages.append(self._page)
        elif len(self._path) == 2 and path != "siteinfo":
            self.num_others += 1
        self.has_progress |= path in ("page", "page/revision")
        self._path.pop()
        self._is_over = not self._path

    def _where(self) -> str:
        """Return the path of the current element below the root; an empty text for the root and deep elements."""
        return "/".join(self._path[1:]) if len(self._path) <= 4 else ""

    def _refuse(self, *declaration: object) -> None:
        """Refuse the declaration of an entity: no dump has one, and entities can multiply a text without limit."""
        raise DamagedFile("not a MediaWiki dump: it declares XML entities")


WIKIPEDIA = Kind(
    "*.xml file (plain, gz, bz2 or zst)",
    _read,
    "page",
    r"\.xml(?:\.|-|\Z)",
    splittable=lambda name: "multistream" in name.lower() and name.lower().endswith(".bz2"),
    needs=("mwparserfromhell",),
)
