"""A store of results by key. A key is a digest of all that a result depends on, so an equal key means an equal result.

A store is a folder with one subfolder, an entry, for each key. An entry contains the files of a result, and the mark
entry.json with their sizes and digests, which is written last. It is made aside and then renamed. Several processes on
several machines can use a store at the same time. Entries are only added, or replaced if they are damaged.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from uuid import uuid4

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.fence import fence_of
from fairseq_alma.core.files import read_json, remove, sealed, sha256_of, sync, write_json

_MARK = "entry.json"
_ABANDONED_SECONDS = 86_400.0
"""Age in seconds after which an unfinished entry belongs to a process that was killed."""


class StoredFile(TypedDict):
    """The size of a file in bytes, and its SHA-256 digest."""

    bytes: int
    sha256: str


class _Mark(TypedDict):
    """The content of a mark."""

    files: dict[str, StoredFile]
    value: Any


class Entry(NamedTuple):
    """A stored result."""

    folder: Path
    """The folder with its files. Read them, but do not change them."""
    files: dict[str, StoredFile]
    """The files, by their paths relative to the folder."""
    value: Any
    """The value that was stored with the files."""


class Store:
    """Results in a folder, by key. The folder is created when the first result is stored.

    If `durable`, the disk has stored the files of an entry before its mark is written. Otherwise, a power failure may
    damage an entry. This is no loss where `take` compares the digests.
    """

    def __init__(self, folder: str | Path, durable: bool = True):
        self.folder, self._durable = Path(folder), durable

    def take(self, key: str, check_digests: bool = True) -> Entry | None:
        """Return the result with this key; None if there is none or it is damaged.

        If `check_digests`, all files are read, to compare their digests. Otherwise, only their sizes are compared.
        """
        folder = self._folder_of(key)
        try:
            mark = read_json(folder / _MARK, _Mark)
            for name, expected in mark["files"].items():
                if (folder / name).stat().st_size != expected["bytes"]:
                    return None
                if check_digests and sha256_of(folder / name) != expected["sha256"]:
                    return None
        except (OSError, RunError):
            return None
        return Entry(folder, mark["files"], mark["value"])

    def put(
        self, key: str, source: Mapping[str, Path], value: Any = None, link: bool = False,
        known: Mapping[str, StoredFile] | None = None, check_digests: bool = True,
    ) -> None:  # fmt: skip
        """Store a copy of a result. A result that is stored already, and not damaged, is not changed.

        Args:
            key: the key.
            source: the files by the names that they get in the entry.
            value: a value that JSON can represent, which is stored with the files.
            link: make hard links instead of copies, where the file system can, for files that are never changed in
                place.
            known: the sizes and digests of the files, by name, if the caller knows them.
            check_digests: how to look whether the result is stored already, see `take`.

        Raises:
            OSError: if the disk is full, or the folder cannot be written.
        """
        if self.take(key, check_digests) is not None:
            return
        with self.writing(key, value, known) as folder:
            for name, path in source.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, folder / name) if link else shutil.copyfile(path, folder / name)

    @contextmanager
    def writing(self, key: str, value: Any = None, known: Mapping[str, StoredFile] | None = None) -> Iterator[Path]:
        """Context manager that yields an empty folder, and stores what the block writes into it. See `put`."""
        target = self._folder_of(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in target.parent.glob("*.part"):
            with suppress(OSError):  # another process may remove it at the same time
                newest = max(one.stat().st_mtime for one in (path, *path.iterdir()))
                if time.time() - newest > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        fence = fence_of(target)
        is_fenced = fence is not None and fence.is_on_disk_of(target.parent)
        # Machines that share the folder may use the same process number.
        aside = (fence.place if fence and is_fenced else target.parent) / f"{key}.{uuid4().hex}.part"
        try:
            aside.mkdir()
            yield aside
            files = known
            if files is None:
                written = sorted(path for path in aside.rglob("*") if path.is_file())
                files = {
                    path.relative_to(aside).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                    for path in written
                }
            if self._durable:
                sync(aside)
            write_json(aside / _MARK, sealed({"files": files, "value": value}), self._durable)
            if target.exists() and self.take(key) is None:
                with suppress(FileNotFoundError):
                    target.rename(aside.with_suffix(".damaged.part"))
            try:
                aside.rename(target)
            except OSError as error:  # another process has just stored the same result
                if fence:
                    fence.check(error)
                if not target.exists():
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(aside.with_suffix(".damaged.part"), ignore_errors=True)

    def remove_all_but(self, keys: Collection[str]) -> None:
        """Remove all entries but those with these keys. Call it only if no other process uses the store."""
        for path in self.folder.glob("*"):
            if path.name not in keys:
                remove(path)

    def _folder_of(self, key: str) -> Path:
        return self.folder / key


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy if the file system has no hard links or the target is on another one."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
