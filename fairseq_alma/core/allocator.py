"""How the C library allocates the memory of this process."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers that name two parameters of glibc's function mallopt. The header malloc.h defines the numbers."""
MMAP_THRESHOLDS = (1 << 30, 1 << 25)
"""Values for glibc's parameter M_MMAP_THRESHOLD, in bytes: it returns larger freed blocks to the operating system at
once. Older glibc releases refuse the first value. For these releases, the second value is used."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory in the process, instead of returning it to the operating system.

    A training step on a CPU frees large tensors, such as activations and gradients, and the next step allocates them
    again. Without this function, up to a quarter of the time of a step is spent on requesting memory from the operating
    system. The results of the training do not change. On a system without glibc, this function does nothing.

    The change cannot be undone, because glibc has no function that returns its thresholds, and stops adjusting them. So
    call this function only in a process that runs nothing but the training, and not in a function that other programs
    may call, such as `vision.runs.run`.
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
