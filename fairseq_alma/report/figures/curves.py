"""Curves of error rate or perplexity.

over_the_stream     error rate or perplexity after each arrival (figures 1, 3, 7 and 9 of the paper)
running_averages    average perplexity so far, against three kinds of cost (figure 5 of the paper)
on_tasks            scores on tasks of lm-evaluation-harness after each arrival, beside the perplexity
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.report.figures.style import (
    FEW_ARRIVALS,
    MAX_LINES,
    MAX_PANELS,
    add_learners_and_waits,
    add_legend,
    add_note,
    appearance_of,
    dashes_of,
    legend_entry,
    marker_fill,
    new_figure,
    note_left_out,
    scale_axis,
    spread_labels,
    waits_of,
)
from fairseq_alma.report.numbers import Numbers, ranking, standard_error
from fairseq_alma.report.runs import Comparison, RunGroup, group_label, options_of, setting_words

MAX_TITLE = 45
"""Number of characters in a line of a panel's title."""


def panels_of(
    comparison: Comparison,
    numbers: Sequence[Numbers],
    within_panel: Sequence[str] = ("learner", "wait"),
    max_groups: int = MAX_LINES,
    finished_only: bool = False,
) -> tuple[dict[str, list[int]], int]:
    """Distribute the groups of runs over the panels of a figure.

    The groups in one panel differ only in the settings `within_panel`. They may also differ in a growth setting, such
    as `grow_every`, if the learner and the wait determine its value, because the curves show the learner and the wait.
    Groups that have not reached arrival t = 1 are left out.

    A figure has at most MAX_PANELS panels, and a panel has at most `max_groups` groups. If there are more, the panels
    and groups with the best validation scores are shown.

    Args:
        comparison: the groups to distribute.
        numbers: the results of each group.
        within_panel: settings that a reader can tell apart within a panel, by colour, marker, line style or x axis.
        max_groups: maximum number of groups in a panel.
        finished_only: if True, unfinished groups are left out.

    Returns:
        A dictionary panel title -> indices of the groups in the panel, in the order of the comparison, and the number
            of groups that were left out because of MAX_PANELS and `max_groups`.
    """
    growth = [name for name in settings_that_are("growth") if comparison.follows_from_learner_and_wait(name)]
    between_panels = [name for name in comparison.varied_settings if name not in (*within_panel, *growth)]
    panels: dict[str, list[int]] = {}
    for i, group in enumerate(comparison.groups):
        if group.last_t >= 1 and (numbers[i].quality or not finished_only):
            panels.setdefault(group_label(group, between_panels, with_learner=False), []).append(i)
    place = {i: number for number, i in enumerate(ranking(numbers))}
    best_first = {title: sorted(indices, key=lambda i: place[i]) for title, indices in panels.items()}
    best_titles = sorted(panels, key=lambda title: place[best_first[title][0]])[:MAX_PANELS]
    shown = {title: sorted(best_first[title][:max_groups]) for title in panels if title in best_titles}
    return shown, sum(map(len, panels.values())) - sum(map(len, shown.values()))


def join_single_curves(
    comparison: Comparison, panels: Mapping[str, Sequence[int]]
) -> dict[str, list[tuple[RunGroup, str]]]:
    """Move a group that has a panel of its own to a panel of groups that differ from it only in size, if there is one.

    The size is a setting such as `width`, or a growth setting, such as `grow_layers`. A group with an option, such
    as an average of the weights, may also differ in other options and in `replay`. The group is moved to the
    panel with the most groups.

    Returns:
        A dictionary panel title -> (group, size) of each group in the panel. The size is a text such as "width 8" or
        "average power:8" for a group that differs from the title of the panel, and empty for the others.
    """
    sizes, all_growth = settings_that_are("size"), settings_that_are("growth")
    growth = [name for name in all_growth if not comparison.follows_from_learner_and_wait(name)]

    def title_without_size(group: RunGroup) -> str:
        options = options_of(group)
        left_out = {"learner", "wait", *sizes, *all_growth, *options, *(["replay"] if options else [])}
        return ", ".join(setting_words(group, [name for name in comparison.varied_settings if name not in left_out]))

    def size_of(group: RunGroup) -> str:
        # One option names the curve: the table of the runs has the others.
        names = [name for name in comparison.varied_settings if name in (*sizes, *growth)]
        return group_label(group, [*names, *options_of(group)[:1]], with_learner=False)

    shared_titles = {title: title_without_size(comparison.groups[indices[0]]) for title, indices in panels.items()}
    joined: dict[str, list[tuple[RunGroup, str]]] = {}
    for title, indices in panels.items():
        shared, groups = shared_titles[title], [comparison.groups[i] for i in indices]
        alike = [other for other in panels if shared_titles[other] == shared]
        largest = max(alike, key=lambda other: len(panels[other]))
        if len(panels[largest]) == 1 < len(alike):
            target, size = shared, size_of(groups[0])  # no panel has several curves: one panel without a size
        elif len(groups) == 1:
            target, size = largest, size_of(groups[0]) if title != largest else ""
        else:
            target, size = title, ""
        joined.setdefault(target, []).extend((group, size) for group in groups)
    # Sort the panels by title as in `panels`. A moved curve may have come before the panel to which it was moved.
    order = {title: number for number, title in enumerate(panels)}
    positions = {title: order.get(title, number) for number, title in enumerate(joined)}
    return dict(sorted(joined.items(), key=lambda item: positions[item[0]]))


