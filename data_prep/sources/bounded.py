"""Parse pages, articles and books in a child process that has limits on CPU time and memory.

The parsers of HTML, wiki markup, EPUB and Parquet are compiled code that cannot be interrupted. Some pages make them
compute for minutes or fill the memory: tags that are never closed, one tag with 100,000 attributes, a small file that
unpacks to gigabytes. Therefore every page is parsed in a child process. If a page exceeds a limit, or the parser
crashes, the kernel ends the child process, the page is skipped, and a new child process parses the next pages.

Pages are sent to the child process in batches, because a message for every page would take longer than parsing a short
page. If the child process dies while it parses a batch, the pages of the batch are parsed again, one by one. So whether
a page is skipped depends on this page only, not on the other pages in its batch.
"""

import itertools
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from data_prep.errors import Passing
from data_prep.sources.base import ReportProgress

SECONDS = 20
"""CPU time limit for one page, in seconds. Even the longest real pages need only 1% of this time, so the limit is not
reached on slow machines either."""
BATCH_SECONDS = 5
"""CPU time limit for a batch of pages, in seconds. If it is exceeded, the pages are parsed one by one."""
MEMORY_BYTES = 1 << 30
"""Limit on the memory that the child process may allocate, in bytes, in addition to what it uses after its start."""
BATCH_BYTES = 1 << 20
BATCH_PAGES = 256
"""A batch of pages ends when it has BATCH_BYTES bytes or BATCH_PAGES pages."""
_POLL_SECONDS = 0.5
_PATIENCE = 10
"""The child process counts as hung if it needs more than _PATIENCE times its CPU time limit on the clock."""
_OUT_OF_MEMORY = 77
"""Exit status of a child process whose memory limit was reached."""

About = TypeVar("About")


class Failure(NamedTuple):
    """The reason why a page cannot be parsed."""

    why: str
    is_limit: bool = False
    """True if the page exceeds a limit or crashes the parser; False if the parser reports an error."""


class LimitExceeded(Exception):  # noqa: N818, the name needs no suffix
    """Raised if a call exceeds a limit or crashes the child process. The message is the reason."""


def parse_in_batches(
    function: Callable[[Any], Any], items: Iterable[tuple[About, Any, int]], report_progress: ReportProgress
) -> Iterator[tuple[About, Any]]:
    """Call a function for each item in the child process, and yield the results in the same order.

    If iterating over `items` raises an error, the results of the items before the error are yielded first.

    Args:
        function: a function of a module, with one argument.
        items: for each call: anything that belongs to it, which is yielded again; the argument, or None if there is
            nothing to call; the length of the argument in bytes.
        report_progress: called for each item, and twice a second while the child process works.

    Yields:
        What belongs to the call, and its result: the return value, a Failure, or None if nothing was called.

    Raises:
        Passing: if the system kills the child process, because the memory of the machine is full.
    """
    for batch in _batches(items, report_progress):
        arguments = [argument for _, argument in batch if argument is not None]
        results = iter(_parse(function, arguments, report_progress))
        for about, argument in batch:
            yield about, None if argument is None else next(results)


def _batches(
    items: Iterable[tuple[About, Any, int]], report_progress: ReportProgress
) -> Iterator[list[tuple[About, Any]]]:
    batch: list[tuple[About, Any]] = []
    num_bytes = 0
    try:
        for about, argument, length in items:
            report_progress()
            batch.append((about, argument))
            num_bytes += length
            if num_bytes >= BATCH_BYTES or len(batch) >= BATCH_PAGES:
                yield batch
                batch, num_bytes = [], 0
    except Exception:
        yield batch
        raise
    yield batch


def _parse(function: Callable[[Any], Any], arguments: list[Any], report_progress: ReportProgress) -> list[Any]:
    """Call a function for each argument in the child process, and return the results. See `parse_in_batches`."""
    if len(arguments) > 1:
        with suppress(_Died):
            (results,) = _child.call(_Request(function, arguments, BATCH_SECONDS), report_progress)
            return results
    return [parse(function, argument, report_progress) for argument in arguments]


