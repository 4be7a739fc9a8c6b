"""Progress of scoring, on standard error: a bar on a terminal, otherwise a line from time to time."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fairseq_alma.app.tables import SafeConsole

SECONDS_BETWEEN_LINES = 15.0
"""Time in seconds between two lines, and before the first one."""


@contextmanager
def scoring_progress(title: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """Context manager that yields a function, which is called with the number of tokens of each finished batch.

    Args:
        title: what is scored.
        num_tokens: number of tokens of all batches.
    """
    console = SafeConsole(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
    percent, left = TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn()
    columns = (TextColumn("scoring {task.description}"), BarColumn(bar_width=20), percent, left)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task, began = bar.add_task(title, total=num_tokens), time.monotonic()
        done, next_line = 0, began + SECONDS_BETWEEN_LINES

        def advance(tokens: int) -> None:
            nonlocal done, next_line
            done += tokens
            bar.advance(task, tokens)
            now = time.monotonic()
            if not console.is_terminal and now >= next_line and done < num_tokens:
                next_line = now + SECONDS_BETWEEN_LINES
                seconds = (now - began) / done * (num_tokens - done)
                console.print(f"scoring {title}  {done:,}/{num_tokens:,} tokens  {seconds:,.0f} s left")

        yield advance
