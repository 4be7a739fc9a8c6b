"""The heartbeat of a task: a file that shows the run that a worker makes progress, and which input it reads."""

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
_MIN_CPU_SHARE = 0.1
"""The process computes if it uses more than this share of one CPU. The heartbeat's own thread uses far less."""


class Heartbeat:
    """A file that is rewritten while a task makes progress. A context manager: the file is removed at the end.

    A thread rewrites the file every second if `beat` was called since the last time or, within `computing`, if the
    process used its CPU. A file that becomes old belongs to a worker that hangs; its content says where.

    Args:
        path: the file. It holds the process id, the host and the place that was passed to `beat` last.
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
            place: what the task works on now, such as the name of a file; None: the same as before.
        """
        self._num_beats += 1
        if place is not None and place != self._place:
            self._place = place
            # Written at once: a library call that holds the interpreter would keep the thread from writing it.
            self._write()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count used CPU time as progress in the block: for a long call of a library that reports nothing."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def _write(self) -> None:
        content = {"pid": os.getpid(), "host": socket.gethostname(), "at": self._place}
        with self._writing:  # the task and the thread may write at the same time
            write_whole(self._path, json.dumps(content), durable=False)

    def _watch(self) -> None:
        num_beats, cpu_seconds = self._num_beats, time.process_time()
        while not self._ended.wait(INTERVAL_SECONDS):
            num_beats_now, cpu_seconds_now = self._num_beats, time.process_time()
            used_cpu = cpu_seconds_now - cpu_seconds > _MIN_CPU_SHARE * INTERVAL_SECONDS
            if num_beats_now != num_beats or (self._is_computing and used_cpu):
                with suppress(OSError):  # the task itself reports a full disk
                    self._write()
            num_beats, cpu_seconds = num_beats_now, cpu_seconds_now
