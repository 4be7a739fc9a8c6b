"""Parsing of pages from outside, which must not hang: in a process of its own that may take so much CPU time.

The parsers are compiled code that nothing interrupts, and some are quadratic in what was never closed. A page that is
long or full of tags is given to a child; one that takes more than SECONDS of its CPU is set aside, and the child ended.
All others are parsed here.
"""

import importlib
import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from data_prep.pieces import beat

SECONDS = 20
"""Of CPU: a hundred times what the longest articles and pages take, so that no machine is slow enough to matter."""
_POLL_SECONDS = 0.5


class TooSlow(ValueError):  # noqa: N818, an adjective says it
    """A page whose parsing was given up."""


class Bounded:
    """Calls `module:name` in a child, which is started when first used and stays."""

    def __init__(self, function: str, seconds: int = SECONDS):
        self._function, self._seconds = function, seconds
        self._child: Any = None
        self._pipe: Connection | None = None

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns. Raises what it raises, and TooSlow."""
        if self._child is None or not self._child.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._child = context.Process(target=_serve, args=(theirs, self._function), daemon=True)
            self._child.start()
            theirs.close()
        assert self._pipe is not None
        try:
            self._pipe.send((self._seconds, arguments))
            while not self._pipe.poll(_POLL_SECONDS):
                beat()
            is_result, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._child.join()
            self._child, self._pipe = None, None
            raise TooSlow(f"longer than {self._seconds} s to parse") from error
        if is_result:
            return value
        raise value


def _serve(pipe: Connection, function: str) -> None:
    """Until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: with it this ends
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
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))  # the kernel ends us at it
        try:
            answer = (True, call(*arguments))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)
