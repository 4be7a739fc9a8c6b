"""The first version's radar plot: quality, and memory and compute at training and at test time."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_alma.report.figures.style import colour_of, mark_of, note_below
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, label_of

AXES = ("quality", "Mem\n(training)", "Comp\n(training)", "parameters\n(test)", "FLOPs of one\nprediction (test)")


def radar(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """One polygon a learner: its run that is best by validation. Axes are shares of the largest: small is good.

    Comp is drawn by its logarithm where the runs differ by more than ten times in it, and so are the others.
    """
    best: dict[str, int] = {}
    for index, one in enumerate(numbers):
        if one.validation_score is None or one.quality is None or not np.isfinite(one.quality.mean):
            continue
        learner = comparison.runs[index].learner
        if learner not in best or one.validation_score < (numbers[best[learner]].validation_score or 0.0):
            best[learner] = index
    if len(best) < 2:
        return None
    shares, is_log = radar_shares([numbers[index] for index in best.values()])
    # Placed by hand: a layout engine does not see how far the names of polar axes reach.
    figure = Figure(figsize=(7.2, 4.6), dpi=150)
    axes = figure.add_axes((0.16, 0.17, 0.42, 0.66), projection="polar")
    angles = np.linspace(0, 2 * np.pi, len(AXES), endpoint=False)
    handles = []
    for share, index in zip(shares, best.values(), strict=True):
        run = comparison.runs[index]
        colour, mark = colour_of(run.learner), mark_of(run.learner)
        around = [*range(len(AXES)), 0]
        axes.plot(angles[around], np.array(share)[around], color=colour, marker=mark, markersize=4, linewidth=1.2)
        axes.fill(angles, share, color=colour, alpha=0.06)
        handles.append(Line2D([], [], color=colour, marker=mark, markersize=4, label=label_of(run, comparison.varied)))
    names = ("CER" if comparison.is_vision else "average\nperplexity", *AXES[1:])
    axes.set_xticks(angles, [f"{name}{' (log)' * log}" for name, log in zip(names, is_log, strict=True)], fontsize=8)
    axes.set_yticks([0.25, 0.5, 0.75, 1.0], ["", "", "", "1"], fontsize=7)
    axes.set_ylim(0, 1.05)
    axes.tick_params(axis="x", pad=9)
    figure.legend(handles=handles, loc="upper right", fontsize=8, frameon=False)
    note_below(
        figure, "share of the largest; the smaller, the better; of each learner the run that is best by validation"
    )
    return figure


def radar_shares(numbers: Sequence[Numbers]) -> tuple[list[list[float]], list[bool]]:
    """([runs][axes] in (0, 1], which axes are logarithmic: those that differ by more than ten times).

    A logarithmic axis runs from a tenth of the smallest, at 0, to the largest, at 1.
    """
    values = np.array(
        [
            [one.quality.mean if one.quality else 0.0, one.mem, one.comp, one.num_params, one.forward_flops]
            for one in numbers
        ]
    )
    values = np.maximum(values, 1e-12)
    least, most = values.min(axis=0), values.max(axis=0)
    is_log = most > 10 * least
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values / (least / 10)) / np.log(most / (least / 10))
    shares = np.where(is_log, logs, values / most)
    return shares.tolist(), is_log.tolist()
