"""Measure how the time of a function grows with the length of its input."""

import gc
import time
from collections.abc import Callable
from typing import Any

FIRST_LENGTH, LAST_LENGTH = 10_000, 80_000
MEASURABLE_SECONDS = 0.0002
MOST_GROWTH = 2.6
"""Each time that the length doubles, a linear function takes 2 times as long, a quadratic one 4 times."""
ATTEMPTS = 20


def growth(function: Callable[[Any], object], make: Callable[[int], Any]) -> float:
    """Return the factor by which the time grows when the length of the input doubles: the mean of two doublings.

    The first length is FIRST_LENGTH, or more if the function is so fast that its time cannot be measured. The shortest
    of several times counts, because other processes can only prolong them.

    Args:
        function: the function.
        make: returns the input for a length.
    """
    length = FIRST_LENGTH
    while _seconds(function, make(length)) < MEASURABLE_SECONDS:
        if length >= LAST_LENGTH:
            return 1.0
        length *= 2
    found = _growth(function, make, length)
    if found > MOST_GROWTH and _seconds(function, make(4 * length)) < 1.0:
        # Where a text stops to fit into a cache of the processor, the time makes a step. A quadratic function fails
        # with longer texts, too.
        found = min(found, _growth(function, make, 4 * length))
    return found


def _growth(function: Callable[[Any], object], make: Callable[[int], Any], length: int) -> float:
    """Return the mean of the factors of the two doublings from `length` on."""
    short, long = make(length), make(4 * length)
    first, last = _seconds(function, short), _seconds(function, long)
    for _ in range(ATTEMPTS):
        if (last / first) ** 0.5 <= MOST_GROWTH:
            break
        first, last = min(first, _seconds(function, short)), min(last, _seconds(function, long))
    return (last / first) ** 0.5


def _seconds(function: Callable[[Any], object], argument: Any) -> float:
    """Return the CPU time of a call, in seconds: the shortest of five, or of one if it takes long."""
    times: list[float] = []
    gc.disable()
    try:
        while len(times) < 5 and sum(times) < 0.1:
            start = time.thread_time()
            function(argument)
            times.append(time.thread_time() - start)
    finally:
        gc.enable()
    return min(times)
