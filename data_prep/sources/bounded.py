"""Calls with a limit of CPU time, in a child process: pages from the web must not hang a worker.

The parsers are compiled code that nothing interrupts, and some take quadratic time on tags that are never closed. A
page that is long or full of tags is parsed in a child process. If it takes more than SECONDS of CPU time, the page is
skipped and the child ends. All other pages are parsed in the worker itself.
"""

import importlib
import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from data_prep.sources.base import ReportProgress, no_report

SECONDS = 20
"""Limit of CPU time: a hundred times what the longest articles and pages take, so that slow machines do not matter."""
_POLL_SECONDS = 0.5


class TooSlow(ValueError):  # noqa: N818, an adjective says it
    """An error of a call that used more CPU time than its limit."""


class Bounded:
    """A function that runs in a child process with a limit of CPU time. The child stays for further calls.

    Args:
        function: the function, as `module:name`.
        seconds: limit of CPU time per call.
    """

    def __init__(self, function: str, seconds: int = SECONDS):
        self._function, self._seconds = function, seconds
        self._child: Any = None
        self._pipe: Connection | None = None

    def __call__(self, *arguments: Any, report_progress: ReportProgress = no_report) -> Any:
        """Call the function and return its result.

        Args:
            arguments: the arguments of the function.
            report_progress: called twice a second while the function runs.

        Raises:
            TooSlow: the call used more CPU time than its limit.
            Exception: whatever the function raises.
        """
        if self._child is None or not self._child.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, pipe_of_child = context.Pipe()
            self._child = context.Process(target=_serve, args=(pipe_of_child, self._function), daemon=True)
            self._child.start()
            pipe_of_child.close()
        assert self._pipe is not None
        try:
            self._pipe.send((self._seconds, arguments))
            while not self._pipe.poll(_POLL_SECONDS):
                report_progress()
            is_result, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._child.join()
            self._child, self._pipe = None, None
            raise TooSlow(f"longer than {self._seconds} s to parse") from error
        if is_result:
            return value
        raise value


def _serve(pipe: Connection, function: str) -> None:
    """Answer calls in the child until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and this process ends with it
    module, _, name = function.partition(":")
    call: Callable = getattr(importlib.import_module(module), name)
    while True:
        try:
            seconds, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime) + 1 + seconds
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))  # the kernel kills this process at the limit
        try:
            answer = (True, call(*arguments))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)
