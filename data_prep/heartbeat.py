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
"""Time between two checks of whether the task has made progress, in seconds."""
_MIN_CPU_SHARE = 0.1
"""A worker process counts as busy in the last INTERVAL_SECONDS if it used more than this fraction of one CPU core. The
thread that writes the heartbeat file uses far less."""


class Heartbeat:
    """A context manager that rewrites a file while a task makes progress, and removes the file at the end.

    Every second, a thread rewrites the file if `beat` was called since the last check. Inside `with computing()`, the
    thread also rewrites the file if the process has used the CPU since the last check. If the file does not change for
    a long time, the worker counts as hung. The file then shows which input the worker was processing.

    Args:
        path: the heartbeat file. It contains the process id, the host, and what the task is working on, such as a file
            name (the argument `place` of `beat`).
    """

    def __init__(self, path: Path):
        self._path = path
        self._place = "its start"
        self._num_beats = 0
        self._is_computing = False
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
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
        """Count CPU use as progress inside this `with` statement.

        Use this context manager for long library calls, because they do not report progress.
        """
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def _write(self) -> None:
        """Rewrite the heartbeat file."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), "at": self._place}
        with self._writing:  # use a lock, because the task and the heartbeat thread may write at the same time
            write_whole(self._path, json.dumps(content), durable=False)

    def _watch(self) -> None:
        """Check once per INTERVAL_SECONDS whether the task has made progress. If so, rewrite the heartbeat file.

        This method runs in the heartbeat thread, and returns when the `with` statement ends.
        """
        num_beats, cpu_seconds = self._num_beats, time.process_time()
        while not self._ended.wait(INTERVAL_SECONDS):
            num_beats_now, cpu_seconds_now = self._num_beats, time.process_time()
            used_cpu = cpu_seconds_now - cpu_seconds > _MIN_CPU_SHARE * INTERVAL_SECONDS
            if num_beats_now != num_beats or (self._is_computing and used_cpu):
                # Ignore errors such as a full disk. The task writes to the same disk, so it fails too and reports the
                # error.
                with suppress(OSError):
                    self._write()
            num_beats, cpu_seconds = num_beats_now, cpu_seconds_now
