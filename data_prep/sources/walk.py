"""List the files below folders and the files that match a pattern. No folder is left out silently.

Symbolic links to folders are followed. Each folder is read once, even if several links lead to it or a link leads to a
folder that contains it. A folder that cannot be read is an error.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.errors import PrepError


def files_below(root: Path) -> list[Path]:
    """Return the paths of all files below a folder, at any depth.

    Raises:
        PrepError: if a folder cannot be read.
    """
    with _unreadable_is_named():
        return [Path(entry.path) for folder in _folders_below(root) for entry in _entries(folder) if not entry.is_dir()]


def paths_matching(pattern: str) -> list[Path]:
    """Return the paths of all files and folders that match a pattern with *, ?, [...] and **, sorted.

    This function is used instead of `glob.glob`, which skips folders that it cannot read, and visits a folder again and
    again if a link inside leads back to it. As in `glob.glob`, wildcards do not match names that begin with a dot.
    Exception: a ** at the end stands for the folder itself.

    Raises:
        PrepError: if a folder cannot be read.
    """
    path = Path(pattern)
    found = {Path(path.anchor)}
    parts = path.parts[1:] if path.anchor else path.parts
    with _unreadable_is_named():
        for number, part in enumerate(parts, start=1):
            found = {match for folder in found for match in _matches(folder, part, is_last=number == len(parts))}
    return sorted(found)


@contextmanager
def _unreadable_is_named() -> Iterator[None]:
    """Context manager that raises PrepError for a folder or link that cannot be read."""
    try:
        yield
    except OSError as error:
        raise PrepError(
            f"{error.filename} cannot be read ({error.strerror}), so its files would be missing. Make it readable, or "
            "give a path or a pattern that leaves it out."
        ) from error


def _folders_below(root: Path) -> Iterator[Path]:
    """Yield a folder and all folders below it, each folder once."""
    # Follow links after all other folders, so that a folder inside `root` is found under its own name, not under the
    # name of a link to it. File names can be recorded, or contain dates.
    known: set[tuple[int, int]] = set()
    links: list[Path] = [root]
    while links:
        waiting = [links.pop(0)]
        while waiting:
            folder = waiting.pop()
            status = folder.stat()
            if (status.st_dev, status.st_ino) in known:
                continue
            known.add((status.st_dev, status.st_ino))
            yield folder
            subfolders = [entry for entry in _entries(folder) if entry.is_dir()]
            waiting += [Path(entry.path) for entry in reversed(subfolders) if not entry.is_symlink()]
            links += [Path(entry.path) for entry in subfolders if entry.is_symlink()]


def _matches(folder: Path, part: str, is_last: bool) -> Iterator[Path]:
    """Yield the paths in a folder that match one part of a pattern."""
    if not glob.has_magic(part):
        if _exists(folder / part):
            yield folder / part
    elif not folder.is_dir():
        return
    elif part == "**" and is_last:
        yield folder
    elif part == "**":
        for found in _folders_below(folder):
            if not any(name.startswith(".") for name in found.relative_to(folder).parts):
                yield found
    else:
        for entry in _entries(folder):
            hidden = entry.name.startswith(".") and not part.startswith(".")
            if not hidden and fnmatch.fnmatchcase(entry.name, part) and (is_last or entry.is_dir()):
                yield Path(entry.path)


def _exists(path: Path) -> bool:
    """Return True if there is a file, folder or link. Unlike `os.path.lexists`, raise an error if nobody can know."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name."""
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
