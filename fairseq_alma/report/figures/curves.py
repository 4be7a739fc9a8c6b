"""Curves of error rate or perplexity.

over_the_stream     error rate or perplexity after each arrival (figures 1, 3, 7 and 9 of the paper)
running_averages    average perplexity so far, against three kinds of cost (figure 5 of the paper)
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fairseq_alma.core.catalogue import GROWTH_SETTINGS
from fairseq_alma.report.appearance import FEW_ARRIVALS, appearance_of, matplotlib_dashes
from fairseq_alma.report.figures.style import (
    MAX_LINES,
    MAX_PANELS,
    add_learners_and_waits,
    add_legend,
    add_note,
    legend_entry,
    new_figure,
    note_left_out,
    scale_axis,
    waits_of,
)
from fairseq_alma.report.labels import group_label
from fairseq_alma.report.numbers import Numbers, running_average, standard_error
from fairseq_alma.report.runs import Comparison, RunGroup


def panels_of(
    comparison: Comparison,
    numbers: Sequence[Numbers],
    within_panel: Sequence[str] = ("learner", "wait"),
    max_groups: int = MAX_LINES,
) -> tuple[dict[str, list[RunGroup]], int]:
    """Distribute the groups of runs over the panels of a figure.

    The groups in one panel differ only in the settings `within_panel`. They may also differ in a growth setting, such
    as `grow_every`, if the learner and the wait determine its value. Groups that have not reached arrival t = 1 are
    left out.

    A figure has at most MAX_PANELS panels, and a panel has at most `max_groups` groups. If there are more, the panels
    and groups with the best validation scores are shown.

    Args:
        comparison: the groups to distribute.
        numbers: the results of each group.
        within_panel: settings that a reader can tell apart within a panel, by colour, marker, line style or x axis.
        max_groups: maximum number of groups in a panel.

    Returns:
        A dictionary panel title -> groups in the panel, and the number of groups left out because of MAX_PANELS and
        `max_groups`.
    """
    # A growth setting needs no separate panels if the learner and the wait determine its value, because the curves in
    # a panel already show the learner and the wait.
    growth = [name for name in GROWTH_SETTINGS if comparison.follows_from_learner_and_wait(name)]
    between_panels = [name for name in comparison.varied_settings if name not in (*within_panel, *growth)]
    panels: dict[str, list[tuple[float, RunGroup]]] = {}
    for group, result in zip(comparison.groups, numbers, strict=True):
        if group.last_t < 1:
            continue
        # The label begins with the learner. A panel can contain several learners, so remove the learner from the title.
        title = group_label(group, between_panels).partition(", ")[2]
        score = result.validation_score if result.validation_score is not None else float("inf")
        panels.setdefault(title, []).append((score, group))
    shown_titles = sorted(panels, key=lambda title: min(score for score, _ in panels[title]))[:MAX_PANELS]
    shown, num_shown = {}, 0
    # Loop over `panels`, because its titles are in the order of the groups in the comparison. The panels of the figure
    # must be in this order too. `shown_titles` is sorted by score instead.
    for title in panels:
        if title in shown_titles:
            best = sorted(panels[title], key=lambda item: item[0])[:max_groups]
            shown[title] = [group for group in comparison.groups if any(group is other for _, other in best)]
            num_shown += len(best)
    return shown, sum(map(len, panels.values())) - num_shown


def over_the_stream(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the test error rate or perplexity after each arrival. Shaded bands show the standard error over seeds.

    Error rates are drawn from t = 0 on, because the large errors before the first stage are the cost of waiting.

    Perplexities are drawn from the first stage on. The perplexity of an untrained model is about the size of the
    vocabulary. On an axis with such large values, differences between trained models would not be visible.
    """
    panels, num_left_out = panels_of(comparison, numbers)
    if not panels:
        return None
    figure, axes_of_panels = new_figure(len(panels))
    waits = waits_of(comparison.groups)
    drawn_values: list[float] = []
    for axes, (title, groups) in zip(axes_of_panels, panels.items(), strict=True):
        for group in groups:
            drawn_values += _draw_curve(axes, comparison, group, matplotlib_dashes(group.wait, waits))
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("mega-batches arrived", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in axes_of_panels:
        scale_axis(axes, "y", drawn_values)
    axes_of_panels[0].set_ylabel("test error, %" if comparison.is_vision else "test perplexity", fontsize=9)
    add_learners_and_waits(figure, [group for groups in panels.values() for group in groups])
    note_left_out(figure, num_left_out)
    return figure


def _draw_curve(axes: Axes, comparison: Comparison, group: RunGroup, dashes: object) -> list[float]:
    """Draw the curve of one group of runs: the mean over seeds at each arrival.

    Args:
        axes: the panel.
        comparison: the comparison that contains the group.
        group: the group whose curve is drawn.
        dashes: matplotlib line style.

    Returns:
        The values of the curve that are finite, to scale the y axis. For a language model without a finished stage,
        nothing is drawn and the list is empty.
    """
    values = group.column("quality") * (100.0 if comparison.is_vision else 1.0)
    first_t = 0
    if not comparison.is_vision:
        trained = np.flatnonzero(group.counted_runs[0].stage[: group.last_t + 1] > 0)
        if not len(trained):
            return []
        first_t = int(trained[0])
    times = np.arange(first_t, group.last_t + 1)
    mean, error = values[:, first_t:].mean(axis=0), standard_error(values[:, first_t:])
    style = appearance_of(group.learner)
    is_short = comparison.num_arrivals <= FEW_ARRIVALS
    # On a short stream, draw a marker at each arrival and join the markers by straight lines. On a long stream, draw
    # a step curve without markers, because so many markers would overlap. A step curve fits, because the error rate or
    # perplexity changes only when a stage ends.
    axes.plot(
        times, mean, color=style.colour, linestyle=dashes, linewidth=1.3,
        drawstyle="default" if is_short else "steps-post", marker=style.marker if is_short else None, markersize=4,
    )  # fmt: skip
    if not is_short:
        # Mark the end of the curve. The curve of a learner that waits for the complete stream changes only there, and
        # without the marker this change would be hard to see.
        axes.plot(times[-1], mean[-1], style.marker, color=style.colour, markersize=4, clip_on=False)
    if error is not None:
        axes.fill_between(
            times, mean - error, mean + error, color=style.colour, alpha=0.2, linewidth=0,
            step=None if is_short else "post",
        )  # fmt: skip
    return mean[np.isfinite(mean)].tolist()


def running_averages(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the average perplexity so far against three costs, each in a separate panel, like figure 5 of the paper.

    The costs are the training TFLOPs so far, the number of parameters, and the number of experts. Each curve shows one
    group of runs (runs that differ only in the seed).

    Returns:
        The figure. None if the runs are vision runs, or if no group of runs has finished a stage.
    """
    drawable = [
        i
        for i, group in enumerate(comparison.groups)
        if group.last_t >= 1 and (group.counted_runs[0].stage > 0).any()
    ]  # fmt: skip
    if comparison.is_vision or not drawable:
        return None
    indices = range(len(comparison.groups))
    best = sorted(indices, key=lambda i: numbers[i].validation_score or float("inf"))[:MAX_LINES]
    groups = [comparison.groups[i] for i in drawable if i in best]
    figure, panels = new_figure(3)
    handles: list[Line2D] = []
    waits = waits_of(groups)
    drawn_x: list[list[float]] = [[], [], []]
    drawn_y: list[float] = []
    for group in groups:
        averages = np.stack(
            [running_average(run.quality[: group.last_t + 1], run.stage[: group.last_t + 1])
             for run in group.counted_runs]
        )  # fmt: skip
        trained = ~np.isnan(averages[0])
        mean, error = averages.mean(axis=0), standard_error(averages)
        num_experts = group.mean_column("num_experts") * group.mean_column("num_members")
        costs = (np.cumsum(group.mean_column("train_flops")) / 1e12, group.mean_column("num_params"), num_experts)
        dashes = matplotlib_dashes(group.wait, waits)
        for axes, cost, values in zip(panels, costs, drawn_x, strict=True):
            _draw_growing_markers(
                axes, cost[trained], mean[trained], None if error is None else error[trained], group.learner, dashes
            )
            values += cost[trained][np.isfinite(cost[trained])].tolist()
        drawn_y += mean[trained].tolist()
        handles.append(legend_entry(comparison, group, dashes))
    x_labels = ("training TFLOPs so far", "parameters", "experts of all members")
    for axes, values, label in zip(panels, drawn_x, x_labels, strict=True):
        scale_axis(axes, "x", values)
        scale_axis(axes, "y", drawn_y)
        axes.set_xlabel(label, fontsize=9)
    panels[0].set_ylabel("average test perplexity so far", fontsize=9)
    add_legend(figure, handles[: MAX_LINES // 2])
    add_note(figure, "averages start at the first stage; one marker per arrival, larger markers are later")
    return figure


def _draw_growing_markers(
    axes: Axes, x: np.ndarray, y: np.ndarray, error: np.ndarray | None, learner: str, dashes: object
) -> None:
    """Draw a line with one marker per arrival. Markers of later arrivals are larger."""
    style = appearance_of(learner)
    axes.plot(x, y, color=style.colour, linestyle=dashes, linewidth=1)
    if error is not None:
        axes.errorbar(x, y, yerr=error, color=style.colour, fmt="none", capsize=2, linewidth=1)
    axes.scatter(x, y, s=np.linspace(10, 40, len(x)), color=style.colour, marker=style.marker, zorder=3)
