"""A Griffe extension that turns what our docstrings do beside Markdown into Markdown.

- Aligned lists in the docstrings of modules become blocks of plain text.
- Several parameters that are described together, `new, past: datasets`, are described one by one.
- `[M][E]`, the shape of nested lists, is no link.
"""

import re
from typing import Any

from griffe import Extension, Object

ALIGNED = re.compile(r"^\S.*?\S? {2,}\S")
ARGUMENTS = re.compile(r"^Args:\n(?:[ \t]+\S.*\n?)+", re.MULTILINE)
SEVERAL = re.compile(r"^([ \t]+)(\w+(?:, \w+)+): (.*)$", re.MULTILINE)


class MarkdownDocstrings(Extension):
    """Changes docstrings before they are read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is None:
            return
        text = re.sub(r"\](?=\[[\w-]+\])", r"]\\", obj.docstring.value)
        text = ARGUMENTS.sub(lambda found: SEVERAL.sub(_one_by_one, found[0]), text)
        if obj.is_module:
            text = "\n\n".join(map(_fenced, re.split(r"\n\s*\n", text)))
        obj.docstring.value = text


def _one_by_one(match: re.Match[str]) -> str:
    indent, names, description = match.groups()
    return "\n".join(f"{indent}{name}: {description}" for name in names.split(", "))


def _fenced(paragraph: str) -> str:
    lines = paragraph.splitlines()
    is_list = bool(lines) and bool(ALIGNED.match(lines[0]))
    if is_list and all(ALIGNED.match(line) or line.startswith(" ") for line in lines):
        return f"```text\n{paragraph}\n```"
    return paragraph
