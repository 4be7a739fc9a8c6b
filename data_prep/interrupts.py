"""Delay Ctrl-C while workers or threads are started and ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Block SIGINT in the block; a Ctrl-C that arrives meanwhile raises KeyboardInterrupt after it.

    An interrupt in the middle of starting or ending workers would leave them running without anyone to stop them.
    Threads and processes that are started in the block never receive SIGINT. This matters for threads: Python raises
    KeyboardInterrupt in the main thread as soon as any thread receives the signal, even if the main thread blocks it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
