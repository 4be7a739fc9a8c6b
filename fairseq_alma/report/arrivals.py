"""The last arrivals of a single run, for its owner: how hard the new text was, and what passed the gate."""

import math

from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.metrics import excess_losses, unusual_arrivals
from fairseq_alma.report.runs import Comparison, Run
from fairseq_alma.report.tables import Table, table_of_rows

NUM_SHOWN = 12
"""Maximum number of arrivals in the table."""


def single_run(comparison: Comparison) -> Run | None:
    """Return the run of a comparison if there is only one, and its new mega-batches were scored or a gate decided."""
    runs = [run for group in comparison.groups for run in group.counted_runs]
    if len(runs) != 1 or not any(row.scores.gate or _perplexity(row) for row in runs[0].rows):
        return None
    return runs[0]


def last_arrivals(comparison: Comparison) -> Table | None:
    """Return a table of the last arrivals of a single run, the newest first. See `single_run`."""
    if (run := single_run(comparison)) is None:
        return None
    unusual = unusual_arrivals(excess_losses(run.rows))
    rows = [
        {
            "arrival": str(row.t),
            "new text, before": f"{_perplexity(row):,.1f}{' (unusual)' if row.t in unusual else ''}"
            if _perplexity(row)
            else "",
            "stage": str(row.stage) if row.updated else "skipped" if row.is_skipped else "waits",
            "validation": f"{row.scores.validation_perplexity:.2f}" if row.scores.validation_perplexity else "",
            "test": f"{row.scores.perplexity:.2f}" if row.scores.perplexity else "",
            "gate": _gate(row) if row.updated else "",
        }
        for row in reversed(run.rows[1:])
    ][:NUM_SHOWN]
    note = (
        "Perplexity per token. New text, before: the new mega-batch, scored before a stage trained on it; "
        "unusual: far harder or easier than earlier ones. Gate: whether the predictor passed, so that it may be "
        "deployed."
    )
    return table_of_rows("arrivals", f"{comparison.name}: last arrivals", rows, note)


def _perplexity(row: LedgerRow) -> float | None:
    """Return the perplexity on the new mega-batch before training on it."""
    score = row.prequential
    return math.exp(min(score.loss, 700.0)) if score is not None and score.num_tokens else None


def _gate(row: LedgerRow) -> str:
    gate = row.scores.gate
    if gate is None:
        return ""
    if gate["passed"]:
        return "passed"
    failed = ", ".join(check["text"] for check in gate["checks"] if not check["passed"])
    return f"refused ({failed}); stage {gate['deployed']} stays"