def parse(function: Callable[[Any], Any], argument: Any, report_progress: ReportProgress) -> Any:
    """Call a function in the child process. Return its result, or a Failure. See `parse_in_batches`."""
    try:
        ((result,),) = _answers(_Request(function, [argument], SECONDS), report_progress)
        return result
    except LimitExceeded as error:
        return Failure(str(error), is_limit=True)


def stream(function: Callable[[Any], Iterator[Any]], argument: Any, report_progress: ReportProgress) -> Iterator[Any]:
    """Call a generator function in the child process, and yield what it yields. Each value has its own CPU time limit.

    Args:
        function: a generator function of a module, with one argument.
        argument: the argument.
        report_progress: called for each value, and twice a second while the child process works.

    Raises:
        LimitExceeded: if the function exceeds a limit or crashes. The values before are yielded first.
        Passing: if the system kills the child process, because the memory of the machine is full.
    """
    for value in _answers(_Request(function, [argument], SECONDS, is_stream=True), report_progress):
        report_progress()
        yield value


def _answers(request: "_Request", report_progress: ReportProgress) -> Iterator[Any]:
    """Yield the answers of the child process. If an old one dies, ask a new one. For the errors, see `stream`."""
    num_yielded = 0
    while True:
        is_fresh = _child.is_fresh
        try:
            for answer in itertools.islice(_child.call(request, report_progress), num_yielded, None):
                num_yielded += 1
                yield answer
            return
        except _Died as death:
            # Earlier pages may have left the child process with less free memory. So only what happens in a new child
            # process counts, except for the CPU time, which is measured for each page.
            if is_fresh or death.is_slow:
                raise LimitExceeded(death.why()) from None


# The parent's side


class _Request(NamedTuple):
    """What the child process should do."""

    function: Callable[[Any], Any]
    arguments: list[Any]
    seconds: int
    """CPU time limit; for a stream, of each value."""
    is_stream: bool = False
    """True: call a generator function with the only argument, and send each value. False: call a function with each of
    the arguments, and send the list of results."""


class _Died(Exception):  # noqa: N818, the name needs no suffix
    """Raised if the child process has died."""

    def __init__(self, exit_code: int, seconds: int):
        super().__init__(exit_code)
        self._exit_code, self._seconds = exit_code, seconds

    @property
    def is_slow(self) -> bool:
        """True if the CPU time limit was exceeded."""
        return self._exit_code == -signal.SIGXCPU

    def why(self) -> str:
        """Return the reason, for stream.json."""
        if self.is_slow:
            return f"parsing takes more than {self._seconds} s of CPU time"
        if self._exit_code == _OUT_OF_MEMORY:
            return f"parsing needs more than {MEMORY_BYTES >> 20:,} MiB of memory"
        if self._exit_code in (-signal.SIGKILL, -signal.SIGTERM):
            raise Passing(
                "the process that parses pages was killed twice at the same page, although it uses at most "
                f"{MEMORY_BYTES >> 20:,} MiB. Most often the system kills a process because memory is full. Run the "
                "same command again, if memory is short with fewer --workers, or on a cluster with a larger "
                "--slurm-memory."
            )
        if self._exit_code < 0:
            return f"the parser crashes ({signal.Signals(-self._exit_code).name})"
        return f"the parser ends its process (status {self._exit_code})"


