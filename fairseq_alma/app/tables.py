"""A ledger for reading."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fairseq_alma.core.ledger import LedgerRow


def wide_console(stream=None) -> Console:
    """A console for tables: where there is no terminal to fit, wide enough for all columns."""
    console = Console(file=stream or sys.stdout, highlight=False)
    return console if console.is_terminal else Console(file=stream or sys.stdout, highlight=False, width=120)


def ledger_table(rows: Sequence[LedgerRow], title: str, at_most: int | None = None) -> Table:
    """The ledger, one line an arrival; * stands for the score of an untrained learner, as in the paper's tables.

    Args:
        rows: the ledger.
        title: above it.
        at_most: lines, about; of a longer ledger stages evenly apart are shown, and the last arrival.
    """
    is_vision = bool(rows) and rows[0].scores.error_rate is not None
    quality = ["error rate", "validation"] if is_vision else ["perplexity", "per word", "validation"]
    table = Table(title=title, title_justify="left")
    for name in ("t", "stage", *quality, "params", "updates", "train TFLOP", "seconds"):
        table.add_column(name, justify="right")
    shown = rows
    if at_most is not None and len(rows) > at_most + 1:
        # Between stages nothing changes: the arrivals that were trained on tell it all.
        changed = [row for row in rows[1:] if row.updated]
        apart = -(-len(changed) // at_most)
        shown = [rows[0], *changed[apart - 1 :: max(1, apart)]]
        if shown[-1] is not rows[-1]:
            shown = [*shown, rows[-1]]
    # What was spent between two lines belongs to the second.
    start = 0
    for row in shown:
        scores, trained = row.scores, row.stage > 0
        spent = [r.spent for r in rows[start : row.t + 1]]
        start = row.t + 1
        if is_vision:
            numbers = [f"{scores.error_rate:.2%}", f"{scores.validation_error_rate or 0:.2%}"]
        else:
            validation = scores.validation_perplexity
            numbers = [f"{scores.perplexity:.2f}", f"{scores.word_perplexity:,.1f}", f"{validation:.2f}"]
        seconds = sum(one.train_seconds for one in spent)
        table.add_row(
            str(row.t),
            str(row.stage),
            *(numbers if trained else ["*"] * len(numbers)),
            f"{scores.num_params:,}" if is_vision else f"{scores.num_params / 1e6:.2f}M",
            f"{sum(one.num_updates for one in spent):,}",
            f"{sum(one.train_flops for one in spent) / 1e12:,.{4 if is_vision else 2}f}",
            f"{seconds:,.1f}" if is_vision else f"{seconds:,.0f}",
        )
    return table
