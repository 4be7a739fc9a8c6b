"""Turn the markup of a Wikipedia article into the text that a reader sees.

Tables and references are removed. Of the templates, those that usually stand inside a sentence are replaced by what a
reader sees (see `wiki_templates`); the others are removed and counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from data_prep.sources.wiki_templates import shown_text

# Tags that are removed together with their content, because the content is not running text.
_DROPPED_TAGS = frozenset((
    "ref", "references", "gallery", "math", "chem", "timeline", "score", "table", "syntaxhighlight", "source", "pre",
    "imagemap", "templatestyles", "section", "inputbox", "hiero", "graph", "mapframe", "maplink",
    "includeonly",
))  # fmt: skip
_LINE_ENDS = frozenset(("br", "hr"))
_MEDIA_ENDING = re.compile(
    r"\.(?:jpe?g|jfif|png|apng|gif|svg|tiff?|webp|avif|xcf|bmp|djvu?|pdf|stl|og[gvax]|opus|spx|mp[234]|mpe?g|m4[av]|"
    r"flac|wave?|midi?|webm|mov|avi|mkv)\s*$",
    re.I,
)
"""Matches the name of a file. A link to it shows the file, also if the name of the namespace is not known."""
# Matches a link to the same article in another language. Exceptions: sites that are no wiki in another language.
_LANGUAGE = re.compile(r"(?!(?:doi|voy|rfc|wmf|mw|wp|re):)(?:[a-z]{2,3}(?:-[a-z]{2,})*|simple):")
_QUOTES = re.compile(r"'{5}|'{2,3}")
"""Matches the quote characters that mark bold and italic text in wiki markup."""
_HEADING = "\x02"
"""Character that marks a heading. It is placed before the level and the text of the heading.

The text of an article cannot contain this character. XML does not allow the character itself, and `visible_text`
removes it if an HTML entity encodes it.
"""
_DOUBLE_UNDERSCORE = re.compile(r"__[A-Z]+__")
"""Matches the switches for the page layout, such as __NOTOC__ (no table of contents)."""
_EMPTY_BRACKETS = re.compile(r" ?\([\s,;:–-]{0,20}\)")
"""Matches round brackets that are empty, because the template or link inside them was removed."""
_SPACES = re.compile(r"[ \t\xa0]+")
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
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


class Markup(NamedTuple):
    """What is needed to make the text of an article."""

    markup: str
    hidden: frozenset[str]
    """Names of the namespaces of files and categories, in lower case. All articles of a dump share this object, so a
    message to the child process contains it once."""


class Text(NamedTuple):
    """The running text of an article."""

    text: str
    num_removed: int
    """Number of templates that were removed, because the text that they show is not known."""


def article_text(article: Markup) -> Text:
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
    return Text(text, reader.num_removed)


def _num_unclosed(markup: str) -> int:
    """Return the number of templates, links, tables and tags that are opened but not closed."""
    unclosed = sum(max(0, markup.count(opening) - markup.count(closing)) for opening, closing in _PAIRS)
    tags: Counter[str] = Counter()
    for is_end_tag, name, is_empty_tag in _TAG.findall(markup):
        tags[name.lower()] += -1 if is_end_tag else 0 if is_empty_tag else 1
    return unclosed + sum(max(0, count) for name, count in tags.items() if name not in _NEVER_CLOSED)


class _Reader:
    """Reads the visible text of parsed markup, and counts the templates that it removes."""

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
                if str(node.tag).strip().lower() in _LINE_ENDS:
                    parts.append("\n")
                elif node.contents and is_visible(str(node.tag)) and str(node.tag).strip().lower() not in _DROPPED_TAGS:
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
            namespace = comparable_name(title.partition(":")[0])
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
        if comparable_name(name) in ("template", "subst", "safesubst"):
            name, colon, argument = argument, "", ""
        if colon:
            argument = self.visible_text(template.name).partition(":")[2]
        name = _COMMENT.sub("", name)
        text = shown_text(comparable_name(name), _Arguments(self, template, argument))
        if text is None:
            self.num_removed += 1
        return text or ""


class _Arguments(Mapping[str, str]):
    """The visible text of the arguments of a template. Only the arguments that are used are read, and each one once."""

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


def comparable_name(text: str) -> str:
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
