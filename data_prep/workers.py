"""Work on all cores: results in the order of the tasks, few tasks in flight, and never a hang."""

import collections
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Self

from data_prep.errors import PrepError

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
                    process.terminate()
            self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable, *arguments):
        """function(*arguments) in a worker. Raises what it raises, and PrepError when the worker dies."""
        return _result(self._submit(function, arguments))

    def run_in_order(self, function: Callable, tasks: Iterable[tuple]) -> Iterator:
        """Yield function(*task) for each task, in order, with at most two tasks per process in flight."""
        in_flight: collections.deque[Future] = collections.deque()
        for task in tasks:
            in_flight.append(self._submit(function, task))
            if len(in_flight) >= 2 * self._processes:
                yield _result(in_flight.popleft())
        while in_flight:
            yield _result(in_flight.popleft())

    def _submit(self, function: Callable, arguments: tuple) -> Future:
        # Submitting may start a worker. It inherits that Ctrl-C is kept out: that is for the parent, which ends it.
        with _ctrl_c_waits():
            return self._pool.submit(function, *arguments)


@contextmanager
def _ctrl_c_waits():
    """Put an interrupt off: in the middle of starting or ending workers it would leave them without orders."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _result(future: Future):
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise PrepError(
            "a worker process died: it was killed, most often because memory ran out. "
            "Run the same command again, with fewer --workers if memory is short."
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
