"""Delay Ctrl-C while workers or threads are being started or ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay SIGINT until the end of this block. Ctrl-C inside the block raises KeyboardInterrupt after the block.

    An interrupt while workers are being started or ended could leave workers running forever. Threads and processes
    started in the block never receive SIGINT, because they inherit the signal mask. Threads must not receive SIGINT,
    because Python raises KeyboardInterrupt in the main thread when any thread receives SIGINT, even if the main thread
    blocks it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
