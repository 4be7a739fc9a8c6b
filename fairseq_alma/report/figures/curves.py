"""Error rate or perplexity over the stream (figures 1, 3, 7, 9), and running averages against cost (figure 5)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fairseq_alma.report.figures.style import (
    FEW_ARRIVALS,
    MOST_LINES,
    MOST_PANELS,
    add_legend,
    colour_of,
    legends,
    line_of,
    log_axis,
    mark_of,
    new_figure,
    note_below,
    note_left_out,
    waits_of,
)
from fairseq_alma.report.numbers import Numbers, running_average, standard_error
from fairseq_alma.report.runs import Comparison, Run, label_of

_ON_A_LINE = ("learner", "wait")
"""What colour and dashes tell; what else differs makes a panel of its own."""


def panels_of(
    comparison: Comparison,
    numbers: Sequence[Numbers],
    on_a_line: Sequence[str] = _ON_A_LINE,
    most: int = MOST_LINES,
) -> tuple[dict[str, list[Run]], int]:
    """(title of a panel -> its runs, how many were left out). Of too many the best by validation are shown."""
    of_growth = [name for name in ("grow_every", "grow_experts") if comparison.is_told_by_wait(name)]
    rest = [name for name in comparison.varied if name not in (*on_a_line, *of_growth)]
    panels: dict[str, list[tuple[float, Run]]] = {}
    for run, one in zip(comparison.runs, numbers, strict=True):
        if run.last_t < 1:
            continue
        title = _title(run, rest)
        score = one.validation_score if one.validation_score is not None else float("inf")
        panels.setdefault(title, []).append((score, run))
    kept = sorted(panels, key=lambda title: min(score for score, _ in panels[title]))[:MOST_PANELS]
    shown, num_shown = {}, 0
    for title in panels:  # in the order of the comparison
        if title in kept:
            best = sorted(panels[title], key=lambda item: item[0])[:most]
            shown[title] = [run for run in comparison.runs if any(run is other for _, other in best)]
            num_shown += len(best)
    return shown, sum(map(len, panels.values())) - num_shown


def _title(run: Run, names: Sequence[str]) -> str:
    """As label_of, without the learner's name; what a learner does not take is left out."""
    return label_of(run, names).partition(", ")[2]


def over_the_stream(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """What each run scores after each arrival; standard errors over seeds as bands.

    A perplexity is drawn from the first stage on: untrained it is near the size of the vocabulary. An error rate is
    drawn from t = 0 on: that is what waiting costs.
    """
    panels, num_left_out = panels_of(comparison, numbers)
    if not panels:
        return None
    figure, axes_of_panels = new_figure(len(panels))
    waits = waits_of(comparison.runs)
    scale = 100.0 if comparison.is_vision else 1.0
    everything: list[float] = []
    for axes, (title, runs) in zip(axes_of_panels, panels.items(), strict=True):
        for run in runs:
            values = scale * run.stacked("quality")
            from_t = 0
            if not comparison.is_vision:
                trained = np.flatnonzero(run.counted[0].stage[: run.last_t + 1] > 0)
                if not len(trained):
                    continue
                from_t = int(trained[0])
            times = np.arange(from_t, run.last_t + 1)
            mean, error = values[:, from_t:].mean(axis=0), standard_error(values[:, from_t:])
            colour = colour_of(run.learner)
            few = comparison.num_arrivals <= FEW_ARRIVALS
            axes.plot(
                times, mean, color=colour, linestyle=line_of(run.wait, waits), linewidth=1.3,
                drawstyle="default" if few else "steps-post",
                marker=mark_of(run.learner) if few else None, markersize=4,
            )  # fmt: skip
            if not few:  # where it ends: what waits for everything is a point there
                axes.plot(times[-1], mean[-1], mark_of(run.learner), color=colour, markersize=4, clip_on=False)
            if error is not None:
                axes.fill_between(
                    times, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0,
                    step=None if few else "post",
                )  # fmt: skip
            everything += mean[np.isfinite(mean)].tolist()
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("mega-batches arrived", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in axes_of_panels:
        log_axis(axes, "y", everything)
    axes_of_panels[0].set_ylabel("test error, %" if comparison.is_vision else "test perplexity", fontsize=9)
    legends(figure, [run for runs in panels.values() for run in runs])
    note_left_out(figure, num_left_out)
    return figure


def running_averages(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Average perplexity so far against training TFLOPs so far, parameters and experts (figure 5)."""
    runs = [run for run in comparison.runs if run.last_t >= 1 and (run.counted[0].stage > 0).any()]
    if comparison.is_vision or not runs:
        return None
    best = sorted(range(len(comparison.runs)), key=lambda i: numbers[i].validation_score or float("inf"))[:MOST_LINES]
    shown = [run for i, run in enumerate(comparison.runs) if i in best and any(run is other for other in runs)]
    figure, panels = new_figure(3)
    handles: list[Line2D] = []
    waits = waits_of(shown)
    xs: list[list[float]] = [[], [], []]
    ys: list[float] = []
    for run in shown:
        averages = np.stack(
            [running_average(s.quality[: run.last_t + 1], s.stage[: run.last_t + 1]) for s in run.counted]
        )
        trained = ~np.isnan(averages[0])
        mean, error = averages.mean(axis=0), standard_error(averages)
        experts = run.mean("num_experts") * run.mean("num_members")
        for number, x in enumerate((np.cumsum(run.mean("train_flops")) / 1e12, run.mean("num_params"), experts)):
            _points(panels[number], x[trained], mean[trained], None if error is None else error[trained], run, waits)
            xs[number] += x[trained][np.isfinite(x[trained])].tolist()
        ys += mean[trained].tolist()
        label = label_of(run, comparison.varied)
        handles.append(
            Line2D([], [], color=colour_of(run.learner), marker=mark_of(run.learner), markersize=4,
                   linestyle=line_of(run.wait, waits), label=label)
        )  # fmt: skip
    for axes, values, label in zip(
        panels, xs, ("training TFLOPs so far", "parameters", "experts, of all members"), strict=True
    ):
        log_axis(axes, "x", values)
        log_axis(axes, "y", ys)
        axes.set_xlabel(label, fontsize=9)
    panels[0].set_ylabel("average test perplexity so far", fontsize=9)
    add_legend(figure, handles[: MOST_LINES // 2])
    note_below(figure, "averages begin with the first stage; marks are arrivals, larger is later")
    return figure


def _points(axes: Axes, x: np.ndarray, y: np.ndarray, error: np.ndarray | None, run: Run, waits: Sequence[int]) -> None:
    """A line with marks that grow with time."""
    colour = colour_of(run.learner)
    axes.plot(x, y, color=colour, linestyle=line_of(run.wait, waits), linewidth=1)
    if error is not None:
        axes.errorbar(x, y, yerr=error, color=colour, fmt="none", capsize=2, linewidth=1)
    axes.scatter(x, y, s=np.linspace(10, 40, len(x)), color=colour, marker=mark_of(run.learner), zorder=3)
