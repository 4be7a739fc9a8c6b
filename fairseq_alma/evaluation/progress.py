"""Progress of scoring, on standard error: a bar on a terminal, otherwise a line from time to time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fairseq_alma.app.tables import progress_bar

SECONDS_BETWEEN_LINES = 15.0
"""Time in seconds between two lines, and before the first one."""


@contextmanager
def scoring_progress(title: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """Context manager that yields a function, which is called with the number of tokens of each finished batch.

    Args:
        title: what is scored.
        num_tokens: number of tokens of all batches.
    """
    with progress_bar("{task.percentage:.0f}%") as bar:
        task, began = bar.add_task(f"scoring {title}", total=num_tokens), time.monotonic()
        done, next_line = 0, began + SECONDS_BETWEEN_LINES

        def advance(tokens: int) -> None:
            nonlocal done, next_line
            done += tokens
            bar.advance(task, tokens)
            now = time.monotonic()
            if not bar.console.is_terminal and now >= next_line and done < num_tokens:
                next_line = now + SECONDS_BETWEEN_LINES
                seconds = (now - began) / done * (num_tokens - done)
                text = f"scoring {title}  {done:,}/{num_tokens:,} tokens  {seconds:,.0f} s left"
                bar.console.print(text, soft_wrap=True)

        yield advance
