"""Files and functions stay small enough to be read: one subject per file, one thing per function."""

import ast

import pytest

from tests.commands import ROOT

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
REASON = "Long because"
"""A longer file or function says so, and why, in its docstring."""

PACKAGES = ("fairseq_alma", "vision", "data_prep", "launch")
SOURCES = sorted(
    path
    for package in PACKAGES
    for pattern in ("*.py", "*.js", "*.c", "*.h")
    for path in (ROOT / package).rglob(pattern)
)


def test_the_sources_are_found():
    assert {path.suffix for path in SOURCES} == {".py", ".js", ".c", ".h"}
    assert len(SOURCES) > 150


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_and_its_functions_are_short_or_say_why_not(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES or REASON in text[:2000]
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            is_short = num_lines <= MAX_FUNCTION_LINES or REASON in (ast.get_docstring(node) or "")
            assert is_short, f"{node.name} has {num_lines} lines"
