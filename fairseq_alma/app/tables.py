"""Format a ledger as a table, and create the console that prints tables on the terminal."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.protocol import StreamSettings
from fairseq_alma.core.waiting import DEFAULT_RATIO, num_missing


def wide_console(stream: TextIO | None = None) -> Console:
    """Return a console of the library rich that never breaks a long path into two lines.

    Square brackets are printed unchanged; by default, rich interprets them as formatting. If the output is not a
    terminal, the console is wide enough for all table columns.
    """
    output = stream or sys.stdout
    is_terminal = Console(file=output).is_terminal
    return Console(file=output, highlight=False, markup=False, soft_wrap=True, width=None if is_terminal else 120)


def ledger_table(rows: Sequence[LedgerRow], title: str, at_most: int | None = None) -> Table:
    """Return a table of the ledger with one line per arrival. For an untrained learner, * is shown in place of scores.

    Args:
        rows: all rows of the ledger.
        title: title of the table.
        at_most: approximate maximum number of lines. If the ledger has more rows, the table shows only the untrained
            learner, every n-th stage and the last arrival. By default, all arrivals are shown.
    """
    is_vision = bool(rows) and rows[0].scores.error_rate is not None
    quality = ["error rate", "validation"] if is_vision else ["perplexity", "per word", "validation"]
    caption = "* untrained" if any(row.stage == 0 for row in rows) else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("t", "stage", *quality, "params", "updates", "train TFLOP", "seconds"):
        table.add_column(name, justify="right")
    shown = rows
    if at_most is not None and len(rows) > at_most + 1:
        # Show only arrivals at which a stage was trained, because scores do not change at the other arrivals.
        changed = [row for row in rows[1:] if row.updated]
        apart = -(-len(changed) // at_most)
        shown = [rows[0], *changed[apart - 1 :: max(1, apart)]]
        if shown[-1] is not rows[-1]:
            shown = [*shown, rows[-1]]
    # Some arrivals are not shown. Their cost is added to the next line that is shown, so that the columns still sum to
    # the total cost.
    start = 0
    for row in shown:
        scores, trained = row.scores, row.stage > 0
        costs = [earlier.spent for earlier in rows[start : row.t + 1]]
        start = row.t + 1
        if is_vision:
            numbers = [f"{scores.error_rate:.2%}", f"{scores.validation_error_rate or 0:.2%}"]
        else:
            validation = scores.validation_perplexity
            numbers = [f"{scores.perplexity:.2f}", f"{scores.word_perplexity or 0:,.1f}", f"{validation:.2f}"]
        seconds = sum(cost.train_seconds for cost in costs)
        table.add_row(
            str(row.t),
            str(row.stage),
            *(numbers if trained else ["*"] * len(numbers)),
            f"{scores.num_params:,}" if is_vision else f"{scores.num_params / 1e6:.2f}M",
            f"{sum(cost.num_updates for cost in costs):,}",
            f"{sum(cost.train_flops for cost in costs) / 1e12:,.{4 if is_vision else 2}f}",
            f"{seconds:,.1f}" if is_vision else f"{seconds:,.0f}",
        )
    return table


def waiting_message(rows: Sequence[LedgerRow], settings: StreamSettings) -> str | None:
    """Return a sentence about the last mega-batches if no stage has trained on them yet, or None if there are none.

    Args:
        rows: all rows of the ledger.
        settings: the stream settings of the run.
    """
    last_stage = max((row.t for row in rows if row.updated), default=0)
    count = rows[-1].t - last_stage
    if not count:
        return None
    which = (
        f"mega-batch {last_stage + 1} waits" if count == 1 else f"mega-batches {last_stage + 1} to {rows[-1].t} wait"
    )
    missing = num_missing(count, last_stage, settings.wait, settings.wait_ratio or DEFAULT_RATIO)
    return f"{which} for {missing} more (wait={settings.wait}); to train now, give last_group=train"
