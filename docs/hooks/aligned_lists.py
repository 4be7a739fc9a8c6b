"""A Griffe extension that keeps the aligned lists in module docstrings aligned, as blocks of plain text."""

import re
from typing import Any

from griffe import Extension, Module

ALIGNED = re.compile(r"^\S.*?\S? {2,}\S")


class AlignedLists(Extension):
    """Puts paragraphs of module docstrings whose lines have columns into blocks of plain text."""

    def on_module(self, *, mod: Module, **_: Any) -> None:
        """Change the docstring of a module."""
        if mod.docstring is not None:
            paragraphs = re.split(r"\n\s*\n", mod.docstring.value)
            mod.docstring.value = "\n\n".join(map(_fenced, paragraphs))


def _fenced(paragraph: str) -> str:
    lines = paragraph.splitlines()
    is_list = ALIGNED.match(lines[0]) if lines else False
    if is_list and all(ALIGNED.match(line) or line.startswith(" ") for line in lines):
        return f"```text\n{paragraph}\n```"
    return paragraph
