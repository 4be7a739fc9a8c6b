"""Keep the results of finished tasks, so that another call of alma-prep, or another stream, can use them.

A store is a folder with one subfolder, an entry, per task. The name of an entry is a digest of everything that the
result depends on.

An entry is complete as soon as it exists, because it is made aside and then renamed. Entries are only ever added, or
replaced if they are damaged. Several processes can use a store at the same time.
"""

import json
import os
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_prep.running.progress import note
from data_prep.running.tasks import Step, StoredResult
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, sealed

_MARK = "mark.json"
"""Name of the file of an entry that contains the result of the task, and the sizes and digests of the other files."""

_ABANDONED_SECONDS = 86_400
"""Age in seconds after which an unfinished copy of an entry belongs to a process that was killed."""


class TaskStore(ABC):
    """The results of finished tasks, in a folder. A subclass says by which keys they are found.

    Args:
        folder: the folder. It is created when the first entry is stored.
        is_cache: True if a run can go on when a result cannot be stored, because the step's folder contains it.
    """

    def __init__(self, folder: Path, is_cache: bool = False):
        self._folder, self._is_cache = folder, is_cache
        self._has_failed = False

    def put(self, step: Step, number: int) -> None:
        """Store the result of a finished task. An entry that contains the same files already is not changed.

        If the store is a cache, the first error of the system, such as a full disk, is printed, and then nothing more
        is stored.

        Args:
            step: the step to which the task belongs.
            number: number of the task.

        Raises:
            OSError: if the files cannot be stored, and the store is not a cache.
        """
        if self._has_failed:
            return
        try:
            self._put(step, number)
        except OSError as error:
            if not self._is_cache:
                raise
            self._has_failed = True
            note(f"nothing more is stored in the cache {self._folder}: {error}")

    def _put(self, step: Step, number: int) -> None:
        """Store the result of a finished task, see `put`."""
        task, mark = step.tasks[number], step.mark(number)
        if mark is None:
            return
        entry = self._entries(task)[0]
        names = {name: name.partition(".")[2] for name in mark["files"]}
        for found in self._entries(task):
            if all(_is_copy(step.folder / name, found / stored) for name, stored in names.items()):
                return
        _remove_abandoned(entry)
        aside = entry.with_name(f"{entry.name}.{socket.gethostname()}.{os.getpid()}.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            for name, stored in names.items():
                _link(step.folder / name, aside / stored)
            files = {names[name]: digest for name, digest in mark["files"].items()}
            (aside / _MARK).write_text(json.dumps(sealed({"files": files, "result": mark["result"]})))
            # If the entry exists, its files differ from those of the finished task, so they are damaged. Another
            # process may replace the same entry at the same time. Then that entry is as good as this one.
            shutil.rmtree(entry, ignore_errors=True)
            with suppress(OSError):
                aside.rename(entry)
        except FileNotFoundError:  # an earlier call was killed while it removed the files of the task
            pass
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def take(self, step: Step, number: int) -> bool:
        """Copy the stored result of a task into the step's folder, as if the task had just finished.

        `Step.run` checks the digests of the files afterwards, and does the task again if one of them is damaged.

        Args:
            step: the step to which the task belongs.
            number: number of the task.

        Returns:
            True if the store contains the result.
        """
        task = step.tasks[number]
        prefix = step.prefix(number)
        for entry in self._entries(task):
            try:
                mark = read_json(entry / _MARK, StoredResult)
                names = {stored: f"{prefix.name}.{stored}" for stored in mark["files"]}
                for stored, name in names.items():
                    _link(entry / stored, step.folder / name)
            except (OSError, RunError):
                # There is no such entry, it is damaged, or another process is just replacing it.
                continue
            files = {names[stored]: digest for stored, digest in mark["files"].items()}
            done = sealed({"task": json.loads(task.description()), "files": files, "result": mark["result"]})
            prefix.with_name(f"{prefix.name}.done").write_text(json.dumps(done))
            return True
        return False

    def _entries(self, task: Any) -> list[Path]:
        """Return the paths of the entries that contain the result of a task, if they exist: first its own entry."""
        return [self._folder / key[:2] / key for key in self.keys(task)]

    @abstractmethod
    def keys(self, task: Any) -> list[str]:
        """Return the names of the entries that contain the result of a task, if they exist: first its own entry."""


def take_finished(step: Step, stores: Sequence[TaskStore], numbers: Sequence[int] | None = None) -> None:
    """Copy the results of all tasks that are not done yet, but are in one of the stores, into the step's folder.

    Args:
        step: the step.
        stores: the stores, the first ones first.
        numbers: the numbers of the tasks; None: all tasks. Give `Step.run` the same numbers, because it checks the
            digests of what was copied.
    """
    step.folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(step.tasks)) if numbers is None else numbers:
        if step.mark(number) is None:
            any(store.take(step, number) for store in stores)


def _remove_abandoned(entry: Path) -> None:
    """Remove unfinished copies of an entry that killed processes have left."""
    for path in entry.parent.glob(f"{entry.name}.*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _is_copy(path: Path, stored: Path) -> bool:
    """Return True if `stored` is a link to the file `path`, or a copy that `_link` made of it, or the reverse."""
    try:
        found, wanted = stored.stat(), path.stat()
    except OSError:
        return False
    same_times = (found.st_size, found.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)
    return os.path.samestat(found, wanted) or same_times


def _link(source: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy if the file system has no hard links or the target is on another one."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
