"""What alma-prep prints on stderr while it works."""

import sys
import time
from typing import Self

from tqdm import tqdm


class _Tqdm(tqdm):
    # tqdm's monitor thread would receive a Ctrl-C that `interrupts_delayed` delays.
    monitor_interval = 0


class Bar:
    """The progress of one step of the work: a bar on a terminal, or one line at its end in a log.

    Args:
        name: name of the step.
        total: the amount of work.
        unit: what the amount counts.
    """

    def __init__(self, name: str, total: int, unit: str):
        self._name, self._unit, self._start_seconds = name, unit, time.monotonic()
        self._bar = _Tqdm(
            total=total,
            desc=name,
            unit=f" {unit}",
            unit_scale=True,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            leave=True,
        )
        self._done = 0

    def advance(self, count: int) -> None:
        """Add to the amount that is done."""
        self._done += count
        self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        in_log = self._bar.disable  # read before closing, which disables every bar
        self._bar.close()
        if in_log and error_type is None:
            wall_seconds = time.monotonic() - self._start_seconds
            note(f"{self._name}: {self._done:,} {self._unit} in {wall_seconds:.1f} s")


def note(text: str) -> None:
    """Print a line that is not an error."""
    print(text, file=sys.stderr, flush=True)
