"""The messages that docs/troubleshooting.md explains are messages of the code, word for word."""

import ast
import re

from tests.commands import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = [text for text in re.findall(r"^### (.*)$", PAGE, flags=re.MULTILINE) if text.startswith("`")]


def messages() -> list[str]:
    """Return all texts of the source, with `...` for what is filled in when the program runs."""
    found = [path.read_text() for path in [*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")]]
    for folder in ("fairseq_alma", "vision", "data_prep", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_every_message_that_the_page_explains_is_one_of_the_code():
    texts = messages()
    assert len(HEADINGS) > 30
    unknown = []
    for heading in HEADINGS:
        pieces = [re.escape(piece.strip()) for piece in heading.strip("`").split("...") if piece.strip(" :")]
        pattern = re.compile(r".*?".join(pieces), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            unknown.append(heading)
    assert not unknown, f"docs/troubleshooting.md explains messages that the code does not have: {unknown}"
