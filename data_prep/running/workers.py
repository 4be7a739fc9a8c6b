"""Run tasks in worker processes on this machine. If a worker dies or hangs, alma-prep ends with an error.

This module uses the process pool of Python's standard library, which raises an error as soon as a worker is killed.
datatrove's local executor is not used, because it would wait forever after a worker was killed.
"""

import collections
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Self

from data_prep.errors import PrepError
from data_prep.running.heartbeat import StallWatch
from data_prep.running.progress import interrupts_delayed
from data_prep.running.tasks import Step, run_task
from launch.warm import end_with_parent, start_server

# This process is not forked, because forking a process in which the tokenizers library runs threads can deadlock.
# On Linux, workers are forks of a server process (see `launch.warm`), which imports _PRELOADED once. All workers of
# this process are forks of it, also those of later calls of `prepare`.
SPAWN = multiprocessing.get_context("spawn")
CONTEXT = multiprocessing.get_context("forkserver") if sys.platform == "linux" else SPAWN
_PRELOADED = ["data_prep.pipeline", "pyarrow.compute", "pyarrow.parquet", "pandas"]
"""A module that imports all tasks, and what they import later: the parts of pyarrow that the first and the last of them
use, and pandas, which pyarrow imports, if it is installed, when it makes its first array. These are names, because a
module of this package may not import higher packages, and this process itself does not need pyarrow."""
_JOIN_SECONDS = 2
"""How long to wait for the pool to end the other workers after one has died."""


class Workers:
    """A context manager with a pool of worker processes. Each process starts when it is first needed.

    Args:
        processes: number of processes.
        tokenizer_threads: number of threads that the tokenizers library may use in each process.
    """

    def __init__(self, processes: int, tokenizer_threads: int = 1):
        self._processes = processes
        self._arguments = (dict(os.environ), tokenizer_threads)
        with interrupts_delayed():
            context = CONTEXT if _start_server() else SPAWN
            self._pool = ProcessPoolExecutor(processes, context, _start_worker, self._arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback):
        with interrupts_delayed():
            if error_type is not None:
                # Kill the workers, because a running task can take hours, and its result is no longer needed. From
                # Python 3.14 on, the pool's method terminate_workers() could be used instead.
                for process in list((self._pool._processes or {}).values()):
                    # Use SIGKILL (kill) instead of SIGTERM (terminate), because a process that was suspended with
                    # SIGSTOP does not react to SIGTERM.
                    process.kill()
            self._pool.shutdown(cancel_futures=True)

    def run_in_order(
        self, function: Callable, calls: Iterable[tuple], watch: Callable[[], None] = lambda: None
    ) -> Iterator:
        """Call a function in the workers, once for each tuple of arguments, and yield the results in the same order.

        Args:
            function: a function that worker processes can import.
            calls: the arguments of each call. The iterable is read lazily: at most two calls per process are
                waiting or running.
            watch: a function that is called every second while waiting for a result. It may raise an exception to stop
                waiting.

        Raises:
            BrokenProcessPool: if a worker died.
            Exception: any exception that `function` or `watch` raises.
        """
        in_flight: collections.deque[Future] = collections.deque()
        for arguments in calls:
            in_flight.append(self._submit(function, arguments))
            if len(in_flight) >= 2 * self._processes:
                yield _result(in_flight.popleft(), watch)
        while in_flight:
            yield _result(in_flight.popleft(), watch)

    def died(self) -> dict[int, str]:
        """Return the processes that have died, each with what ended it, such as "SIGKILL" or "status 1"."""
        # If one process dies, a thread of the pool ends the others by SIGTERM, which are left out, and waits for all of
        # them. An exit code can be read only once, and Python reports status 255 to whoever reads second. So let the
        # thread read first. It would wait forever for a process that was suspended, hence the time limit.
        processes = list((self._pool._processes or {}).values())
        thread: Any = self._pool._executor_manager_thread
        if thread is not None:
            thread.join(_JOIN_SECONDS)
        codes = {process.pid: process.exitcode for process in processes}
        return {
            pid: signal.Signals(-code).name if code < 0 else f"status {code}"
            for pid, code in codes.items()
            if pid is not None and code not in (None, 0, -signal.SIGTERM)
        }

    def _submit(self, function: Callable, arguments: tuple) -> Future:
        # Delay Ctrl-C (SIGINT) while `submit` runs, because `submit` may start a worker process. A process that is
        # started while SIGINT is blocked never receives SIGINT. So only this process is interrupted (after `submit`),
        # and it ends its workers.
        with interrupts_delayed():
            try:
                return self._pool.submit(function, *arguments)
            except (EOFError, ConnectionError) as error:  # the server has ended
                if self._pool._processes:
                    raise BrokenProcessPool(str(error)) from error
                # It ends if a module that it imports starts a thread. New interpreters are slower, but always work.
                self._pool = ProcessPoolExecutor(self._processes, SPAWN, _start_worker, self._arguments)
                return self._pool.submit(function, *arguments)


