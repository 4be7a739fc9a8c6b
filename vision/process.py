"""How a process of ours uses memory."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = (1 << 30, 1 << 25)
"""Bytes, to be tried in turn: older releases refuse the first."""


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, not give it back to the system.

    Activations of a convolution are freed and made anew at every step: fetching their pages from the system each time
    takes up to a quarter of it. Where there is no glibc, nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for largest in LARGEST:
        if mallopt(M_MMAP_THRESHOLD, largest):
            mallopt(M_TRIM_THRESHOLD, 1 << 30)
            return
