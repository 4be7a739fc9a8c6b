"""Keep the results of finished reading tasks, so that they are used again instead of reading the sources again.

A store is a folder with one subfolder, an entry, per reading task (`spool.SpoolTask`). The name of an entry is a digest
of the task's description, which contains everything that the result depends on: the paths, sizes and modification times
of the input files, the parts of the files, the cleaning, and the versions of the libraries and of the reading code.

alma-prep uses two stores. The work folder contains one, so that a call with changed settings continues with the text
that an earlier call has read. The other one is the folder that the option --cache names. Several streams, and several
processes at the same time, can use it.

An entry is complete as soon as it exists, because it is made aside and then renamed. Entries are only ever added, or
replaced if they are damaged.
"""

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from data_prep.reading.spool import SpoolTask
from data_prep.running.progress import note
from data_prep.running.task_list import read_all_tasks
from data_prep.running.tasks import Step

_MARK = "mark.json"
"""Name of the file of an entry that contains the result of the task, and the sizes and digests of the other files."""

_ABANDONED_SECONDS = 86_400
"""Age in seconds after which an unfinished copy of an entry belongs to a process that was killed."""


class ReadStore:
    """The results of finished reading tasks, in a folder.

    Args:
        folder: the folder. It is created when the first entry is stored.
        is_cache: True if a run can go on when its text cannot be stored, because the step's folder contains the text.
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
            note(f"no more text is stored in the cache {self._folder}: {error}")

    def _put(self, step: Step, number: int) -> None:
        """Store the result of a finished task, see `put`."""
        task, mark = step.tasks[number], step.mark(number)
        assert isinstance(task, SpoolTask), task
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
            (aside / _MARK).write_text(json.dumps({"files": files, "result": mark["result"]}))
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
        assert isinstance(task, SpoolTask), task
        prefix = step.prefix(number)
        for entry in self._entries(task):
            try:
                mark = json.loads((entry / _MARK).read_text())
                names = {stored: f"{prefix.name}.{stored}" for stored in mark["files"]}
                for stored, name in names.items():
                    _link(entry / stored, step.folder / name)
            except (OSError, ValueError, KeyError):
                # There is no such entry, or another process is just replacing it.
                continue
            files = {names[stored]: digest for stored, digest in mark["files"].items()}
            done = {"task": json.loads(task.description()), "files": files, "result": mark["result"]}
            prefix.with_name(f"{prefix.name}.done").write_text(json.dumps(done))
            return True
        return False

    def _entries(self, task: SpoolTask) -> list[Path]:
        """Return the paths of the entries that contain the result of a task, if they exist: first its own entry."""
        # A result with signatures also serves a task without: the signatures are not read.
        tasks = [task] if task.sign else [task, replace(task, sign=True)]
        keys = [hashlib.sha256(_without_paths(each).description().encode()).hexdigest() for each in tasks]
        return [self._folder / key[:2] / key for key in keys]


def _without_paths(task: SpoolTask) -> SpoolTask:
    """Return the task without the paths of the files that the cleaning uses. Their digests stay.

    So the result is found also if the list of URLs has been moved, or the file with repeated paragraphs is in the work
    folder of another stream.
    """
    cleaning = task.cleaning
    if cleaning is None:
        return task
    block_urls = ("", *cleaning.block_urls[1:]) if cleaning.block_urls else ()
    paragraphs = ("", *cleaning.paragraphs[1:]) if cleaning.paragraphs else ()
    return replace(task, cleaning=cleaning._replace(block_urls=block_urls, paragraphs=paragraphs))  # type: ignore[arg-type]


def keep_finished(step: Step, store: ReadStore) -> None:
    """Move the finished tasks of an earlier call into a store, if the tasks of this call are others.

    Args:
        step: the reading step of this call. Its folder may contain tasks of an earlier call.
        store: the store.
    """
    try:
        earlier = Step(step.folder, [_task(json.loads(line)) for line in read_all_tasks(step.folder)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # There are no tasks, or they are of an earlier release, which described tasks in another way.
        return
    if list(earlier.tasks) == list(step.tasks):
        return
    for number in range(len(earlier.tasks)):
        store.put(earlier, number)
    shutil.rmtree(step.folder)


def take_finished(step: Step, stores: Sequence[ReadStore]) -> None:
    """Copy the results of all tasks that are not done yet, but are in one of the stores, into the step's folder."""
    step.folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(step.tasks)):
        if step.mark(number) is None:
            any(store.take(step, number) for store in stores)


def _task(description: dict) -> SpoolTask:
    """Return the reading task with this description."""
    return SpoolTask.from_fields({name: value for name, value in description.items() if name != "class"})


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
