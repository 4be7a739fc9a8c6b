"""Filters of the user: functions in Python modules (--filter)."""

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_prep.errors import PrepError
from data_prep.sources.base import Document
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import sha256_of

_FILTER_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def parse_filters(text: str) -> list[str]:
    """Return the names MODULE:FUNCTION in a text such as `my_filters:no_lists,my_filters:no_code`.

    Raises:
        ValueError: if a name has another form, or is given twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not _FILTER_NAME.fullmatch(name):
            raise SettingError(f"--filter {name}: write MODULE:FUNCTION, for example my_filters:is_prose")
        if names.count(name) > 1:
            raise SettingError(f"filters={text}: {name} is given twice")
    return names


def filter_sha256(name: str) -> str:
    """Return the SHA-256 digest of the source of a filter MODULE:FUNCTION.

    The source is the file of the module, and the files in the same folder that it imports, directly or through others.
    If it imports none, the digest is that of the file.

    Raises:
        PrepError: if there is no such module.
    """
    module = name.partition(":")[0]
    _make_current_folder_importable()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise PrepError(
            f"--filter {name}: there is no module {module} in the current folder {Path.cwd()} or in this Python "
            "environment. Check the name, or run the command in the folder of the module."
        )
    paths = _with_imported_neighbours(Path(spec.origin))
    if len(paths) == 1:
        return sha256_of(paths[0])
    return hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in paths).encode()).hexdigest()


def _with_imported_neighbours(path: Path) -> list[Path]:
    """Return the path of a module, and the paths of the modules in the same folder that it imports, sorted."""
    found, waiting = {path}, [path]
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_bytes())
        except (SyntaxError, ValueError):  # a library without source, or an error that the import will report
            continue
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module} if node.module else {alias.name for alias in node.names}
        neighbours = {path.parent / f"{name.partition('.')[0]}.py" for name in names}
        new = {neighbour for neighbour in neighbours if neighbour.is_file()} - found
        found |= new
        waiting += new
    return sorted(found)


def load_filter(name: str, sha256: str | None = None) -> Callable[[Document], object]:
    """Import the function of a filter MODULE:FUNCTION.

    Args:
        name: the name of the filter.
        sha256: the digest that the source of the filter must have (see `filter_sha256`); None: any.

    Raises:
        PrepError: if the module cannot be imported, has no such function, or has another digest, because it was changed
            while alma-prep was running.
    """
    module, _, function = name.partition(":")
    _make_current_folder_importable()
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever the user's code raises
        raise PrepError(
            f"--filter {name}: the module {module} cannot be imported ({type(error).__name__}: {error}). Mend it and "
            "run the same command again."
        ) from error
    if not callable(found):
        raise PrepError(f"--filter {name}: the module {module} has no function {function}. Check the name.")
    # After the import, so that a change just before it is noticed, too.
    if sha256 is not None and filter_sha256(name) != sha256:
        raise PrepError(
            f"--filter {name}: the module {module}, or a file that it imports, was changed while alma-prep was "
            "running. Run the same command again: it reads again what was read with the old one."
        )
    return found


def _make_current_folder_importable() -> None:
    """Add the current folder to the folders from which modules are imported, as the last one."""
    # As the last one, so that a file such as json.py in the current folder does not hide a module of Python.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()


def apply_filter(name: str, function: Callable[[Document], object], document: Document) -> tuple[str, str | None]:
    """Return the text of a document after a filter, and the reason to remove the document or None to keep it.

    Args:
        name: the name of the filter, MODULE:FUNCTION.
        function: the user's function. It returns True to keep the document, False or (False, reason) to remove it, or
            a new text.
        document: the document with its text, id and date.

    Raises:
        PrepError: if the function fails, or returns something else. The message names the function and the document.
    """
    try:
        result = function(document)
    except Exception as error:  # whatever the user's code raises
        raise PrepError(
            f"--filter {name} failed on the document {document.id}: {type(error).__name__}: {error}. Mend the function "
            "and run the same command again."
        ) from error
    if isinstance(result, bool | np.bool_):
        return document.text, None if result else name
    if isinstance(result, tuple) and len(result) == 2 and result[0] is False and isinstance(result[1], str):
        return document.text, f"{name}: {result[1]}"
    if isinstance(result, str):
        text = result.encode("utf-8", "replace").decode("utf-8")
        return text, None if text.strip() else f"{name}: no text left"
    raise PrepError(
        f"--filter {name} returned {str(result)[:100]!r} for the document {document.id}. It must return True (keep the "
        "document), False or (False, reason) to remove it, or a new text."
    )
