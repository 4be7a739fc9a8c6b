"""Settings that affect the whole process of a vision run: threads, cuDNN and memory allocation."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers that name two parameters of glibc's function mallopt. The header malloc.h defines the numbers."""
MMAP_THRESHOLDS = (1 << 30, 1 << 25)
"""Values for glibc's parameter M_MMAP_THRESHOLD, in bytes.

If the program frees a memory block that is larger than M_MMAP_THRESHOLD, glibc usually returns the block to the
operating system at once. A high threshold avoids this. Older glibc releases refuse the first value. For these releases,
the second value is used."""


@contextmanager
def process_settings(threads: int) -> Iterator[None]:
    """Set the number of CPU threads and make cuDNN convolutions reproducible, inside a `with` block.

    cuDNN uses deterministic algorithms, because training a stage again must give the same result. TF32 is turned off,
    because results need the full precision of float32. When the block ends, even with an error, the previous settings
    are restored.

    The settings affect the complete process. So do not use two such blocks at the same time in different threads.

    This function does not change the settings of the memory allocator, because they could not be restored when the
    block ends. `keep_freed_memory` changes them.

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
    """Make the C library keep freed memory in the process, instead of returning it to the operating system.

    The activations of convolutions are freed and allocated again at every training step. Without this function, up to
    a quarter of the time of a step is spent on requesting memory from the operating system. The results of the training
    do not change. On a system without glibc, this function does nothing.

    glibc has two thresholds: it returns freed memory to the operating system only if the size of this memory exceeds a
    threshold. This function raises both thresholds. The change cannot be undone, because glibc has no function that
    returns the thresholds from before the change. Also, glibc normally adjusts the thresholds automatically, and stops
    this as soon as a program sets one of them. So call this function only in a process that runs nothing but the
    training. `vision.run.run` does not call it, because other programs may call `run`.
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
