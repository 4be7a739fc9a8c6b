"""Call a function in a child process with a CPU time limit, so that no page can make a worker process hang.

The HTML and wiki parsers are compiled code that cannot be interrupted. Some of them need quadratic time if tags are
never closed. Therefore a page that is long or has many tags is parsed in a child process. If parsing takes more than
SECONDS of CPU time, the child process is killed and the page is skipped. All shorter and simpler pages are parsed in
the worker process itself.
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
"""CPU time limit of a call, in seconds. Even the longest real pages need only 1% of this time, so
the limit is not reached on slow machines either."""
_POLL_SECONDS = 0.5


class TooSlow(ValueError):  # noqa: N818, the name needs no suffix
    """Raised if a function call exceeds its CPU time limit."""


class Bounded:
    """Runs a function in a child process with a CPU time limit. The child process is reused for later calls.

    Args:
        function: name of the function, as `module:name`.
        seconds: CPU time limit per call, in seconds.
    """

    def __init__(self, function: str, seconds: int = SECONDS):
        self._function, self._seconds = function, seconds
        self._child: Any = None
        self._pipe: Connection | None = None

    def __call__(self, *arguments: Any, report_progress: ReportProgress = no_report) -> Any:
        """Call the function and return its result.

        Args:
            arguments: arguments of the function.
            report_progress: called twice a second while the function runs.

        Raises:
            TooSlow: if the call exceeded the CPU time limit.
            Exception: any exception that the function raises.
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
            raise TooSlow(f"parsing takes longer than {self._seconds} s") from error
        if is_result:
            return value
        raise value


def _serve(pipe: Connection, function: str) -> None:
    """Execute the calls that arrive through the pipe, until the parent closes the pipe. Runs in the child process.

    Args:
        pipe: receives (CPU time limit in seconds, arguments) for each call, and sends (True, result) or (False, error).
        function: name of the function to call, as `module:name`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C here, because the parent process handles it
    module, _, name = function.partition(":")
    call: Callable = getattr(importlib.import_module(module), name)
    while True:
        try:
            seconds, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        # The kernel counts the CPU time of this process since its start, not since the start of this call. Therefore
        # the limit `most` is the time that earlier calls used plus `seconds`.
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime) + 1 + seconds
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        # If this child process uses more than `most` seconds of CPU time, the kernel kills it.
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
        try:
            answer = (True, call(*arguments))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)
