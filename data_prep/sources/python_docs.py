"""The embedded corpus: the docstrings of the standard library of the running Python. Real text, no download."""

import ast
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from data_prep.sources.base import Kind, Part, ReportProgress, Skipped

# Installed packages are not part of the standard library. Its tests hold odd files, and little documentation.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_root() -> Path:
    """Return the folder of the standard library of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def module_files() -> list[Path]:
    """Return the files of the modules of the standard library, sorted by path."""
    found = []
    for folder, subfolders, names in os.walk(stdlib_root()):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def docstrings(source: bytes) -> str:
    """Return the docstrings of a module in their order in the file, without indentation, joined by blank lines.

    Raises:
        SyntaxError, ValueError: `source` is not Python of this version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old escapes in library code, which the user cannot change
        tree = ast.parse(source)
    return "\n\n".join(inspect.cleandoc(text) for text in _in_order(tree) if text.strip())


def _in_order(node: ast.AST) -> Iterator[str]:
    """Yield the raw docstrings below `node`, depth first: in their order in the file."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            yield text
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _read(part: Part, report_progress: ReportProgress) -> Iterator[str | Skipped]:
    """Yield the docstrings of one module as a document, if it has any."""
    try:
        text = docstrings(Path(part.path).read_bytes())
        text.encode("utf-8")  # raises if a docstring holds a lone surrogate, which no UTF-8 file can hold
    except (SyntaxError, ValueError) as error:
        # The standard library may hold files of other versions of Python, as lib2to3 does: this is no damage.
        yield Skipped(part.name, f"not readable as Python: {type(error).__name__}", damaged=False)
        return
    if text:
        yield text


PYTHON_DOCS = Kind("*.py file", lambda root: module_files(), _read, wants_path=False)
