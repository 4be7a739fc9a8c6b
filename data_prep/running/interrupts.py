"""Delay Ctrl-C while workers or threads are being started or ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C (the signal SIGINT) until the end of this `with` statement.

    If Ctrl-C was pressed in the meantime, KeyboardInterrupt is raised at the end of the `with` statement.

    Use this context manager while workers are being started or ended, because an interrupt at this time could leave
    workers running forever.

    SIGINT is blocked for the calling thread until the `with` statement ends. Threads and processes that are started in
    the meantime inherit the blocked signal. They keep SIGINT blocked as long as they run, so they never receive it.
    This is intended for threads, too: when any thread receives SIGINT, Python raises KeyboardInterrupt in the main
    thread, even if the main thread blocks SIGINT.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
