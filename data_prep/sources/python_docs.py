"""The embedded corpus: docstrings of the running Python's standard library. Real text, no download."""

import ast
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from data_prep.sources.base import Kind, Part, Skipped

# Installed packages are not the standard library, and its tests hold odd files rather than documentation.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_root() -> Path:
    """The folder that holds the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def module_files() -> list[Path]:
    """The standard library's modules, sorted by path."""
    found = []
    for folder, subfolders, names in os.walk(stdlib_root()):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def docstrings(source: bytes) -> str:
    """The docstrings of one module in the order in which they stand, cleaned, joined by blank lines.

    Raises SyntaxError or ValueError if `source` is not Python of this version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in library code are not the user's business
        tree = ast.parse(source)
    return "\n\n".join(inspect.cleandoc(text) for text in _in_order(tree) if text.strip())


def _in_order(node: ast.AST):
    """Yield the raw docstrings below `node`, depth first: as a reader of the file meets them."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            yield text
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _read(part: Part) -> Iterator[str | Skipped]:
    """One document per module that has docstrings."""
    try:
        text = docstrings(Path(part.path).read_bytes())
        text.encode("utf-8")  # a docstring may hold a lone surrogate, which no file can
    except (SyntaxError, ValueError) as error:
        # The standard library may hold files of other versions of Python (lib2to3's): no damage.
        yield Skipped(part.name, f"not readable as Python: {type(error).__name__}", damaged=False)
        return
    if text:
        yield text


PYTHON_DOCS = Kind("*.py file", lambda root: module_files(), _read, wants_path=False)
