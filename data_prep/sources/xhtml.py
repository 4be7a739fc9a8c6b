"""Rewrite XHTML so that a parser of HTML reads it correctly."""

import html
import re

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
