"""List the files below folders and the files that match a pattern. No folder is left out silently.

Symbolic links to folders are followed. Each folder is read once, even if several links lead to it or a link leads to a
folder that contains it. A folder that cannot be read is an error.
"""

import fnmatch
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from data_prep.errors import PrepError


def files_below(root: Path) -> Iterator[Path]:
    """Yield the paths of all files below a folder, at any depth.

    Raises:
        PrepError: if a folder cannot be read.
    """
    for folder in folders_below(root):
        for entry in _entries(folder):
            if not _is_folder(entry):
                yield Path(entry.path)


def folders_below(root: Path) -> Iterator[Path]:
    """Yield a folder and all folders below it, each folder once.

    Raises:
        PrepError: if a folder cannot be read.
    """
    # Follow links after all other folders, so that a folder inside `root` is found under its own name, not under the
    # name of a link to it. File names can be recorded, or contain dates.
    known: set[tuple[int, int]] = set()
    links: list[Path] = [root]
    while links:
        waiting = [links.pop(0)]
        while waiting:
            folder = waiting.pop()
            status = _status(folder)
            if not status or (status.st_dev, status.st_ino) in known:
                continue
            known.add((status.st_dev, status.st_ino))
            yield folder
            subfolders = [entry for entry in _entries(folder) if _is_folder(entry)]
            waiting += [Path(entry.path) for entry in reversed(subfolders) if not entry.is_symlink()]
            links += [Path(entry.path) for entry in subfolders if entry.is_symlink()]


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
    for number, part in enumerate(parts, start=1):
        found = {match for folder in found for match in _matches(folder, part, is_last=number == len(parts))}
    return sorted(found)


def _matches(folder: Path, part: str, is_last: bool) -> Iterator[Path]:
    """Yield the paths in a folder that match one part of a pattern."""
    if not glob.has_magic(part):
        if _status(folder / part, follow_symlinks=False):
            yield folder / part
    elif not (status := _status(folder)) or not stat.S_ISDIR(status.st_mode):
        return
    elif part == "**" and is_last:
        yield folder
    elif part == "**":
        for found in folders_below(folder):
            if not any(name.startswith(".") for name in found.relative_to(folder).parts):
                yield found
    else:
        for entry in _entries(folder):
            hidden = entry.name.startswith(".") and not part.startswith(".")
            if not hidden and fnmatch.fnmatchcase(entry.name, part) and (is_last or _is_folder(entry)):
                yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry is a folder, or a link to a folder."""
    try:
        return entry.is_dir()
    except OSError as error:  # for example a link that leads to itself
        raise _unreadable(Path(entry.path), error) from error


def _status(path: Path, follow_symlinks: bool = True) -> os.stat_result | None:
    """Return the status of a file or folder; None if it does not exist."""
    try:
        return path.stat(follow_symlinks=follow_symlinks)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> PrepError:
    """Return the error for a folder that cannot be read."""
    return PrepError(
        f"{path} cannot be read ({error.strerror}), so its files would be missing. Make it readable, or give a path or "
        "a pattern that leaves it out."
    )
