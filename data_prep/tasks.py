"""Divide work into steps and tasks. If alma-prep is killed, its next call continues without repeating finished tasks.

A step is a folder and a list of tasks. Each task is done by one worker process:

1. The worker writes the task's shards (output files) into a temporary folder.
2. It moves the shards into the step's folder by renaming.
3. It writes the done mark, a file with the task's description, its result, and the size and SHA-256 digest of every
   shard.

The next call of alma-prep skips a task if the done mark describes the same task and the shards have the recorded sizes
and digests. All other tasks are done again. The output does not depend on which process did a task or how often the
task was started.
"""

import importlib
import json
import os
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self

from data_prep.errors import PrepError
from data_prep.heartbeat import Heartbeat
from fairseq_alma.core.files import sha256_of, write_whole

_TASKS = "tasks.jsonl"


class Task(ABC):
    """A unit of work for one worker. Subclasses are frozen dataclasses whose fields can be converted to JSON.

    Two tasks with equal fields must write equal shards, because a task is skipped if an earlier call of alma-prep left
    a done mark with equal fields.
    """

    @abstractmethod
    def run(self, prefix: Path, heartbeat: Heartbeat) -> dict:
        """Do the task. This method is called in a worker process.

        Args:
            prefix: path prefix of all shards of the task. The task may only write files whose paths begin with it.
            heartbeat: the heartbeat, which shows that the task makes progress. Call `heartbeat.beat` at least once per
                document.

        Returns:
            The result of the task, a JSON object, which is stored in the task's done mark.
        """

    @classmethod
    def from_fields(cls, values: dict) -> Self:
        """Return the task with these field values, which were read from JSON.

        Override this method if a field has a type that JSON does not have, such as a tuple or a class.
        """
        return cls(**values)

    def description(self) -> str:
        """Return one line of JSON that describes the task: its class and the values of its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return json.dumps({"class": f"{type(self).__module__}:{type(self).__qualname__}", **values})


def _task_from(description: dict) -> Task:
    """Return the task with this description.

    This function imports the task's class, so that any worker on any machine can run the task.

    Args:
        description: the result of `Task.description`, parsed from JSON.
    """
    module, _, name = description["class"].partition(":")
    task_class = getattr(importlib.import_module(module), name)
    return task_class.from_fields({key: value for key, value in description.items() if key != "class"})


class Executor(Protocol):
    """Interface of the classes that run tasks: `workers.Local` on this machine and `slurm.Slurm` on a cluster."""

    def run(self, step: "Step", numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step.

        Args:
            step: the step to which the tasks belong.
            numbers: indices in `step.tasks` of the tasks to run.
            threads: maximum number of threads per task.
            on_done: called with the index of each task when the task is done.

        Raises:
            PrepError: if a worker died or hung, or a job ended without finishing its task.
        """


