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

import hashlib
import importlib
import json
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, Self, TypedDict, get_args, get_origin, get_type_hints

from data_prep.errors import PrepError, is_full_disk
from data_prep.running.heartbeat import INTERVAL_SECONDS, Heartbeat, StallWatch
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import file_named, read_json, sealed, sha256_of, write_whole
from fairseq_alma.core.store import Store, StoredFile, link_or_copy

_TASKS = "tasks.sha256"
"""Name of the file with a digest of the tasks of a step."""
_DIGEST_THREADS = 8
"""Number of files whose digests are computed at a time."""


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
            heartbeat: shows that the task makes progress. Call `heartbeat.beat` at least once per document.

        Returns:
            The result of the task, a JSON object, which is stored in the task's done mark.
        """

    @classmethod
    def from_fields(cls, values: dict) -> Self:
        """Return the task with these field values, which were read from JSON."""
        types = get_type_hints(cls)
        return cls(**{name: _typed(value, types[name]) for name, value in values.items()})

    def description(self) -> str:
        """Return one line of JSON that describes the task: its class and the values of its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return json.dumps({"class": f"{type(self).__module__}:{type(self).__qualname__}", **values})


def _typed(value: Any, kind: Any) -> Any:
    """Return a value that was read from JSON, as an object of a type. Tuples are lists in JSON."""
    if isinstance(kind, UnionType):
        return value if value is None else _typed(value, get_args(kind)[0])
    if not isinstance(value, list):
        return value
    if args := get_args(kind):
        return get_origin(kind)(_typed(part, args[0]) for part in value)
    return kind(*map(_typed, value, get_type_hints(kind).values()))


def _task_from(description: dict) -> Task:
    """Return the task with this description. Its class is imported, so any worker on any machine can run the task."""
    module, _, name = description["class"].partition(":")
    task_class = getattr(importlib.import_module(module), name)
    return task_class.from_fields({key: value for key, value in description.items() if key != "class"})


class DoneMark(TypedDict):
    """The content of a done mark: the task, what it has returned, and its output files by name."""

    task: dict[str, Any]
    files: dict[str, StoredFile]
    result: dict[str, Any]


