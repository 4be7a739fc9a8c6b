"""Figures that show quality against cost. Each point is a group: runs that differ only in the seed.

Quality is CER or average perplexity. The figures are like figures 2 and 7 of the paper. The figure that shows the
effect of replay on quality and cost is like figures 4 and 8.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.report.figures.curves import MAX_TITLE, panels_of
from fairseq_alma.report.figures.style import (
    add_learners_and_waits,
    appearance_of,
    dashes_of,
    new_figure,
    note_left_out,
    quality_label,
    scale_axis,
    spread_labels,
    waits_of,
)
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup, group_label

MAX_POINTS = 400
"""Maximum number of points in a panel."""


def against_compute(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw CER or average perplexity against training FLOPs. Return None if no group of runs is finished.

    A line joins groups of runs that differ only in the size of the model (such as `width`).
    """
    return _tradeoff(comparison, numbers, lambda result: result.comp, "training FLOPs over the stream")


def against_parameters(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw CER or average perplexity against the number of parameters. Return None if no group of runs is finished.

    A line joins groups of runs that differ only in the size of the model (such as `width`).
    """
    return _tradeoff(comparison, numbers, lambda result: result.num_params, "parameters after the last mega-batch")


def _tradeoff(
    comparison: Comparison, numbers: Sequence[Numbers], x_of: Callable[[Numbers], float], x_label: str
) -> Figure | None:
    """Draw CER or average perplexity against the cost that `x_of` returns. A line joins groups of several sizes."""
    within_panel = ("learner", "wait", *settings_that_are("size"))
    panels, num_left_out = panels_of(comparison, numbers, within_panel, MAX_POINTS, True)
    if not panels:
        return None
    figure, axes_of_panels, drawn = _new_quality_figure(comparison, numbers, panels, x_label)
    waits = waits_of([comparison.groups[i] for i in drawn])
    for axes, indices in zip(axes_of_panels, panels.values(), strict=True):
        for series in series_of(comparison, indices):
            first = comparison.groups[series[0]]
            points = sorted(((x_of(numbers[i]), numbers[i]) for i in series), key=lambda point: point[0])
            _draw_points(axes, points, first.learner, dashes_of(first.wait_text, waits))
        scale_axis(axes, "x", [x_of(numbers[i]) for i in drawn])
    add_learners_and_waits(figure, [comparison.groups[i] for i in drawn])
    note_left_out(figure, num_left_out)
    return figure


def against_wait(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw CER or average perplexity against the wait, with one line per learner. Only fixed waits are drawn.

    Returns:
        The figure, or None if no panel has groups with different waits.
    """
    groups = comparison.groups
    panels, num_left_out = panels_of(comparison, numbers, ("learner", "wait"), MAX_POINTS, True)
    panels = {title: [i for i in indices if groups[i].has_fixed_wait] for title, indices in panels.items()}
    panels = {title: indices for title, indices in panels.items() if len({groups[i].wait for i in indices}) > 1}
    if not panels:
        return None
    figure, axes_of_panels, drawn = _new_quality_figure(comparison, numbers, panels, "wait, mega-batches")
    waits = sorted({groups[i].wait for i in drawn})
    for axes, indices in zip(axes_of_panels, panels.values(), strict=True):
        for learner in dict.fromkeys(groups[i].learner for i in indices):
            line = sorted((i for i in indices if groups[i].learner == learner), key=lambda i: groups[i].wait)
            _draw_points(axes, [(groups[i].wait, numbers[i]) for i in line], learner, "-")
        scale_axis(axes, "x", waits)
        if len(waits) <= 8:
            axes.set_xticks(waits, [str(wait) for wait in waits])
    add_learners_and_waits(figure, [groups[i] for i in drawn], dashed_waits=False)
    note_left_out(figure, num_left_out)
    return figure


def _new_quality_figure(
    comparison: Comparison, numbers: Sequence[Numbers], panels: Mapping[str, Sequence[int]], x_label: str
) -> tuple[Figure, list[Axes], list[int]]:
    """Return a figure with titles, labels and y axes of CER or average perplexity, its panels, and all its groups."""
    figure, axes_of_panels = new_figure(len(panels))
    drawn = [i for indices in panels.values() for i in indices]
    for axes, title in zip(axes_of_panels, panels, strict=True):
        axes.set_title(textwrap.fill(title, MAX_TITLE), fontsize=9)
        axes.set_xlabel(x_label, fontsize=9)
        scale_axis(axes, "y", [_quality(numbers[i]) for i in drawn])
    axes_of_panels[0].set_ylabel(quality_label(comparison), fontsize=9)
    return figure, axes_of_panels, drawn


def series_of(comparison: Comparison, indices: Sequence[int]) -> list[list[int]]:
    """Divide the groups of a panel into lists of groups that differ only in the size of the model.

    A figure draws one line through the points of each list.
    """
    # Growth settings can be ignored, because `panels_of` has separated groups that have the same learner and wait but
    # different growth settings.
    ignored = (*settings_that_are("size"), *settings_that_are("growth"))
    series: dict[tuple, list[int]] = {}
    for i in indices:
        series.setdefault(_key_without(comparison.groups[i], ignored), []).append(i)
    return list(series.values())


def replay_segments(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the effect of replay: CER or average perplexity against training FLOPs, without and with replay.

    A line joins each group of runs without replay to each group that differs from it only in replay. The settings in
    which the segments differ are written at the end with replay; those that they share, in the title. The result is
    None if there are no two finished groups that differ only in replay.
    """
    pairs = replay_pairs(comparison, numbers)
    if not pairs:
        return None
    figure, [axes] = new_figure(1)
    axes.set_box_aspect(0.8)
    waits = waits_of([group for group, _, _, _ in pairs])
    kinds_of_replay = {repr(group.replay) for _, _, group, _ in pairs}
    unnamed = ("learner", "wait", *(("replay",) if len(kinds_of_replay) == 1 else ()))
    names = [name for name in comparison.varied_settings if name not in unnamed]
    texts = [group_label(replayed, names, with_learner=False) for _, _, replayed, _ in pairs]
    if len(set(texts)) == 1:
        axes.set_title(textwrap.fill(texts[0], MAX_TITLE), fontsize=9)
        texts = [""] * len(pairs)
    for (group, without, _, with_replay), text in zip(pairs, texts, strict=True):
        if text:
            axes.annotate(
                text, (with_replay.comp, _quality(with_replay)), xytext=(7, 0), textcoords="offset points",
                fontsize=7, color=appearance_of(group.learner).colour, verticalalignment="center",
                annotation_clip=False,
            )  # fmt: skip
        style, ends = appearance_of(group.learner), (without, with_replay)
        axes.plot(
            [result.comp for result in ends], [_quality(result) for result in ends], color=style.colour,
            linestyle=dashes_of(group.wait_text, waits), linewidth=1.2,
        )  # fmt: skip
        for result, fill in ((without, "white"), (with_replay, style.colour)):
            axes.errorbar(
                result.comp, _quality(result), yerr=_stderr(result), fmt=style.marker, color=style.colour,
                capsize=2, markersize=5, markerfacecolor=fill,
            )  # fmt: skip
    drawn = [result for _, without, _, with_replay in pairs for result in (without, with_replay)]
    scale_axis(axes, "x", [result.comp for result in drawn])
    scale_axis(axes, "y", [_quality(result) for result in drawn])
    spread_labels(axes)
    axes.set_xlabel("training FLOPs over the stream", fontsize=9)
    axes.set_ylabel(quality_label(comparison), fontsize=9)
    add_learners_and_waits(figure, [group for group, _, _, _ in pairs])
    handles = [
        Line2D([], [], color="#444444", marker="o", markerfacecolor="white", linestyle="", label="without replay"),
        Line2D([], [], color="#444444", marker="o", linestyle="", label="with replay"),
    ]
    axes.legend(handles=handles, fontsize=8, frameon=False)
    return figure


def replay_pairs(
    comparison: Comparison, numbers: Sequence[Numbers]
) -> list[tuple[RunGroup, Numbers, RunGroup, Numbers]]:  # fmt: skip
    """Return the finished groups that differ only in replay: group without replay, its results, group with, its
    results.
    """
    finished = [(group, result) for group, result in zip(comparison.groups, numbers, strict=True) if result.quality]
    without = {_key_without(group, ("replay",)): (group, result) for group, result in finished if not group.replay}
    return [
        (*start, group, result)
        for group, result in finished
        if group.replay and (start := without.get(_key_without(group, ("replay",))))
    ]


def _key_without(group: RunGroup, names: Sequence[str]) -> tuple:
    """Return all settings but `names` as a tuple. It is equal for groups that differ only in these."""
    return tuple((name, repr(value)) for name, value in sorted(group.settings.items()) if name not in names)


def _draw_points(axes: Axes, points: Sequence[tuple[float, Numbers]], learner: str, dashes: Any) -> None:
    """Draw points (x coordinate, results) with their error bars in the marks of a learner, and join them by a line."""
    style = appearance_of(learner)
    has_error = any(result.quality and result.quality.stderr is not None for _, result in points)
    axes.errorbar(
        [x for x, _ in points], [_quality(result) for _, result in points],
        yerr=[_stderr(result) for _, result in points] if has_error else None,
        color=style.colour, marker=style.marker, linestyle=dashes, linewidth=1.1, markersize=4, capsize=2,
    )  # fmt: skip


def _quality(numbers: Numbers) -> float:
    """Return the CER or the average perplexity of a finished group of runs: the mean over its seeds."""
    assert numbers.quality is not None
    return numbers.quality.mean


def _stderr(numbers: Numbers) -> float:
    """Return the standard error of the CER or average perplexity of a finished group; 0 for a single seed."""
    assert numbers.quality is not None
    return numbers.quality.stderr or 0.0
