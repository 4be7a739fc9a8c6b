"""Forgetting at one glance: how well a run knows each period before it trained on it, just after, and now."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_alma.core.metrics import excess_losses, unusual_arrivals
from fairseq_alma.report.figures.style import add_note, best_by_validation, new_figure, scale_axis
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, Run

LINES = (("before", "before training on it", "#999999"), ("after", "just after", "#0072B2"), ("now", "now", "#D55E00"))
"""For each line: what `period_lines` calls it, its label, and its colour."""


def period_lines(run: Run) -> dict[str, dict[int, float]]:
    """Return three lines of a run, each with perplexities by mega-batch.

    before    the new mega-batch, scored with the model from before it trained on it (`Prequential`)
    after     the test text of the mega-batch's period after the stage that trained on it
    now       the same, after the last stage

    The last two need a stream with periods. Mega-batches on which no stage has trained are left out of them.
    """
    before = {
        row.t: math.exp(row.prequential.loss)
        for row in run.rows
        if row.prequential is not None and row.prequential.num_tokens and row.prequential.loss < 700
    }
    waiting: list[int] = []
    after: dict[int, float] = {}
    last: Sequence[float] = ()
    for row in run.rows[1:]:
        waiting += [] if row.is_skipped else [row.t]
        if row.updated and row.scores.period_perplexities:
            last = row.scores.period_perplexities
            after |= {t: last[t - 1] for t in waiting if t <= len(last)}
            waiting = []
    return {"before": before, "after": after, "now": {t: last[t - 1] for t in after}}


def forgetting(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the three lines of `period_lines` for the best runs by validation, one panel each, the first seed of each.

    Unusual mega-batches, and those whose stage the gate refused, are marked. The result is None if no new
    mega-batch was scored before a stage trained on it.
    """
    runs = [group.counted_runs[0] for group in comparison.groups]
    lines = [period_lines(run) for run in runs]
    shown = best_by_validation([i for i, one in enumerate(lines) if one["before"]], numbers)
    if not shown:
        return None
    figure, panels = new_figure(len(shown))
    for axes, i in zip(panels, shown, strict=True):
        for name, label, colour in LINES:
            if line := lines[i][name]:
                axes.plot([*line], [*line.values()], "o-", color=colour, label=label, markersize=3, linewidth=1.2)
        refused = [row.t for row in runs[i].rows if row.updated and row.scores.gate and not row.scores.gate["passed"]]
        for t in unusual_arrivals(excess_losses(runs[i].rows)):
            if t in lines[i]["before"]:
                axes.plot(t, lines[i]["before"][t], "o", markersize=10, markerfacecolor="none", color="#CC0000")
        for t in refused:
            axes.axvline(t, color="#CC0000", linestyle=":", linewidth=1)
        values = np.array([value for line in lines[i].values() for value in line.values()])
        scale_axis(axes, "y", values[np.isfinite(values)].tolist())
        axes.set_title(comparison.label_of(comparison.groups[i]), fontsize=9)
        axes.set_xlabel("mega-batch", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_ylabel("perplexity", fontsize=9)
    panels[0].legend(fontsize=7)
    add_note(figure, "now above just after: forgotten. Red circle: unusual; dotted line: refused by the gate")
    return figure
