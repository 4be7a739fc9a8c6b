"""Delay Ctrl-C while workers or threads are being started or ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay SIGINT until the end of this block. Ctrl-C inside the block raises KeyboardInterrupt after the block.

    Use it while workers are being started or ended: an interrupt at this time could leave workers running forever.

    SIGINT (Ctrl-C) is blocked for the calling thread. Threads and processes that are started in the block inherit this.
    They keep SIGINT blocked when the block ends, so they never receive it. This is intended for threads, too: when any
    thread receives SIGINT, Python raises KeyboardInterrupt in the main thread, even if the main thread blocks SIGINT.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
