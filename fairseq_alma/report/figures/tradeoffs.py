"""Figures that show quality against cost. Each point is a group: runs that differ only in the seed.

Quality is CER or average perplexity. The figures are like figures 2 and 7 of the paper. The figure that shows the
effect of replay on quality and cost is like figures 4 and 8.
"""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.report.figures.curves import MAX_TITLE, panels_of
from fairseq_alma.report.figures.style import (
    add_learners_and_waits,
    appearance_of,
    matplotlib_dashes,
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
    """Draw CER or average perplexity against a cost.

    A line joins groups of runs that differ only in the size of the model (such as `width`).

    Args:
        comparison: the groups; only finished groups are drawn.
        numbers: the results of each group.
        x_of: function that returns the cost of a group, given its results.
        x_label: name of the cost, for the label of the x axis.

    Returns:
        The figure, or None if no group is finished.
    """
    panels, numbers_by_id, num_left_out = _finished_panels(
        comparison, numbers, ("learner", "wait", *settings_that_are("size"))
    )
    if not panels:
        return None
    figure, axes_of_panels = new_figure(len(panels))
    drawn = [group for groups in panels.values() for group in groups]
    drawn_numbers = [numbers_by_id[id(group)] for group in drawn]
    waits = waits_of(drawn)
    for axes, (title, groups) in zip(axes_of_panels, panels.items(), strict=True):
        for series in series_of(groups):
            results = [numbers_by_id[id(group)] for group in series]
            points = sorted(((x_of(result), result) for result in results), key=lambda point: point[0])
            _draw_points(axes, points, series[0].learner, matplotlib_dashes(series[0].wait_text, waits))
        axes.set_title(textwrap.fill(title, MAX_TITLE), fontsize=9)
        axes.set_xlabel(x_label, fontsize=9)
        scale_axis(axes, "x", map(x_of, drawn_numbers))
    _scale_quality_axes(axes_of_panels, comparison, drawn_numbers)
    add_learners_and_waits(figure, drawn)
    note_left_out(figure, num_left_out)
    return figure


def against_wait(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw CER or average perplexity against the wait, with one line per learner. Only fixed waits are drawn.

    Returns:
        The figure, or None if no panel has groups with different waits.
    """
    panels, numbers_by_id, num_left_out = _finished_panels(comparison, numbers, ("learner", "wait"))
    panels = {title: [group for group in groups if group.has_fixed_wait] for title, groups in panels.items()}
    panels = {title: groups for title, groups in panels.items() if len(waits_of(groups)) > 1}
    if not panels:
        return None
    figure, axes_of_panels = new_figure(len(panels))
    drawn = [group for groups in panels.values() for group in groups]
    waits = sorted({group.wait for group in drawn})
    for axes, (title, groups) in zip(axes_of_panels, panels.items(), strict=True):
        for learner in dict.fromkeys(group.learner for group in groups):
            line = sorted((group for group in groups if group.learner == learner), key=lambda group: group.wait)
            _draw_points(axes, [(group.wait, numbers_by_id[id(group)]) for group in line], learner, "-")
        scale_axis(axes, "x", waits)
        if len(waits) <= 8:
            axes.set_xticks(waits, [str(wait) for wait in waits])
        axes.set_title(textwrap.fill(title, MAX_TITLE), fontsize=9)
        axes.set_xlabel("wait, mega-batches", fontsize=9)
    _scale_quality_axes(axes_of_panels, comparison, [numbers_by_id[id(group)] for group in drawn])
    add_learners_and_waits(figure, drawn, dashed_waits=False)
    note_left_out(figure, num_left_out)
    return figure


def _finished_panels(
    comparison: Comparison, numbers: Sequence[Numbers], within_panel: Sequence[str]
) -> tuple[dict[str, list[RunGroup]], dict[int, Numbers], int]:
    """Distribute the finished groups of runs over the panels of a figure, with the function `panels_of`.

    Returns:
        Three values: a dictionary panel title -> finished groups in the panel, a dictionary id(group) -> results of
        each finished group, and the number of groups that `panels_of` left out.
    """
    # A RunGroup cannot be a dictionary key, because its settings are a dictionary. So use id(group) as the key.
    numbers_by_id = {
        id(group): result for group, result in zip(comparison.groups, numbers, strict=True) if result.quality
    }
    panels, num_left_out = panels_of(comparison, numbers, within_panel, MAX_POINTS)
    finished = {title: [group for group in groups if id(group) in numbers_by_id] for title, groups in panels.items()}
    return {title: groups for title, groups in finished.items() if groups}, numbers_by_id, num_left_out


def _scale_quality_axes(panels: Sequence[Axes], comparison: Comparison, drawn: Sequence[Numbers]) -> None:
    """Scale the y axes of all panels to the CER or average perplexity of all drawn groups. Label the first y axis."""
    for axes in panels:
        scale_axis(axes, "y", [_quality(result) for result in drawn])
    panels[0].set_ylabel(quality_label(comparison), fontsize=9)


def series_of(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Divide the groups of runs in a panel into lists. A figure draws one line through the points of each list.

    The groups in one list have the same learner and wait, and differ only in the size of the model (such as
    `width`).
    """
    # Growth settings can be ignored here, because `panels_of` has already separated groups that have the same learner
    # and wait but different growth settings: such groups are in different panels.
    ignored = (*settings_that_are("size"), *settings_that_are("growth"))
    series: dict[tuple, list[RunGroup]] = {}
    for group in groups:
        key = tuple((name, repr(value)) for name, value in sorted(group.settings.items()) if name not in ignored)
        series.setdefault((*key, group.learner), []).append(group)
    return list(series.values())


def replay_segments(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the effect of replay: CER or average perplexity against training FLOPs, without and with replay.

    A line joins each group of runs without replay to each group that differs from it only in replay. The settings in
    which the segments differ, such as `replay` and `width`, are written at the end with replay; those that they share,
    in the title.
    The result is None if there are no two finished groups that differ only in replay.
    """
    pairs = replay_pairs(comparison, numbers)
    if not pairs:
        return None
    figure, [axes] = new_figure(1)
    axes.set_box_aspect(0.8)
    waits = waits_of([group for group, _, _, _ in pairs])
    kinds_of_replay = {repr(group.settings.get("replay")) for _, _, group, _ in pairs}
    unnamed = ("learner", "wait", *(["replay"] if len(kinds_of_replay) == 1 else []))
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
            linestyle=matplotlib_dashes(group.wait_text, waits), linewidth=1.2,
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
    """Find the pairs of finished groups of runs that differ only in replay: one group without and one with replay.

    Returns:
        For each pair: (group without replay, its results, group with replay, its results).
    """
    without: dict[tuple, tuple[RunGroup, Numbers]] = {}
    for group, result in zip(comparison.groups, numbers, strict=True):
        if not group.replay and result.quality:
            without[_key_without_replay(group)] = (group, result)
    pairs = []
    for group, result in zip(comparison.groups, numbers, strict=True):
        if group.replay and result.quality and (start := without.get(_key_without_replay(group))):
            pairs.append((*start, group, result))
    return pairs


def _key_without_replay(group: RunGroup) -> tuple:
    """Return a tuple of all settings but those of replay. Groups that differ only in replay have equal tuples."""
    settings = sorted(group.settings.items())
    return tuple((name, repr(value)) for name, value in settings if name != "replay")


def _draw_points(axes: Axes, points: Sequence[tuple[float, Numbers]], learner: str, dashes: Any) -> None:
    """Draw points and join them by a line. If any point has a standard error, draw error bars.

    Args:
        axes: the panel.
        points: for each point, the x coordinate and the results of a group of runs. The y coordinate is the CER or
            average perplexity of the group, taken from its results.
        learner: name of the learner. It determines colour and marker.
        dashes: matplotlib line style.
    """
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
