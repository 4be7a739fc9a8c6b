"""Work on all cores of this machine: few tasks in flight, and never a hang.

datatrove's local executor waits for ever when a worker is killed; a pool of the standard library says so at once.
"""

import collections
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Self

from data_prep.errors import PrepError
from data_prep.pieces import Step, run_piece

# A fresh interpreter per worker: forking a process whose tokenizer library has threads can deadlock.
CONTEXT = multiprocessing.get_context("spawn")


class Workers:
    """So many processes, started when first used, each with so many threads for the tokenizer library."""

    def __init__(self, processes: int, tokenizer_threads: int = 1):
        self._processes = processes
        arguments = (os.getpid(), tokenizer_threads)
        with _ctrl_c_waits():
            self._pool = ProcessPoolExecutor(processes, CONTEXT, _start_worker, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback):
        with _ctrl_c_waits():
            if error_type is not None:
                # Nobody wants the results any more, and training can take hours. Python 3.14 has terminate_workers().
                for process in list((self._pool._processes or {}).values()):
                    process.kill()  # a halted one would not hear anything milder
            self._pool.shutdown(cancel_futures=True)

    def run_in_order(
        self, function: Callable, tasks: Iterable[tuple], watch: Callable[[], None] = lambda: None
    ) -> Iterator:
        """Yield function(*task) for each task, in order, with at most two tasks per process in flight.

        Raises what a task raises, PrepError when a worker dies, and what `watch`, called each second, raises.
        """
        in_flight: collections.deque[Future] = collections.deque()
        for task in tasks:
            in_flight.append(self._submit(function, task))
            if len(in_flight) >= 2 * self._processes:
                yield _result(in_flight.popleft(), watch)
        while in_flight:
            yield _result(in_flight.popleft(), watch)

    def _submit(self, function: Callable, arguments: tuple) -> Future:
        # Submitting may start a worker. It inherits that Ctrl-C is kept out: that is for the parent, which ends it.
        with _ctrl_c_waits(), _death_is_told():
            return self._pool.submit(function, *arguments)


class Local:
    """Pieces on the cores of this machine. A context manager: workers are started once, for all steps."""

    def __init__(self, processes: int, stall_seconds: float):
        self._stall_seconds = stall_seconds
        self._workers = Workers(processes)

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *error):
        self._workers.__exit__(*error)

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """See `pieces.Executor`."""
        began = time.time()

        def watch() -> None:
            hung = step.stalled(began, self._stall_seconds)
            if hung:
                raise PrepError(f"{hung}. The same command goes on where this one ended; if it hangs again, {_LOOK}.")

        tasks = [(str(step.folder), number) for number in numbers]
        if threads == 1:
            for number in self._workers.run_in_order(run_piece, tasks, watch):
                on_done(number)
            return
        # A process of its own gives the memory back, and may use all cores where the pool's workers use one each.
        with Workers(1, tokenizer_threads=threads) as workers:
            for number in workers.run_in_order(run_piece, tasks, watch):
                on_done(number)


_LOOK = "look at that file, or leave it out"


@contextmanager
def _ctrl_c_waits():
    """Put an interrupt off: in the middle of starting or ending workers it would leave them without orders."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _result(future: Future, watch: Callable[[], None]):
    with _death_is_told():
        while True:
            try:
                return future.result(timeout=1)
            except TimeoutError:
                if future.done():  # a task's own error of this name
                    raise
                watch()


@contextmanager
def _death_is_told():
    try:
        yield
    except BrokenProcessPool as error:
        raise PrepError(
            "a worker process died: it was killed, most often because memory ran out. What is whole was kept: "
            "run the same command again, with fewer --workers if memory is short."
        ) from error


def _start_worker(parent: int, tokenizer_threads: int):
    # Read by the tokenizer library when it is first used.
    os.environ["RAYON_NUM_THREADS"] = str(tokenizer_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if tokenizer_threads > 1 else "false"
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int):
    # A pool's workers wait for ever when their parent was killed: nobody is left to tell them.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
