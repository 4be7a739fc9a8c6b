"""Heartbeat files. They show whether the worker of a task makes progress.

A worker rewrites the heartbeat file of its task while the task makes progress. The file names the input that the worker
is processing.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from fairseq_alma.core.files import write_whole

INTERVAL_SECONDS = 1.0
"""Usual time between two checks of whether the task has made progress, in seconds."""
_MIN_CPU_SHARE = 0.1
"""A worker process counts as busy since the last check if it used more than this fraction of one CPU core. The
thread that writes the heartbeat file uses far less. A process that other processes leave less than this is not hung if
it waits for a core in the rest of the time."""


class Heartbeat:
    """A context manager that rewrites a file while a task makes progress, and removes the file at the end.

    Every second, a thread rewrites the file if `beat` was called since the last check. Inside `with computing()`, the
    thread also rewrites the file if the process has used the CPU since the last check. It rewrites the file, too, if
    the process has waited for a core since the last check, because other processes use all cores. If the file does not
    change for a long time, the worker counts as hung. If the task raises an exception, the file is kept, because it
    names the input.

    Args:
        path: the heartbeat file. It contains the process id, the host, and what the task is working on, such as a file
            name (the argument `place` of `beat`).
        interval_seconds: time between two checks of whether the task has made progress.
    """

    def __init__(self, path: Path, interval_seconds: float = INTERVAL_SECONDS):
        self._path, self._interval_seconds = path, interval_seconds
        self._place = "its start"
        self._num_beats = 0
        self._is_computing = False
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        if error_type is None:
            self._path.unlink(missing_ok=True)

    def beat(self, place: str | None = None) -> None:
        """Report progress. Call it at least once per document.

        Args:
            place: what the task is working on, such as a file name; None: the `place` of the previous call.
        """
        self._num_beats += 1
        if place is not None and place != self._place:
            self._place = place
            # Write the file now, and do not wait for the heartbeat thread. A long library call may follow that holds
            # the GIL (Python's global lock). During this call, the heartbeat thread could not write the new `place`.
            self._write()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count CPU use as progress inside this `with` statement, for long library calls, which report none."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def _write(self) -> None:
        content = {"pid": os.getpid(), "host": socket.gethostname(), "at": self._place}
        with self._writing:  # use a lock, because the task and the heartbeat thread may write at the same time
            write_whole(self._path, json.dumps(content), durable=False)

    def _watch(self) -> None:
        """Rewrite the heartbeat file as long as the task makes progress. This method runs in the heartbeat thread."""
        num_beats, cpu_seconds = self._num_beats, time.process_time()
        now, waited = time.monotonic(), _seconds_without_core()
        while not self._ended.wait(self._interval_seconds):
            num_beats_now, cpu_seconds_now = self._num_beats, time.process_time()
            later, waited_now = time.monotonic(), _seconds_without_core()
            used_cpu = cpu_seconds_now - cpu_seconds > _MIN_CPU_SHARE * self._interval_seconds
            longest_wait = max(
                (seconds - waited.get(thread, 0.0) for thread, seconds in waited_now.items()), default=0.0
            )
            is_starved = longest_wait > (1 - _MIN_CPU_SHARE) * (later - now)
            if num_beats_now != num_beats or (self._is_computing and used_cpu) or is_starved:
                # Ignore errors such as a full disk. The task writes to the same disk, so it fails too and reports the
                # error.
                with suppress(OSError):
                    self._write()
            num_beats, cpu_seconds, now, waited = num_beats_now, cpu_seconds_now, later, waited_now


def _seconds_without_core() -> dict[str, float]:
    """Return for each other thread of this process how long it could have run but had no core; {} if not on Linux."""
    found = {}
    for folder in Path("/proc/self/task").glob("*"):
        if folder.name != str(threading.get_native_id()):
            with suppress(OSError):  # the thread has ended
                found[folder.name] = int((folder / "schedstat").read_text().split()[1]) / 1e9
    return found


class StallWatch:
    """Measures for how long heartbeat files have not changed.

    The clocks of machines may differ, and a network file system may show a change only after some time. Therefore no
    time of a file is compared with the clock of this machine. Instead, this object remembers what each file was like
    when it looked at the file before, and measures with its own clock how long the file has stayed the same.

    Args:
        stall_seconds: seconds without a change after which a worker counts as hung.
        max_pause_seconds: longest usual time between two looks. After a longer pause, this process was suspended, and
            perhaps the workers were too. Then all measurements begin again.
    """

    def __init__(self, stall_seconds: float, max_pause_seconds: float = 20.0):
        self.stall_seconds, self._max_pause_seconds = stall_seconds, max_pause_seconds
        # Maps each file to its state (None if it does not exist) and the time at which this state was first seen.
        self._seen: dict[Path, tuple[tuple[int, int] | None, float]] = {}
        self._looked_at = time.monotonic()

    def idle_seconds(self, path: Path) -> float:
        """Return for how long the file has not changed, as far as this object has seen it; 0.0 at its first look."""
        now = time.monotonic()
        if now - self._looked_at > self._max_pause_seconds:
            self._seen.clear()
        self._looked_at = now
        try:
            found = path.stat()
            # Each rewrite makes a new file, which has another inode.
            state = (found.st_mtime_ns, found.st_ino)
        except OSError:
            state = None
        before = self._seen.get(path)
        if before is None or before[0] != state:
            self._seen[path] = (state, now)
            return 0.0
        return now - before[1]

    def forget(self, path: Path) -> None:
        """Begin to measure again, for example because the worker of this file is not running at the moment."""
        self._seen.pop(path, None)
