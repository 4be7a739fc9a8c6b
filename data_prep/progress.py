"""What a person sees on stderr while alma-prep works."""

import sys
import time
from typing import Self

from tqdm import tqdm


class _Tqdm(tqdm):
    monitor_interval = 0  # no thread of its own: it would catch the Ctrl-C that `Workers` lets wait


class Bar:
    """One step of the work: a bar on a terminal, one line when it is done in a log."""

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

    def advance(self, count: int):
        self._done += count
        self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback):
        in_log = self._bar.disable  # closing disables every bar
        self._bar.close()
        if in_log and error_type is None:
            wall_seconds = time.monotonic() - self._start_seconds
            print(
                f"{self._name}: {self._done:,} {self._unit} in {wall_seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )


def note(text: str):
    """A line that is not an error."""
    print(text, file=sys.stderr, flush=True)
