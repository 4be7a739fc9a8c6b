"""The glossary of the documentation, for the page of a report.

`page/glossary.md` is a link to docs/glossary.md. So the page and the documentation explain a term by the same words.
"""

import re
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("page") / "glossary.md"
ENTRY = re.compile(r"^(\S[^\n]*)\n:   (.*(?:\n(?:    .*|(?=\n    )))*)", re.MULTILINE)


@cache
def glossary() -> dict[str, str]:
    """Return the explanation of each term, as text without Markdown. The keys are made by `key_of`."""
    text = FILE.read_text(encoding="utf-8")
    return {key_of(term): _plain(match[2]) for match in ENTRY.finditer(text) for term in match[1].split(", ")}


def key_of(term: str) -> str:
    """Return the key of a term: its letters and digits in lower case. The page looks up `gmoe_flat` and `gMoE-flat`."""
    return re.sub(r"[^a-z0-9]+", "", term.lower())


def _plain(text: str) -> str:
    """Return Markdown as plain text in one line: without emphasis, code marks and links."""
    text = " ".join(text.replace("`", "").split())
    text = re.sub(r"\s*See \[[^\]]+\]\([^)]*\)\.", "", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\s*\(see [^()]*\)(?=\.)", "", text)
    return re.sub(r"\*\*([^*]+)\*\*|\*([^*]+)\*", lambda match: match[1] or match[2], text)
