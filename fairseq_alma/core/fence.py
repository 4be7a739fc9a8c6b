"""Fences: a process that has lost the lease of a folder cannot change the folder any more.

A process can be stopped for a long time, for example because its machine sleeps. Then another process takes over its
lease (see `fairseq_alma.core.lease`) and continues the run. When the first process wakes up, it may be in the middle of
writing a file. To ask whether the lease is still held, and then to write, is not enough: the process may sleep between
the two.

So each holder of a lease gets a folder of its own inside the leased folder, `.lease.` and a random number, its fence.
All files are first written there, and then moved to their final place by renaming (see `core.files.written_aside`). Who
takes over the lease first removes the fence of the holder before it. From then on, a rename of that holder fails,
because the file that it would move is gone: a rename happens completely or not at all, also between machines.

Files to which lines are appended (*.jsonl) are not renamed. A holder opens such a file, checks that its fence exists,
and then writes. Who takes over replaces these files by copies after it has removed the fence. So a late holder either
finds its fence gone, or writes to a file that no longer has a name.
"""

import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_alma.core.errors import RunError

_NAME = re.compile(r"\.lease\.[0-9a-f]{16}")


class LeaseLostError(RunError):
    """Another process has taken over the folder in which this process was working."""

    def __init__(self, folder: Path):
        super().__init__(
            f"{folder} was removed, or taken over by another process while this process was stopped for a long time. "
            f"Nothing was changed by this process since then"
        )


@dataclass(frozen=True)
class Fence:
    """The place where one holder of a lease writes its files."""

    folder: Path
    """The folder whose files only the holder may change, an absolute path."""
    place: Path
    """Folder in which files are written before they are moved."""
    unsynced: set[Path] = field(default_factory=set)
    """Files that may not be on the disk yet. See `core.files.sync_unsynced`."""

    @classmethod
    def in_folder(cls, leased: Path, guarded: Path) -> "Fence":
        """Make a new fence in the folder `leased`, for all files in the folder `guarded`."""
        place = leased.absolute() / f".lease.{secrets.token_hex(8)}"
        place.mkdir()
        # Not Path.absolute(), which keeps a `..`: `fence_of` would not find this folder.
        return cls(Path(os.path.abspath(guarded)), place)  # noqa: PTH100

    def check(self, cause: BaseException | None = None) -> None:
        """Raise LeaseLostError if another process has removed the fence."""
        if not self.place.is_dir():
            raise LeaseLostError(self.folder) from cause

    def is_on_disk_of(self, folder: Path) -> bool:
        """Return True if a file can be moved from the place to this folder by renaming."""
        try:
            return self.place.stat().st_dev == folder.stat().st_dev
        except FileNotFoundError:
            return True

    def exclude(self, places: list[Path]) -> None:
        """Remove the places of earlier holders, so that they cannot change the folder any more."""
        for place in places:
            # Rename it first, because deleting many files is not one step.
            with suppress(FileNotFoundError):
                os.replace(place, self.place / place.name)
            shutil.rmtree(self.place / place.name, ignore_errors=True)


def places_in(folder: Path) -> list[Path]:
    """Return the places of all holders, the present one and earlier ones, in a folder."""
    return [path for path in folder.glob(".lease.*") if _NAME.fullmatch(path.name)]


_held: dict[str, Fence] = {}
"""The fences of the leases that this process holds, by the path of the leased folder."""


def hold(fence: Fence) -> None:
    """From now on, files in the folder of this fence are written inside the fence."""
    _held[str(fence.folder)] = fence


def let_go(fence: Fence) -> None:
    """End what `hold` has begun."""
    _held.pop(str(fence.folder), None)


def held_fences() -> list[Fence]:
    """Return the fences of the leases that this process holds."""
    return list(_held.values())


def fence_of(path: str | Path) -> Fence | None:
    """Return the fence inside which a file must be written; None if this process holds no lease of its folders."""
    if not _held:
        return None
    text = os.path.abspath(path)  # noqa: PTH100 (a Path is slow, and must not follow symbolic links)
    while (parent := os.path.dirname(text)) != text:  # noqa: PTH120
        if fence := _held.get(parent):
            return fence
        text = parent
    return None
