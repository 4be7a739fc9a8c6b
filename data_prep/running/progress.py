"""Print progress on stderr while alma-prep works, and end it in good order when it is interrupted."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from fairseq_alma.core.printing import say


class Bar:
    """A context manager that shows the progress of one step of alma-prep.

    If stderr is a terminal, a progress bar is shown. Otherwise, one line is printed when the step ends.

    Args:
        name: name of the step.
        total: the amount of work in this step, for example a number of bytes.
        unit: what `total` counts, such as "bytes".
    """

    def __init__(self, name: str, total: int, unit: str):
        self._name, self._unit, self._start_seconds = name, unit, time.monotonic()
        self._bar = _terminal_bar(name, total, unit) if sys.stderr.isatty() else None
        self._done = 0

    def advance(self, count: int) -> None:
        """Add `count` to the amount of finished work."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if self._bar is not None:
            self._bar.close()
        elif error_type is None:
            wall_seconds = time.monotonic() - self._start_seconds
            note(f"{self._name}: {self._done:,} {self._unit} in {wall_seconds:.1f} s")


def _terminal_bar(name: str, total: int, unit: str) -> Any:
    """Return a progress bar of tqdm. tqdm is imported only here, because its import takes a tenth of a second."""
    from tqdm import tqdm

    class Tqdm(tqdm):
        # The value 0 disables tqdm's monitor thread. This is needed because, if the monitor thread received Ctrl-C,
        # Python would raise KeyboardInterrupt in the main thread at once, even inside a `with interrupts_delayed()`
        # statement.
        monitor_interval = 0

    return Tqdm(total=total, desc=name, unit=f" {unit}", unit_scale=True, file=sys.stderr, leave=True)


def note(text: str) -> None:
    """Print a line with information or a warning on stderr."""
    say(text, sys.stderr)


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C (the signal SIGINT), SIGTERM and SIGUSR1 until the end of this `with` statement.

    If Ctrl-C was pressed in the meantime, KeyboardInterrupt is raised at the end of the `with` statement.

    Use this context manager while workers are being started or ended, because an interrupt at this time could leave
    workers running forever.

    The signals are blocked for the calling thread until the `with` statement ends. Threads and processes that are
    started in the meantime inherit the blocked signals. They keep them blocked as long as they run, so they never
    receive them (workers unblock SIGTERM). This is intended for threads, too: when any thread receives SIGINT, Python
    raises KeyboardInterrupt in the main thread, even if the main thread blocks SIGINT.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