class Executor(Protocol):
    """Interface of the classes that run tasks: `workers.Local` on this machine and `slurm.Slurm` on a cluster."""

    def run(self, step: "Step", numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step.

        Args:
            step: the step.
            numbers: the numbers of the tasks to run.
            threads: maximum number of threads per task.
            on_done: called with the number of each task when the task is done.

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
        self, executor: Executor, on_done: Callable[[int], None] = lambda number: None, threads: int = 1,
        numbers: Sequence[int] | None = None, finished: Mapping[int, dict] | None = None,
    ) -> list[dict]:  # fmt: skip
        """Do all tasks of this step that no earlier call of alma-prep has done.

        Args:
            executor: runs the tasks, on this machine or on a Slurm cluster.
            on_done: called once with the number of each task, including the tasks that were done earlier.
            threads: maximum number of threads per task.
            numbers: the numbers of the tasks to do; None: all tasks.
            finished: what the method `finished` has returned; None: call it.

        Returns:
            The result of each task, in the order of `numbers`.

        Raises:
            PrepError: if a worker died, hung, or left no done mark.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._listed() != (digest := self._digest()):
            write_whole(self.folder / _TASKS, digest, durable=False)
        numbers = range(len(self.tasks)) if numbers is None else numbers
        results = dict(self.finished(numbers) if finished is None else finished)
        for number in numbers:
            if number in results:
                on_done(number)
        missing = [number for number in numbers if number not in results]
        names = {path.name for path in self.folder.iterdir()}
        for number in missing:
            # Remove done marks that are not valid for these tasks. Also remove what killed workers have left.
            if self.path(number, "done").name in names:
                self.path(number, "done").unlink(missing_ok=True)
            if self.path(number, "alive").name in names:
                remove_leftovers(self.folder, number)
        if missing:
            executor.run(self, missing, threads, on_done)
        for number in missing:
            mark = self.mark(number)
            if mark is None:
                raise PrepError(
                    f"task {number} of step {self.folder.name} did not finish: its done mark "
                    f"{self.path(number, 'done')} is missing. Run the same command again."
                )
            results[number] = mark["result"]
        return [results[number] for number in numbers]

    def finished(self, numbers: Iterable[int] | None = None) -> dict[int, dict]:
        """Return the results of the tasks that earlier calls of alma-prep have done, by number.

        A task is done if its done mark describes this task, and its output files (shards) have the sizes and digests
        that the mark records.

        Args:
            numbers: the numbers of the tasks to look at; None: all tasks.
        """
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        results: dict[int, dict] = {}
        files: list[tuple[int, Path, str]] = []
        for number in range(len(self.tasks)) if numbers is None else numbers:
            mark = self.mark(number) if self.path(number, "done").name in names else None
            if mark is None or not names.issuperset(mark["files"]):
                continue
            paths = {self.folder / name: expected for name, expected in mark["files"].items()}
            if all(path.stat().st_size == expected["bytes"] for path, expected in paths.items()):
                results[number] = mark["result"]
                files += [(number, path, expected["sha256"]) for path, expected in paths.items()]
        found = digests_of([path for _, path, _ in files])
        for (number, _, expected), sha256 in zip(files, found, strict=True):
            if sha256 != expected:
                results.pop(number, None)
        return results

    def prefix(self, number: int) -> Path:
        """Return the path prefix of the output files (shards) of a task."""
        return self.folder / f"{number:06d}"

    def path(self, number: int, ending: str) -> Path:
        """Return the path of a file of a task: an output file, its done mark ("done") or its heartbeat ("alive")."""
        return self.folder / f"{number:06d}.{ending}"

    def file(self, number: int, ending: str) -> tuple[Path, dict]:
        """Return the path of an output file of a finished task, and {"bytes": .., "sha256": ..}, its size and digest.

        See `path` for the arguments.
        """
        path = self.path(number, ending)
        return path, mark_of(self.folder, number)["files"][path.name]

    def results(self) -> list[dict]:
        """Return the result of each task of a finished step."""
        return [mark_of(self.folder, number)["result"] for number in range(len(self.tasks))]

    def mark(self, number: int) -> dict | None:
        """Return the content of a task's done mark; None if the mark is missing, damaged or describes another task.

        This method does not check whether the task's output files (shards) match the done mark.
        """
        try:
            mark = dict(read_json(self.path(number, "done"), DoneMark))
        except (OSError, RunError):
            return None
        return mark if mark["task"] == json.loads(self.tasks[number].description()) else None

    def lists_other_tasks(self) -> bool:
        """Return True if the folder contains the work of an earlier call that had other tasks."""
        return self._listed() not in (None, self._digest())

    def put(self, number: int, store: Store, check_digests: bool = True) -> None:
        """Store the result of the finished task `number` in the folder, under the key of its description.

        Args:
            number: number of the task. It need not be one of `tasks`.
            store: the store.
            check_digests: see `Store.put`.

        Raises:
            OSError: if the files cannot be stored.
            RunError: if the done mark is damaged.
        """
        mark = read_json(self.path(number, "done"), DoneMark)
        files = {name.partition(".")[2]: self.folder / name for name in mark["files"]}
        known = {name.partition(".")[2]: digest for name, digest in mark["files"].items()}
        key = key_of(json.dumps(mark["task"]))
        store.put(key, files, mark["result"], link=True, known=known, check_digests=check_digests)

    def put_all(self, store: Store) -> None:
        """Store the results of all finished tasks in the folder, also of tasks of an earlier call. See `put`."""
        for path in sorted(self.folder.glob("*.done")):
            with suppress(FileNotFoundError, RunError):  # a damaged result is not stored
                self.put(int(path.stem), store, check_digests=False)

    def take(self, number: int, store: Store, key: str) -> bool:
        """Copy the stored result of a task into the folder, as if the task had just finished. Return False if none is.

        The digests of the files are not checked here: `run` does it, and does the task again if one of them differs.

        Raises:
            OSError: if the disk is full.
        """
        entry = store.take(key, check_digests=False)
        if entry is None:
            return False
        names = {stored: self.path(number, stored).name for stored in entry.files}
        try:
            for stored, name in names.items():
                link_or_copy(entry.folder / stored, self.folder / name)
        except OSError as error:  # for example, another process has just replaced a damaged entry
            if is_full_disk(error):
                raise
            return False
        files = {names[stored]: digest for stored, digest in entry.files.items()}
        done = sealed({"task": json.loads(self.tasks[number].description()), "files": files, "result": entry.value})
        self.path(number, "done").write_text(json.dumps(done))
        return True

    def stalled(self, numbers: Iterable[int], watch: StallWatch) -> str | None:
        """Return an error message about a worker whose heartbeat stopped, or None if all workers make progress.

        Args:
            numbers: numbers of the tasks to check. A task without a heartbeat file is not running.
            watch: measures for how long the heartbeat files have not changed.
        """
        for number in numbers:
            path = self.path(number, "alive")
            idle_seconds = watch.idle_seconds(path)
            if idle_seconds > watch.stall_seconds and path.exists() and not self.path(number, "done").exists():
                worker = worker_of(self.folder, number)
                return (
                    f"a worker hung: process {worker.get('pid')} on {worker.get('host')} has made no progress for "
                    f"{idle_seconds:.0f} s in step {self.folder.name}, task {path.stem}, at {worker.get('at')}"
                )
        return None

    def place_of(self, pid: int) -> str:
        """Return what a worker process on this machine, which has died, was doing, by its heartbeat file."""
        for path in sorted(self.folder.glob("[0-9]*.alive")):
            with suppress(OSError, ValueError):
                content = json.loads(path.read_text())
                if content["pid"] == pid and content["host"] == socket.gethostname():
                    return f"step {self.folder.name}, task {path.stem}, at {content['at']}"
        return f"step {self.folder.name}, between two tasks"

    def _digest(self) -> str:
        return key_of("\n".join(task.description() for task in self.tasks))

    def _listed(self) -> str | None:
        """Return the digest of the tasks of the call that has made the folder; None if there was none."""
        path = self.folder / _TASKS
        return path.read_text() if path.is_file() else None


def key_of(description: str) -> str:
    """Return the key under which the result of a task with this description is stored."""
    return hashlib.sha256(description.encode()).hexdigest()


def mark_of(folder: Path, number: int) -> dict:
    """Return the content of the done mark of a finished task of the step in `folder`."""
    return read_json(folder / f"{number:06d}.done", advice="run the same command again")


def digests_of(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 digest of each file. Several files are read at a time."""
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        return list(pool.map(sha256_of, paths))


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


def run_task(folder: str, number: int, task: str, heartbeat_seconds: float = INTERVAL_SECONDS) -> int:
    """Do one task of the step in `folder`, in a worker process, and return its number.

    `task` is its description, and `heartbeat_seconds` the argument `interval_seconds` of `Heartbeat`.
    """
    description = json.loads(task)
    stem = f"{number:06d}"
    # Write the shards into a temporary folder first, because an interrupted task must leave no incomplete shards in the
    # step's folder.
    temporary = Path(folder) / f"{stem}.{socket.gethostname()}.{os.getpid()}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with file_named(Path(folder) / stem), Heartbeat(Path(folder) / f"{stem}.alive", heartbeat_seconds) as heartbeat:
            result = _task_from(description).run(temporary / stem, heartbeat)
            files = {}
            for path in sorted(temporary.iterdir()):
                heartbeat.beat(f"the digest of {path.name}")
                files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path, heartbeat.beat)}
                os.replace(path, Path(folder) / path.name)
        mark = sealed({"task": description, "files": files, "result": result})
        write_whole(Path(folder) / f"{stem}.done", json.dumps(mark), durable=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return number