class _Child:
    """The child process. It starts with the first call, and again after it has died."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None
        self.is_fresh = True
        """True if the child process has not parsed anything yet."""

    def call(self, request: _Request, report_progress: ReportProgress) -> Iterator[Any]:
        """Send a request to the child process, and yield its answers."""
        finished = False
        try:
            pipe = self._started(report_progress)
            self.is_fresh = False
            pipe.send(request)
            while True:
                self._wait(pipe, request.seconds, report_progress)
                word, answer = pipe.recv()
                if word == "end":
                    finished = True
                    return
                if word == "error":
                    raise RuntimeError(answer)
                yield answer
        except (EOFError, OSError) as error:
            if self._process is None:  # the system cannot start a process
                raise
            self._process.join()
            raise _Died(self._process.exitcode, request.seconds) from error
        finally:
            if not finished:
                self._end()

    def _started(self, report_progress: ReportProgress) -> Connection:
        """Return the pipe to the child process, which is started if none is running."""
        if self._pipe is not None and self._process.is_alive():
            return self._pipe
        self._end()
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe_of_child = context.Pipe()
        process = context.Process(target=_serve, args=(pipe_of_child, MEMORY_BYTES), daemon=True)
        process.start()
        self._process = process
        pipe_of_child.close()
        # Wait until the child process has imported its modules, so that the first request does not wait in the pipe.
        self._wait(self._pipe, SECONDS, report_progress)
        self._pipe.recv()
        return self._pipe

    def _wait(self, pipe: Connection, seconds: int, report_progress: ReportProgress) -> None:
        """Wait for an answer, and report progress meanwhile.

        If the child process hangs without using the CPU, no progress is reported any more, so that the worker counts as
        hung.
        """
        until = time.monotonic() + _PATIENCE * seconds
        while not pipe.poll(_POLL_SECONDS):
            if time.monotonic() < until:
                report_progress()

    def _end(self) -> None:
        """Kill the child process, if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process, self._pipe, self.is_fresh = None, None, True


# Use one child process per worker, because starting a process takes longer than parsing hundreds of pages.
_child = _Child()


# The child's side


def _serve(pipe: Connection, memory_bytes: int) -> None:
    """Execute the requests that arrive through the pipe, until the parent closes it. Runs in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C here, because the parent process handles it
    # numpy, which pyarrow imports, otherwise allocates a stack for each core of the machine, which counts as memory.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    # Arrow's own allocators reserve a gigabyte in advance, also before `parquet` chooses malloc.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    _limit(resource.RLIMIT_CORE, 0)  # a crash must not write its memory to the disk
    # Limit the data segment, not the address space (RLIMIT_AS), because thread stacks and allocators reserve gigabytes
    # of addresses that they never use.
    _limit(resource.RLIMIT_DATA, _data_bytes() + memory_bytes)
    global _full_kib
    _full_kib = _peak_kib() + (memory_bytes >> 11)
    with suppress(EOFError, OSError):  # raised when the parent has ended
        pipe.send("started")
        while True:
            _answer(pipe)


_full_kib: float = float("inf")
"""Peak memory in KiB, half of the limit, above which an error of a library counts as missing memory, because a library
may have asked for as much again as it had."""


def _answer(pipe: Connection) -> None:
    """Do what the parent requests, and send the answers."""
    try:
        request: _Request = pipe.recv()  # which imports the module of the function
        _limit_cpu(request.seconds)
        if request.is_stream:
            for value in request.function(*request.arguments):
                pipe.send(("answer", value))
                _limit_cpu(request.seconds)
        else:
            pipe.send(("answer", [_result(request.function, argument) for argument in request.arguments]))
        pipe.send(("end", None))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except ImportError as error:
        pipe.send(("error", f"a library cannot be imported: {error}"))


def _result(function: Callable, argument: Any) -> Any:
    """Return `function(argument)`, or a Failure if the function raises an error or panics."""
    try:
        return function(argument)
    except (MemoryError, ImportError, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        if _peak_kib() > _full_kib:
            raise MemoryError from error  # some libraries report that memory is missing by other errors
        return Failure(str(error).partition("\n")[0][:200] or type(error).__name__)


def _limit_cpu(seconds: int) -> None:
    """Let the kernel end this process when it has used `seconds` more seconds of CPU time."""
    # The kernel counts the CPU time since the start of the process, not since the start of this request.
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _limit(which: int, value: int) -> None:
    """Set a resource limit of this process, but not above the hard limit."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _peak_kib() -> int:
    """Return the largest amount of memory that this process had at any time, in KiB; 0 if the system does not say."""
    # `getrusage` would also count the memory that the parent had when it started this process.
    try:
        found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    return int(found[1]) if found else 0


def _data_bytes() -> int:
    """Return the size of the data segment of this process in bytes; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
