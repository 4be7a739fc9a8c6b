"""Settings that affect the whole process of a vision run: threads, cuDNN and memory allocation."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers for glibc's function mallopt, from malloc.h."""
MMAP_THRESHOLDS = (1 << 30, 1 << 25)
"""Values for M_MMAP_THRESHOLD in bytes. They are tried in this order, because older glibc releases refuse the first."""


@contextmanager
def process_settings(threads: int) -> Iterator[None]:
    """Set the number of CPU threads and make cuDNN convolutions reproducible while the block runs.

    cuDNN uses deterministic algorithms, because training a stage again must give the same result. TF32 is turned off,
    because results need the full precision of float32. When the block ends, also by an error, the previous settings are
    restored.

    These settings belong to the process, not to a thread, so do not use two such blocks at the same time in different
    threads. The memory allocator is not changed here, because its settings cannot be restored when the block ends; see
    `keep_freed_memory`.

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
    """Make the C library keep freed memory in the process, instead of returning it to the system.

    The activations of convolutions are freed and allocated again at every step. Requesting their memory pages from the
    system each time takes up to a quarter of a step. Without glibc this function does nothing.

    Only commands call this function, because a command owns its process; `vision.run.run` does not call it. The
    previous state cannot be restored, because glibc has no function that reads the current thresholds, and setting a
    threshold permanently turns off its automatic adjustment. Computed numbers stay the same, but the process keeps the
    memory that it has freed.
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
