"""Work in pieces that survive anything: each piece is done when its files are whole and a mark says what they are.

A step is a folder with a list of tasks. A task's files are made aside, renamed into the folder, and then its mark is
written: what the task was, its result, and size and SHA-256 of every file. A rerun takes a piece for done only if the
mark is of the same task and the files are as it says; all other pieces are made again. Which process made a piece, or
how often it was begun, does not show.
"""

import importlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_prep.errors import PrepError
from fairseq_alma.core.files import sha256_of, write_whole

_TASKS = "tasks.jsonl"
_BEAT_SECONDS = 1.0


class Executor(Protocol):
    """Runs pieces somewhere: here (`workers.Local`), or on a cluster (`slurm.Slurm`)."""

    def run(self, step: "Step", numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run these pieces of a step; call `on_done` for each. Raises PrepError if one fails, dies or hangs."""


@dataclass(frozen=True)
class Step:
    """Tasks of one function: `function(prefix, *task)` writes files whose paths begin with prefix, returns JSON."""

    folder: Path
    function: str
    """module:name, found again by a worker on any machine."""
    tasks: Sequence[tuple]
    """Arguments of each piece, JSON."""

    def run(
        self, executor: Executor, on_done: Callable[[int], None] = lambda number: None, threads: int = 1
    ) -> list[dict]:
        """Make what is missing; the results of all. `on_done(number)` is called once for each, done before or now.

        Raises:
            PrepError: a worker died, hung, or said that it cannot go on.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        described = "".join(f"{self._describe(number)}\n" for number in range(len(self.tasks)))
        if not (self.folder / _TASKS).is_file() or (self.folder / _TASKS).read_text() != described:
            write_whole(self.folder / _TASKS, described, durable=False)
        results: dict[int, dict] = {}
        for number in range(len(self.tasks)):
            mark = self._done(number)
            if mark is not None:
                results[number] = mark["result"]
                on_done(number)
        missing = [number for number in range(len(self.tasks)) if number not in results]
        for number in missing:
            # A sign of life of a run that was killed would be taken for that of a worker that hangs.
            for ending in ("done", "alive"):
                with suppress(FileNotFoundError):
                    self._path(number, ending).unlink()
        if missing:
            executor.run(self, missing, threads, on_done)
        for number in missing:
            mark = self.mark(number)
            if mark is None:
                raise PrepError(f"piece {number} of {self.folder.name} left no mark: run the same command again.")
            results[number] = mark["result"]
        return [results[number] for number in range(len(self.tasks))]

    def prefix(self, number: int) -> Path:
        """What the paths of a piece's files begin with."""
        return self.folder / f"{number:06d}"

    def mark(self, number: int) -> dict | None:
        """What the mark of a piece says; None without one of this task. Files are not looked at."""
        try:
            mark = json.loads(self._path(number, "done").read_text())
        except (OSError, ValueError):
            return None
        return mark if mark.get("task") == json.loads(self._describe(number)) else None

    def stalled(self, since: float, stall_seconds: float) -> str | None:
        """Which piece at work has made no progress for so long, as a sentence. `since`: when the run began."""
        for path in self.folder.glob("*.alive"):
            with suppress(OSError, ValueError):
                idle_seconds = time.time() - max(path.stat().st_mtime, since)
                if idle_seconds > stall_seconds and not path.with_suffix(".done").exists():
                    told = json.loads(path.read_text())
                    return (
                        f"a worker hung: process {told['pid']} on {told['host']} has made no progress for "
                        f"{idle_seconds:.0f} s in {self.folder.name}, piece {path.stem}, at {told['at']}"
                    )
        return None

    def _done(self, number: int) -> dict | None:
        mark = self.mark(number)
        if mark is None:
            return None
        for name, told in mark["files"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != told["bytes"] or sha256_of(path) != told["sha256"]:
                return None
        return mark

    def _describe(self, number: int) -> str:
        return json.dumps([self.function, *self.tasks[number]])

    def _path(self, number: int, ending: str) -> Path:
        return self.folder / f"{number:06d}.{ending}"


def run_piece(folder: str, number: int) -> int:
    """In a worker: make one piece of the step in this folder. Returns its number."""
    with open(Path(folder) / _TASKS) as file:
        task = json.loads(next(line for index, line in enumerate(file) if index == number))
    module, _, name = task[0].partition(":")
    function = getattr(importlib.import_module(module), name)
    stem = f"{number:06d}"
    aside = Path(folder) / f"{stem}.{socket.gethostname()}.{os.getpid()}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        with _Alive(Path(folder) / f"{stem}.alive"):
            result = function(aside / stem, *task[1:])
            files = {}
            for path in sorted(aside.iterdir()):
                beat()
                files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                os.replace(path, Path(folder) / path.name)
        write_whole(Path(folder) / f"{stem}.done", json.dumps({"task": task, "files": files, "result": result}), False)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return number


_progress = 0
_at = ""
_current: "_Alive | None" = None


def beat(at: str | None = None) -> None:
    """Say that work goes on, and at which file: called at every document."""
    global _progress, _at
    _progress += 1
    if at is not None and at != _at:
        _at = at
        if _current is not None:  # at once: a call that holds the interpreter would keep the watcher from telling it
            _current.tell()


class _Alive:
    """Touches a file while work goes on: `beat` was called, or (within `in_one_go`) the process has used its CPU."""

    def __init__(self, path: Path):
        self._path, self._over, self._writing = path, threading.Event(), threading.Lock()

    def __enter__(self):
        global _current
        _current = self
        beat("its start")
        self.tell()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __exit__(self, *error):
        global _current
        _current = None
        self._over.set()
        self._thread.join()
        with suppress(FileNotFoundError):
            self._path.unlink()

    def tell(self) -> None:
        with self._writing:  # the work and the watcher may do so at once
            write_whole(self._path, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "at": _at}), False)

    def _watch(self) -> None:
        seen = (_progress, time.process_time())
        while not self._over.wait(_BEAT_SECONDS):
            now = (_progress, time.process_time())
            own_share = 0.1 * _BEAT_SECONDS  # this thread uses a little itself
            if now[0] != seen[0] or (_one_go and now[1] - seen[1] > own_share):
                with suppress(OSError):  # a full disk is told by the work itself
                    self.tell()
            seen = now


_one_go = False


class in_one_go:  # noqa: N801, reads as a statement
    """Around a library's call that takes long and says nothing: progress is then that the process is computing."""

    def __enter__(self):
        global _one_go
        _one_go = True

    def __exit__(self, *error):
        global _one_go
        _one_go = False
