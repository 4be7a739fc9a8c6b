"""A radar plot like the one in the first version of the paper.

The plot shows the quality of each learner, and the memory and compute that the learner needs in training and in test.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fairseq_alma.report.figures.curves import panels_of
from fairseq_alma.report.figures.style import add_note, appearance_of, legend_entry
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison

# The axes that show a cost. The plot has one more axis, for CER or average perplexity.
COST_AXES = ("Mem\n(training)", "Comp\n(training)", "parameters\n(test)", "FLOPs of one\nprediction (test)")


def radar(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw a radar plot with one polygon per learner. A small polygon is good.

    The polygons show runs of one recipe: they differ in the learner and the wait, but not in the size, the number of
    epochs or other settings. It is the recipe with the most learners; if several have as many, the one with the best
    validation score. Each polygon shows the best group of its learner by validation; for its corners, see
    `radar_shares`. The result is None if no recipe has two learners with a validation score and a finite CER or average
    perplexity.
    """
    recipe, best = _best_of_a_recipe(comparison, numbers)
    if len(best) < 2:
        return None
    shares, is_log = radar_shares([numbers[index] for index in best.values()])
    # Set the position of the axes here, because a matplotlib layout engine would ignore the width of the axis names.
    # Then these names could be cut off.
    figure = Figure(figsize=(7.2, 4.6), dpi=150)
    axes = figure.add_axes((0.16, 0.17, 0.42, 0.66), projection="polar")
    names = ("CER" if comparison.is_vision else "average\nperplexity", *COST_AXES)
    angles = np.linspace(0, 2 * np.pi, len(names), endpoint=False)
    handles = []
    for share, index in zip(shares, best.values(), strict=True):
        group = comparison.groups[index]
        style = appearance_of(group.learner)
        closed = [*range(len(names)), 0]
        axes.plot(
            angles[closed], np.array(share)[closed], color=style.colour, marker=style.marker, markersize=4,
            linewidth=1.2,
        )  # fmt: skip
        axes.fill(angles, share, color=style.colour, alpha=0.06)
        handles.append(legend_entry(comparison, group))
    axes.set_xticks(angles, [f"{name}{' (log)' * log}" for name, log in zip(names, is_log, strict=True)], fontsize=8)
    axes.set_yticks([0.25, 0.5, 0.75, 1.0], ["", "", "", "1"], fontsize=7)
    axes.set_ylim(0, 1.05)
    axes.tick_params(axis="x", pad=9)
    figure.legend(handles=handles, loc="upper right", fontsize=8, frameon=False)
    note = "values as shares of the largest; smaller is better; for each learner, its best wait by validation"
    add_note(figure, f"{note}\nall runs with {recipe}" if recipe else note)
    return figure


def _best_of_a_recipe(comparison: Comparison, numbers: Sequence[Numbers]) -> tuple[str, dict[str, int]]:
    """Return the recipe that the radar plot shows, and learner -> index of its best group of runs of this recipe."""
    scores: dict[int, float] = {
        index: result.validation_score
        for index, result in enumerate(numbers)
        if result.validation_score is not None and result.quality and np.isfinite(result.quality.mean)
    }
    recipes: dict[str, dict[str, int]] = {}
    for recipe, indices in panels_of(comparison, numbers, max_groups=len(numbers))[0].items():
        best: dict[str, int] = {}
        for index in indices:
            learner = comparison.groups[index].learner
            if index in scores and scores[index] < scores.get(best.get(learner, -1), np.inf):
                best[learner] = index
        if best:
            recipes[recipe] = best
    if not recipes:
        return "", {}
    return min(recipes.items(), key=lambda item: (-len(item[1]), min(scores[index] for index in item[1].values())))


def radar_shares(numbers: Sequence[Numbers]) -> tuple[list[list[float]], list[bool]]:
    """Return the position of each group of runs on each axis of the radar plot.

    Position 1 is the largest value of all groups. On a linear axis, position 0 is the value 0. If the largest value is
    more than ten times the smallest, the axis is logarithmic, and position 0 is a tenth of the smallest value.

    Returns:
        The positions as [group][axis], each greater than 0 and at most 1. For each axis, True if it is logarithmic.
    """
    values = np.array(
        [
            [
                result.quality.mean if result.quality else 0.0,
                result.mem,
                result.comp,
                result.num_params,
                result.forward_flops,
            ]
            for result in numbers
        ]
    )
    values = np.maximum(values, 1e-12)  # replace 0 by 1e-12, because 0 has no logarithm and cannot be a divisor
    smallest, largest = values.min(axis=0), values.max(axis=0)
    is_log = largest > 10 * smallest
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values / (smallest / 10)) / np.log(largest / (smallest / 10))
    shares = np.where(is_log, logs, values / largest)
    return shares.tolist(), is_log.tolist()
