"""Code blocks of the pages, and the marker before each that says how it is tested.

A marker is an HTML comment on the line before a block of bash, python or yaml:

    <!-- test: run -->                              run it, in a folder that the blocks of a page share
    <!-- test: run | updates=1000 -> updates=2 -->  run it with replacements; each must occur in the block
    <!-- test: save NAME -->                        write it to the file NAME of that folder
    <!-- test: check -->                            parse its commands and compose their settings; run nothing
    <!-- test: slurm | --mem=16G -> --mem=8G -->    like `check`; in addition, the slow Slurm tests run it with these
                                                    replacements
    <!-- test: skip | REASON -->                    do nothing, for a reason that is given

A marker `<!-- test files: NAME -->` anywhere in a page calls the function NAME of files.py before the first block.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.commands import ROOT

TESTED_LANGUAGES = ("bash", "sh", "python", "yaml", "slurm")
ACTIONS = ("run", "save", "check", "slurm", "skip")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<marker>.*?) -->\n+)?"
    r"^(?P<indent>[ \t]*)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
_FILES = re.compile(r"^<!-- test files: (.*?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    page: Path
    line: int
    """Line of the block's first line of code, counted from 1."""
    language: str
    text: str
    marker: str | None

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def action(self) -> str:
        """The first word of the marker."""
        assert self.marker is not None
        return self.marker.split()[0]

    @property
    def argument(self) -> str:
        """The rest of the marker's first part: the file of `save`."""
        return self._parts[0].removeprefix(self.action).strip()

    @property
    def reason(self) -> str:
        """Why a block is skipped."""
        return self._parts[1] if len(self._parts) > 1 else ""

    def replaced(self) -> str:
        """Return the text with the marker's replacements made. Each must occur."""
        text = self.text
        for part in self._parts[1:]:
            old, _, new = part.partition("->")
            assert old.strip() in text, f"{self.where}: the marker replaces {old.strip()!r}, which the block lacks"
            text = text.replace(old.strip(), new.strip())
        return text

    @property
    def _parts(self) -> list[str]:
        assert self.marker is not None
        return [" ".join(part.split()) for part in self.marker.split(" | ")]


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that need a test, in order."""
    content = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(content):
        if match["language"] in TESTED_LANGUAGES:
            line = content.count("\n", 0, match.start("text")) + 1
            found.append(Block(page, line, match["language"], match["text"], match["marker"]))
    return found


def files_of(page: Path) -> list[str]:
    """Return the names of the functions that write the page's files."""
    found = _FILES.findall(page.read_text(encoding="utf-8"))
    return [name.strip() for names in found for name in names.split(",")]
