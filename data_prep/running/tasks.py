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
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self

from data_prep.errors import PrepError
from data_prep.running.heartbeat import INTERVAL_SECONDS, Heartbeat, StallWatch
from data_prep.running.task_list import read_task, write_tasks
from fairseq_alma.core.files import sha256_of, write_whole

_LISTED_TASKS = 25
"""Number of tasks whose files are listed in the time in which one done mark is looked up, estimated: a task has about
four files, and a network file system sends about 100 names at a time."""


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
        write_tasks(self.folder, [task.description() for task in self.tasks])
        names = {path.name for path in self.folder.iterdir()}
        results: dict[int, dict] = {}
        for number in range(len(self.tasks)):
            mark = self._checked_mark(number) if self._path(number, "done").name in names else None
            if mark is not None:
                results[number] = mark["result"]
                on_done(number)
        missing = [number for number in range(len(self.tasks)) if number not in results]
        for number in missing:
            # Remove done marks that are not valid for these tasks. Also remove what killed workers have left.
            if self._path(number, "done").name in names:
                self._path(number, "done").unlink(missing_ok=True)
            if self._path(number, "alive").name in names:
                remove_leftovers(self.folder, number)
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

    def digest(self, number: int) -> str:
        """Return the SHA-256 digest of the output file of a finished task that has only one output file."""
        mark = self.mark(number)
        assert mark is not None and len(mark["files"]) == 1, number
        return next(iter(mark["files"].values()))["sha256"]

    def mark(self, number: int) -> dict | None:
        """Return the content of a task's done mark, or None if the done mark is missing or describes another task.

        This method does not check whether the task's output files (shards) match the done mark.
        """
        try:
            mark = json.loads(self._path(number, "done").read_text())
        except (OSError, ValueError):
            return None
        return mark if mark.get("task") == json.loads(self.tasks[number].description()) else None

    def done_among(self, numbers: Collection[int]) -> list[int]:
        """Return those of `numbers` whose tasks have a done mark.

        This method does not check whether the task's output files (shards) match the done mark.
        """
        if _LISTED_TASKS * len(numbers) < len(self.tasks):
            found = [number for number in numbers if self._path(number, "done").exists()]
        else:
            names = {path.name for path in self.folder.iterdir()}
            found = [number for number in numbers if self._path(number, "done").name in names]
        return sorted(number for number in found if self.mark(number) is not None)

    def stalled(self, numbers: Iterable[int], watch: StallWatch) -> str | None:
        """Return an error message about a worker whose heartbeat stopped, or None if all workers make progress.

        Args:
            numbers: numbers of the tasks to check. A task without a heartbeat file is not running.
            watch: measures for how long the heartbeat files have not changed.
        """
        for number in numbers:
            path = self.alive_path(number)
            idle_seconds = watch.idle_seconds(path)
            if idle_seconds > watch.stall_seconds and path.exists() and not self._path(number, "done").exists():
                worker = worker_of(self.folder, number)
                return (
                    f"a worker hung: process {worker.get('pid')} on {worker.get('host')} has made no progress for "
                    f"{idle_seconds:.0f} s in step {self.folder.name}, task {path.stem}, at {worker.get('at')}"
                )
        return None

    def alive_path(self, number: int) -> Path:
        """Return the path of a task's heartbeat file."""
        return self._path(number, "alive")

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


def worker_of(folder: Path, number: int) -> dict:
    """Return the content of a task's heartbeat file (see `Heartbeat`); {} if there is none."""
    with suppress(OSError, ValueError):
        return json.loads((folder / f"{number:06d}.alive").read_text())
    return {}


def remove_leftovers(folder: Path, number: int) -> None:
    """Remove what a killed worker of this task has left: its temporary folder and its heartbeat file.

    A heartbeat file that no longer changes would be reported as a hung worker.
    """
    stem, worker = f"{number:06d}", worker_of(folder, number)
    shutil.rmtree(folder / f"{stem}.{worker.get('host')}.{worker.get('pid')}.part", ignore_errors=True)
    (folder / f"{stem}.alive").unlink(missing_ok=True)


def run_task(folder: str, number: int, heartbeat_seconds: float = INTERVAL_SECONDS) -> int:
    """Do one task of the step in `folder`, and return the task's number. This function runs in a worker process.

    Args:
        folder: the folder of the step.
        number: the number of the task.
        heartbeat_seconds: time between two checks of whether the task has made progress, see `Heartbeat`.
    """
    description = json.loads(read_task(Path(folder), number))
    stem = f"{number:06d}"
    # Write the shards into a temporary folder first, because an interrupted task must leave no incomplete shards in the
    # step's folder. `written_aside` of core.files cannot be used for this, because it writes one file or one new
    # folder, but a task writes several shards into an existing folder.
    temporary = Path(folder) / f"{stem}.{socket.gethostname()}.{os.getpid()}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with Heartbeat(Path(folder) / f"{stem}.alive", heartbeat_seconds) as heartbeat:
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
