"""Read the docstrings of the Python standard library, a corpus that needs no download."""

import ast
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from data_prep.sources.base import Document, Kind, Part, ReportProgress, Skipped, SkippedUnits

# Skip installed packages, which are not part of the standard library, and tests, which contain few docstrings and some
# invalid files.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_root() -> Path:
    """Return the folder that contains the standard library of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def module_files() -> list[Path]:
    """Return the paths of all standard library modules, sorted."""
    found = []
    for folder, subfolders, names in os.walk(stdlib_root()):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def docstrings(source: bytes) -> str:
    """Return the docstrings of a module in file order, without indentation, separated by blank lines.

    Raises:
        SyntaxError, ValueError: if `source` is not valid in the running Python version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about invalid escapes in library code
        tree = ast.parse(source)
    return "\n\n".join(inspect.cleandoc(text) for text in _in_order(tree) if text.strip())


_WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""The nodes below which there can be a class or a function. Expressions, which are most nodes, have none."""


def _in_order(node: ast.AST) -> Iterator[str]:
    """Yield the raw docstrings of a syntax tree node and of all nodes below it, in file order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _WITH_STATEMENTS):
            yield from _in_order(child)


def _read(part: Part, bad: SkippedUnits, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the docstrings of one module as a single document, if the module has docstrings. See `Kind.read`."""
    try:
        text = docstrings(Path(part.path).read_bytes())
        text.encode("utf-8")  # a lone surrogate (half of a UTF-16 pair) raises UnicodeEncodeError, a ValueError
    except (SyntaxError, ValueError) as error:
        # Do not count the file as damaged, because the standard library may contain files for other Python versions.
        yield Skipped(part.name, f"not readable as Python: {type(error).__name__}", damaged=False)
        return
    if text:
        yield Document(text, part.name)


PYTHON_DOCS = Kind("*.py file", _read, wants_path=False)
