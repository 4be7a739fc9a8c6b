"""Settings of the whole process that vision runs need: threads, cuDNN and memory allocation."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt, from malloc.h."""
MMAP_THRESHOLDS = (1 << 30, 1 << 25)
"""Bytes, tried in this order, because older releases of glibc refuse the first."""


@contextmanager
def process_settings(threads: int) -> Iterator[None]:
    """Compute with `threads` CPU threads and reproducible cuDNN convolutions while the block runs.

    cuDNN runs deterministic algorithms, because a stage that is computed again must give the same result, and no
    TF32, because float32 means float32 here. When the block ends, also by an error, all previous values are restored.

    These are settings of the process, not of a thread: do not use two such blocks at the same time in threads of one
    process. The allocator is not changed, because it could not be restored; see `keep_freed_memory`.

    Args:
        threads: number of CPU threads that torch uses within an operation.
    """
    cudnn = torch.backends.cudnn
    previous = torch.get_num_threads(), cudnn.deterministic, cudnn.allow_tf32
    torch.set_num_threads(threads)
    cudnn.deterministic, cudnn.allow_tf32 = True, False
    try:
        yield
    finally:
        torch.set_num_threads(previous[0])
        cudnn.deterministic, cudnn.allow_tf32 = previous[1:]


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the process, instead of returning it to the system.

    The activations of convolutions are freed and allocated again at every step. Fetching their pages from the system
    each time takes up to a quarter of a step. Without glibc this function does nothing.

    Only commands call this function, which own their process; `vision.run.run` does not. glibc has no function that
    reads the present thresholds, and setting one turns off their automatic adjustment for good, so the previous state
    cannot be restored. A process that calls it computes the same numbers, but it keeps memory that it has freed.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for threshold in MMAP_THRESHOLDS:
        if mallopt(M_MMAP_THRESHOLD, threshold):
            mallopt(M_TRIM_THRESHOLD, 1 << 30)
            return
