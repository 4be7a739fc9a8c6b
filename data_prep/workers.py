"""Worker processes on this machine. A worker that dies or hangs ends the run with an error.

datatrove's local executor waits for ever when a worker is killed; a pool of the standard library raises at once.
"""

import collections
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Self

from data_prep.errors import PrepError
from data_prep.interrupts import interrupts_delayed
from data_prep.tasks import Step, run_task

# Each worker is a fresh interpreter: forking a process whose tokenizer library has threads can deadlock.
CONTEXT = multiprocessing.get_context("spawn")


class Workers:
    """A pool of worker processes, which start when they are first used. A context manager.

    Args:
        processes: number of processes.
        tokenizer_threads: threads that the tokenizer library may use in each.
    """

    def __init__(self, processes: int, tokenizer_threads: int = 1):
        self._processes = processes
        arguments = (os.getpid(), tokenizer_threads)
        with interrupts_delayed():
            self._pool = ProcessPoolExecutor(processes, CONTEXT, _start_worker, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback):
        with interrupts_delayed():
            if error_type is not None:
                # The results are no longer needed, and training can take hours. Python 3.14 has terminate_workers().
                for process in list((self._pool._processes or {}).values()):
                    process.kill()  # a stopped process reacts to no milder signal
            self._pool.shutdown(cancel_futures=True)

    def run_in_order(
        self, function: Callable, calls: Iterable[tuple], watch: Callable[[], None] = lambda: None
    ) -> Iterator:
        """Yield function(*arguments) for each tuple of arguments, in order.

        Args:
            function: a function that worker processes can import.
            calls: the arguments of each call. At most two calls per process are submitted ahead.
            watch: called every second while results are awaited. It may raise to end the run.

        Raises:
            PrepError: a worker died.
            Exception: whatever a call or `watch` raises.
        """
        in_flight: collections.deque[Future] = collections.deque()
        for arguments in calls:
            in_flight.append(self._submit(function, arguments))
            if len(in_flight) >= 2 * self._processes:
                yield _result(in_flight.popleft(), watch)
        while in_flight:
            yield _result(in_flight.popleft(), watch)

    def _submit(self, function: Callable, arguments: tuple) -> Future:
        # Submitting may start a worker. It never receives Ctrl-C: the parent does, and ends its workers.
        with interrupts_delayed(), _death_reported():
            return self._pool.submit(function, *arguments)


class Local:
    """An executor that runs tasks in processes of this machine. A context manager: all steps share the workers.

    Args:
        processes: number of worker processes.
        stall_seconds: seconds without progress after which a worker counts as hung.
    """

    def __init__(self, processes: int, stall_seconds: float):
        self._stall_seconds = stall_seconds
        self._workers = Workers(processes)

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *error):
        self._workers.__exit__(*error)

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step. See `tasks.Executor`."""
        began = time.time()

        def watch() -> None:
            hung = step.stalled(began, self._stall_seconds)
            if hung:
                raise PrepError(
                    f"{hung}. Run the same command again to continue. If it hangs again, look at that file, or "
                    "leave it out."
                )

        calls = [(str(step.folder), number) for number in numbers]
        if threads == 1:
            for number in self._workers.run_in_order(run_task, calls, watch):
                on_done(number)
            return
        # A separate process gives its memory back at the end, and may use all cores. Workers of the pool use one each.
        with Workers(1, tokenizer_threads=threads) as workers:
            for number in workers.run_in_order(run_task, calls, watch):
                on_done(number)


def _result(future: Future, watch: Callable[[], None]) -> Any:
    """Return the result of a call, and call `watch` every second until it is there."""
    with _death_reported():
        while True:
            try:
                return future.result(timeout=1)
            except TimeoutError:
                if future.done():  # the call itself raised a TimeoutError
                    raise
                watch()


@contextmanager
def _death_reported() -> Iterator[None]:
    """Turn the error of a pool whose worker died into a PrepError."""
    try:
        yield
    except BrokenProcessPool as error:
        raise PrepError(
            "a worker process died: it was killed, most often because memory ran out. Finished tasks were kept: "
            "run the same command again, with fewer --workers if memory is short."
        ) from error


def _start_worker(parent: int, tokenizer_threads: int) -> None:
    """Prepare a new worker process."""
    # Read by the tokenizer library when it is first used.
    os.environ["RAYON_NUM_THREADS"] = str(tokenizer_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if tokenizer_threads > 1 else "false"
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone."""
    # The workers of a pool wait for ever after their parent was killed.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