class Local(Workers):
    """An executor that runs tasks in worker processes on this machine.

    All steps use the same processes. Exception: tasks that use more than one thread run in a new process.

    Args:
        processes: number of worker processes.
        stall_seconds: seconds without progress after which a worker counts as hung.
    """

    def __init__(self, processes: int, stall_seconds: float):
        super().__init__(processes)
        self._stall_seconds = stall_seconds

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step in worker processes. See `tasks.Executor` for the arguments."""
        stall_watch = StallWatch(self._stall_seconds)
        num_done = 0

        def watch() -> None:
            # Results arrive in order, so only these tasks can be running.
            running = numbers[num_done : num_done + 2 * self._processes]
            hung = step.stalled(running, stall_watch)
            if hung:
                raise PrepError(
                    f"{hung}. Run the same command again to continue. If a worker hangs again at the same input "
                    "file, check this file, or leave it out."
                )

        calls = ((str(step.folder), number, step.tasks[number].description()) for number in numbers)
        # The usual workers are limited to one thread each. A new process also releases its memory at the end.
        chosen = nullcontext(self) if threads == 1 else Workers(1, tokenizer_threads=threads)
        with chosen as workers, _death_reported(step, workers):
            for number in workers.run_in_order(run_task, calls, watch):
                num_done += 1
                on_done(number)


def _result(future: Future, watch: Callable[[], None]) -> Any:
    """Wait for the result of a call in a worker, and return the result. Meanwhile, call `watch` every second."""
    while True:
        try:
            return future.result(timeout=1)
        except TimeoutError:
            # `future.result` raises TimeoutError after one second of waiting. But if the future is done, either the
            # called function itself has raised TimeoutError, or the result has just arrived. In both cases, calling
            # `future.result` again does not wait: it raises the function's error or returns the result.
            if future.done():
                return future.result()
            watch()


@contextmanager
def _death_reported(step: Step, workers: Workers) -> Iterator[None]:
    """Context manager that turns the pool's error for a dead worker into a PrepError that names the input."""
    try:
        yield
    except BrokenProcessPool as error:
        died = workers.died()
        if died and all(what.startswith("status") for what in died.values()):
            raise PrepError(
                f"a worker process ended with {', '.join({*died.values()})}, and was not killed: see the messages "
                f"above. A Python script must call prepare() under `if __name__ == '__main__':`, because each worker "
                f"imports the script."
            ) from None
        message = (
            "a worker process died. Most often the system kills a process because memory is full. Finished tasks were "
            "stored. Run the same command again, with fewer --workers if memory is short."
        )
        if died:
            places = " and ".join(f"{step.place_of(pid)}, ended by {what}" for pid, what in died.items())
            message += f" It died in {places}. If this happens again at the same input file, check it, or leave it out."
        raise PrepError(message) from error


def _start_server() -> bool:
    """Start the server of which workers are forks, if it is not running. Return False if that is not possible."""
    if CONTEXT.get_start_method() == "forkserver":
        # The server finds modules as this process does, also if a script has changed sys.path.
        path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        try:
            start_server(forkserver._forkserver, _PRELOADED, {"PYTHONPATH": path})
        except OSError:  # for example, the folder of temporary files has too long a name for a socket
            return False
    return True


def _start_worker(environment: Mapping[str, str], tokenizer_threads: int) -> None:
    """Initialize a new worker process. This function runs in the worker process."""
    os.environ.clear()
    os.environ.update(environment)
    # Set these environment variables now, because the tokenizers library reads them when it is first used.
    os.environ["RAYON_NUM_THREADS"] = str(tokenizer_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if tokenizer_threads > 1 else "false"
    # The server blocks SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    # Otherwise, workers would wait forever for tasks after their parent process was killed.
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.sentinel)