@dataclass(frozen=True)
class Step:
    """A list of tasks, and the folder for the tasks' output files (shards) and done marks.

    The number of a task is its index in the list.
    """

    folder: Path
    tasks: Sequence[Task]

    def run(
        self, executor: Executor, on_done: Callable[[int], None] = lambda number: None, threads: int = 1
    ) -> list[dict]:
        """Do all tasks of this step that no earlier call of alma-prep has done.

        Args:
            executor: runs the tasks, on this machine or on a Slurm cluster.
            on_done: called once with the number of each task, including the tasks that were done earlier.
            threads: maximum number of threads per task.

        Returns:
            The result of each task, in the order of `tasks`.

        Raises:
            PrepError: if a worker died, hung, or left no done mark.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptions = "".join(f"{task.description()}\n" for task in self.tasks)
        if not (self.folder / _TASKS).is_file() or (self.folder / _TASKS).read_text() != descriptions:
            write_whole(self.folder / _TASKS, descriptions, durable=False)
        results: dict[int, dict] = {}
        for number in range(len(self.tasks)):
            mark = self._checked_mark(number)
            if mark is not None:
                results[number] = mark["result"]
                on_done(number)
        missing = [number for number in range(len(self.tasks)) if number not in results]
        for number in missing:
            # Remove done marks that are not valid for these tasks. Also remove the heartbeat files of killed workers,
            # because a heartbeat file that no longer changes is reported as a hung worker.
            for ending in ("done", "alive"):
                self._path(number, ending).unlink(missing_ok=True)
        if missing:
            executor.run(self, missing, threads, on_done)
        for number in missing:
            mark = self.mark(number)
            if mark is None:
                raise PrepError(
                    f"task {number} of step {self.folder.name} did not finish: its done mark "
                    f"{self._path(number, 'done')} is missing. Run the same command again."
                )
            results[number] = mark["result"]
        return [results[number] for number in range(len(self.tasks))]

    def prefix(self, number: int) -> Path:
        """Return the path prefix of the output files (shards) of a task."""
        return self.folder / f"{number:06d}"

    def mark(self, number: int) -> dict | None:
        """Return the content of a task's done mark, or None if the done mark is missing or describes another task.

        This method does not check whether the task's output files (shards) match the done mark.
        """
        try:
            mark = json.loads(self._path(number, "done").read_text())
        except (OSError, ValueError):
            return None
        return mark if mark.get("task") == json.loads(self.tasks[number].description()) else None

    def stalled(self, since: float, stall_seconds: float) -> str | None:
        """Return an error message about a worker whose heartbeat stopped, or None if all workers make progress.

        Args:
            since: time at which the executor began these tasks, in seconds since the epoch. Heartbeats may be older.
                Only the time after `since` counts as time without progress.
            stall_seconds: seconds without progress after which a worker counts as hung.
        """
        # Check all heartbeat files. Temporary copies of heartbeat files are left out, because their names begin with a
        # dot, which the pattern does not match.
        for path in self.folder.glob("[0-9]*.alive"):
            with suppress(OSError, ValueError):
                idle_seconds = time.time() - max(path.stat().st_mtime, since)
                if idle_seconds > stall_seconds and not path.with_suffix(".done").exists():
                    content = json.loads(path.read_text())
                    return (
                        f"a worker hung: process {content['pid']} on {content['host']} has made no progress for "
                        f"{idle_seconds:.0f} s in step {self.folder.name}, task {path.stem}, at {content['at']}"
                    )
        return None

    def place_of(self, pid: int) -> str:
        """Return a text that says what a worker process on this machine was doing, by its heartbeat file.

        Args:
            pid: id of the process, which has died.
        """
        for path in sorted(self.folder.glob("[0-9]*.alive")):
            with suppress(OSError, ValueError):
                content = json.loads(path.read_text())
                if content["pid"] == pid and content["host"] == socket.gethostname():
                    return f"step {self.folder.name}, task {path.stem}, at {content['at']}"
        return f"step {self.folder.name}, between two tasks"

    def _checked_mark(self, number: int) -> dict | None:
        """Return the content of a task's done mark, or None if the mark is missing or does not match the task's shards.

        The mark matches if all shards (output files) have the sizes and digests that the mark records.
        """
        mark = self.mark(number)
        if mark is None:
            return None
        for name, expected in mark["files"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != expected["bytes"] or sha256_of(path) != expected["sha256"]:
                return None
        return mark

    def _path(self, number: int, ending: str) -> Path:
        return self.folder / f"{number:06d}.{ending}"


def run_task(folder: str, number: int) -> int:
    """Do one task of the step in `folder`, and return the task's number. This function runs in a worker process."""
    with open(Path(folder) / _TASKS) as file:
        description = json.loads(next(line for index, line in enumerate(file) if index == number))
    stem = f"{number:06d}"
    # Write the shards into a temporary folder first, because an interrupted task must leave no incomplete shards in the
    # step's folder. `written_aside` of core.files cannot be used for this, because it writes one file or one new
    # folder, but a task writes several shards into an existing folder.
    temporary = Path(folder) / f"{stem}.{socket.gethostname()}.{os.getpid()}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with Heartbeat(Path(folder) / f"{stem}.alive") as heartbeat:
            result = _task_from(description).run(temporary / stem, heartbeat)
            files = {}
            for path in sorted(temporary.iterdir()):
                heartbeat.beat()
                files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                os.replace(path, Path(folder) / path.name)
        mark = {"task": description, "files": files, "result": result}
        write_whole(Path(folder) / f"{stem}.done", json.dumps(mark), durable=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return number