def over_the_stream(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the test error rate or perplexity after each arrival. Shaded bands show the standard error over seeds.

    Error rates are drawn from t = 0 on, because the large errors before the first stage are the cost of waiting.
    Perplexities are drawn from the first stage on: that of an untrained model, about the size of the vocabulary, would
    hide the differences between trained models.

    A group that would be alone in a panel is drawn in the panel of groups that differ from it only in size, or in
    options. The difference is written at the end of its curve.
    """
    panels, num_left_out = panels_of(comparison, numbers)
    if not panels:
        return None
    joined = join_single_curves(comparison, panels)
    figure, axes_of_panels = new_figure(len(joined))
    waits = waits_of(comparison.groups)
    drawn_values: list[float] = []
    for axes, (title, curves) in zip(axes_of_panels, joined.items(), strict=True):
        others = 0  # number of curves so far whose size differs from that in the title
        for group, size in curves:
            others += bool(size)
            inside = marker_fill(group.learner, others)
            drawn_values += _draw_curve(axes, comparison, group, dashes_of(group.wait_text, waits), size, inside)
        axes.set_title(textwrap.fill(title, MAX_TITLE), fontsize=9)
        axes.set_xlabel("mega-batches arrived", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    first, last = (0 if comparison.is_vision else 1), comparison.num_arrivals
    margin = 0.05 * max(1, last - first)
    for axes in axes_of_panels:
        scale_axis(axes, "y", drawn_values)
        axes.set_xlim(first - margin, last + margin)
        spread_labels(axes)
    axes_of_panels[0].set_ylabel("test error, %" if comparison.is_vision else "test perplexity", fontsize=9)
    add_learners_and_waits(figure, [comparison.groups[i] for indices in panels.values() for i in indices])
    note_left_out(figure, num_left_out)
    return figure


def _draw_curve(
    axes: Axes, comparison: Comparison, group: RunGroup, dashes: object, size: str, fill: str
) -> list[float]:
    """Draw the curve of one group of runs: the mean over seeds at each arrival. Return its finite values.

    `size` is written at the end of the curve, and `fill` is the colour inside the markers of a curve with a size. For a
    language model without a finished stage, nothing is drawn.
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
    # Markers with another filling distinguish curves whose size differs from that of the other curves in the panel.
    marks: dict[str, Any] = {"marker": style.marker if is_short else None}
    if size:
        marks = {"marker": style.marker, "markevery": max(1, len(times) // 8), "markerfacecolor": fill}
    # On a short stream, draw a marker at each arrival and join the markers by straight lines. On a long stream, draw
    # a step curve without markers, because so many markers would overlap. A step curve fits, because the error rate or
    # perplexity changes only when a stage ends.
    axes.plot(
        times, mean, color=style.colour, linestyle=dashes, linewidth=1.3,
        drawstyle="default" if is_short else "steps-post", markersize=4,
        **marks,
    )  # fmt: skip
    if not is_short:
        # Mark the end of the curve. The curve of a learner that waits for the complete stream changes only there, and
        # without the marker this change would be hard to see.
        axes.plot(times[-1], mean[-1], style.marker, color=style.colour, markersize=4, clip_on=False)
    if size and np.isfinite(mean[-1]):
        axes.annotate(
            size, (times[-1], mean[-1]), xytext=(5, 0), textcoords="offset points", fontsize=7, color=style.colour,
            verticalalignment="center", annotation_clip=False,
        )  # fmt: skip
    if error is not None:
        axes.fill_between(
            times, mean - error, mean + error, color=style.colour, alpha=0.2, linewidth=0,
            step=None if is_short else "post",
        )  # fmt: skip
    return mean[np.isfinite(mean)].tolist()


def running_averages(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the average perplexity so far against three costs, each in a separate panel, like figure 5 of the paper.

    The average is the geometric mean over all arrivals t = 1, 2, ... so far, as on the page. It includes the arrivals
    before the first stage, at the perplexity of the untrained model. The paper draws an arithmetic mean. The costs are
    the training FLOPs so far, the number of parameters, and the number of experts.

    The result is None for vision runs, or if no group of runs has finished a stage.
    """
    groups = [
        group
        for group in (comparison.groups[i] for i in sorted(ranking(numbers)[:MAX_LINES]))
        if group.last_t >= 1 and (group.counted_runs[0].stage > 0).any()
    ]
    if comparison.is_vision or not groups:
        return None
    figure, panels = new_figure(3)
    handles: list[Line2D] = []
    waits = waits_of(groups)
    drawn_x: list[list[float]] = [[], [], []]
    drawn_y: list[float] = []
    looks: dict[tuple[str, str], int] = {}
    for group in groups:
        averages = np.stack([geometric_average(run.quality[: group.last_t + 1]) for run in group.counted_runs])
        trained = group.counted_runs[0].stage[: group.last_t + 1] > 0
        mean, error = averages.mean(axis=0), standard_error(averages)
        num_experts = group.mean_column("num_experts") * group.mean_column("num_members")
        costs = (np.cumsum(group.mean_column("train_flops")), group.mean_column("num_params"), num_experts)
        dashes = dashes_of(group.wait_text, waits)
        # Groups of one learner and wait have the same colour, marker and dashes. The filling of the markers differs.
        fill = marker_fill(group.learner, looks.get((group.learner, group.wait_text), 0))
        looks[group.learner, group.wait_text] = looks.get((group.learner, group.wait_text), 0) + 1
        for axes, cost, values in zip(panels, costs, drawn_x, strict=True):
            _draw_growing_markers(
                axes, cost[trained], mean[trained], None if error is None else error[trained], group.learner, dashes,
                fill,
            )  # fmt: skip
            values += cost[trained][np.isfinite(cost[trained])].tolist()
        drawn_y += mean[trained].tolist()
        handles.append(legend_entry(comparison, group, dashes, fill))
    x_labels = ("training FLOPs so far", "parameters", "experts of all members")
    for axes, values, label in zip(panels, drawn_x, x_labels, strict=True):
        scale_axis(axes, "x", values)
        scale_axis(axes, "y", drawn_y)
        axes.set_xlabel(label, fontsize=9)
    panels[0].set_ylabel("test perplexity so far, geometric mean", fontsize=9)
    add_legend(figure, handles[: MAX_LINES // 2])
    add_note(
        figure,
        "averages over all arrivals so far: until the first stage, an arrival is charged the untrained perplexity; one "
        "marker per arrival from the first stage on, larger markers are later",
    )
    return figure


def on_tasks(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the perplexity and the score on each task after each arrival, one panel for each. None without tasks.

    A curve has a marker at each arrival whose stage was evaluated in all seeds. Only the best runs by validation that
    have a score are drawn.
    """
    shown = [
        group
        for group in (comparison.groups[i] for i in ranking(numbers))
        if group.last_t >= 1 and any(run.task_scores for run in group.counted_runs)
    ][: MAX_LINES // 2]
    tasks = sorted({task for group in shown for run in group.counted_runs for task in run.task_scores})
    if not tasks:
        return None
    names = ["test perplexity", *tasks[: MAX_PANELS - 1]]
    figure, panels = new_figure(len(names), share_y=False)
    waits = waits_of(shown)
    looks: dict[tuple[str, str], int] = {}
    handles: list[Line2D] = []
    for group in shown:
        dashes, look = dashes_of(group.wait_text, waits), (group.learner, group.wait_text)
        fill = marker_fill(group.learner, looks.get(look, 0))
        looks[look] = looks.get(look, 0) + 1
        end = group.last_t + 1
        for axes, name in zip(panels, names, strict=False):
            unknown = np.full(end, np.nan)
            values = np.stack([
                run.quality[:end] if name == names[0] else run.task_scores.get(name, unknown)[:end]
                for run in group.counted_runs
            ])  # fmt: skip
            known = np.isfinite(values).all(axis=0) & (group.counted_runs[0].stage[:end] > 0)
            times, error = np.flatnonzero(known), standard_error(values[:, known])
            if len(times):
                style = appearance_of(group.learner)
                axes.errorbar(
                    times, values[:, known].mean(axis=0), yerr=error, color=style.colour, linestyle=dashes,
                    linewidth=1.3, marker=style.marker, markersize=4, markerfacecolor=fill, capsize=2,
                )  # fmt: skip
        handles.append(legend_entry(comparison, group, dashes, fill))
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(textwrap.fill(name, MAX_TITLE), fontsize=9)
        axes.set_xlabel("mega-batches arrived", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    add_legend(figure, handles)
    return figure


def geometric_average(quality: np.ndarray) -> np.ndarray:
    """Return the geometric mean of the perplexities from 1 to t, for each arrival t: [B + 1] -> [B + 1]; NaN at 0."""
    averages = np.full(len(quality), np.nan)
    averages[1:] = np.exp(np.cumsum(np.log(quality[1:])) / np.arange(1, len(quality)))
    return averages


def _draw_growing_markers(
    axes: Axes, x: np.ndarray, y: np.ndarray, error: np.ndarray | None, learner: str, dashes: object, fill: str
) -> None:
    """Draw a line with one marker per arrival, filled with the colour `fill`. Markers of later arrivals are larger."""
    style = appearance_of(learner)
    axes.plot(x, y, color=style.colour, linestyle=dashes, linewidth=1)
    if error is not None:
        axes.errorbar(x, y, yerr=error, color=style.colour, fmt="none", capsize=2, linewidth=1)
    axes.scatter(
        x, y, s=np.linspace(10, 40, len(x)), facecolor=fill, edgecolor=style.colour, linewidth=1, marker=style.marker,
        zorder=3,
    )  # fmt: skip
