"""Delay Ctrl-C while workers or threads are being started or ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay SIGINT until the end of this block. Ctrl-C inside the block raises KeyboardInterrupt after the block.

    Use it while workers are being started or ended: an interrupt at this time could leave workers running forever.

    Threads and processes that are started in the block never receive SIGINT, because they inherit the signal mask.
    Threads must not receive it: when any thread receives SIGINT, Python raises KeyboardInterrupt in the main thread,
    even if the main thread blocks SIGINT.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
