"""Quality over the stream against what it cost (figures 2, 7), and what replay did to both (figures 4, 8)."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_alma.report.figures.curves import panels_of
from fairseq_alma.report.figures.style import (
    colour_of,
    legends,
    line_of,
    log_axis,
    mark_of,
    new_figure,
    note_left_out,
    quality_label,
    waits_of,
)
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, Run

SIZES = ("width", "arch", "experts", "members")
"""Points that differ in these alone are joined."""

MOST_POINTS = 400
"""Of a panel."""


def against_compute(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """CER or average perplexity against cumulative training TFLOPs, points joined over sizes."""
    return _tradeoff(comparison, numbers, lambda one: one.comp / 1e12, "training TFLOPs over the stream")


def against_parameters(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """The same against the number of parameters after the last arrival."""
    return _tradeoff(comparison, numbers, lambda one: one.num_params, "parameters after the last mega-batch")


def _tradeoff(
    comparison: Comparison, numbers: Sequence[Numbers], x_of: Callable[[Numbers], float], x_label: str
) -> Figure | None:
    panels, of_run, num_left_out = _finished(comparison, numbers, ("learner", "wait", *SIZES))
    if not panels:
        return None
    figure, axes_of_panels = new_figure(len(panels))
    drawn = [run for runs in panels.values() for run in runs]
    waits = waits_of(drawn)
    for axes, (title, runs) in zip(axes_of_panels, panels.items(), strict=True):
        for series in series_of(runs):
            points = sorted(((x_of(of_run[id(run)]), of_run[id(run)]) for run in series), key=lambda point: point[0])
            _errorbars(axes, points, series[0], line_of(series[0].wait, waits))
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(x_label, fontsize=9)
        log_axis(axes, "x", [x_of(of_run[id(run)]) for run in drawn])
    _of_quality(axes_of_panels, comparison, [of_run[id(run)] for run in drawn])
    legends(figure, drawn)
    note_left_out(figure, num_left_out)
    return figure


def against_wait(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """CER or average perplexity against the wait, learner by learner: what waiting costs and brings."""
    panels, of_run, num_left_out = _finished(comparison, numbers, ("learner", "wait"))
    panels = {title: runs for title, runs in panels.items() if len(waits_of(runs)) > 1}
    if not panels:
        return None
    figure, axes_of_panels = new_figure(len(panels))
    drawn = [run for runs in panels.values() for run in runs]
    waits = waits_of(drawn)
    for axes, (title, runs) in zip(axes_of_panels, panels.items(), strict=True):
        for learner in dict.fromkeys(run.learner for run in runs):
            mine = sorted((run for run in runs if run.learner == learner), key=lambda run: run.wait)
            _errorbars(axes, [(run.wait, of_run[id(run)]) for run in mine], mine[0], "-")
        log_axis(axes, "x", waits)
        if len(waits) <= 8:
            axes.set_xticks(waits, [str(wait) for wait in waits])
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("wait, mega-batches", fontsize=9)
    _of_quality(axes_of_panels, comparison, [of_run[id(run)] for run in drawn])
    legends(figure, drawn, lines_by_wait=False)
    note_left_out(figure, num_left_out)
    return figure


def _finished(
    comparison: Comparison, numbers: Sequence[Numbers], on_a_line: Sequence[str]
) -> tuple[dict[str, list[Run]], dict[int, Numbers], int]:
    """(panels of the runs that have come to a number, id of a run -> its numbers, how many were left out)."""
    of_run = {id(run): one for run, one in zip(comparison.runs, numbers, strict=True) if one.quality}
    panels, num_left_out = panels_of(comparison, numbers, on_a_line, MOST_POINTS)
    finished = {title: [run for run in runs if id(run) in of_run] for title, runs in panels.items()}
    return {title: runs for title, runs in finished.items() if runs}, of_run, num_left_out


def _of_quality(panels: Sequence[Axes], comparison: Comparison, shown: Sequence[Numbers]) -> None:
    """Upwards: CER or average perplexity, in all panels alike."""
    for axes in panels:
        log_axis(axes, "y", [_quality(one) for one in shown])
    panels[0].set_ylabel(quality_label(comparison), fontsize=9)


def series_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one learner and wait that differ in size alone."""
    series: dict[tuple, list[Run]] = {}
    for run in runs:
        passed = (*SIZES, "grow_every", "grow_experts")  # these have a panel of their own where they are a choice
        key = tuple((name, repr(value)) for name, value in sorted(run.settings.items()) if name not in passed)
        series.setdefault((*key, run.learner), []).append(run)
    return list(series.values())


def replay_segments(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """From each run without replay to the same with it: what was paid, and what it bought."""
    pairs = replay_pairs(comparison, numbers)
    if not pairs:
        return None
    figure, [axes] = new_figure(1)
    axes.set_box_aspect(0.8)
    waits = waits_of([without for without, _, _, _ in pairs])
    for without, start, end, _ in pairs:
        colour = colour_of(without.learner)
        xs, ys = [start.comp / 1e12, end.comp / 1e12], [_quality(start), _quality(end)]
        axes.plot(xs, ys, color=colour, linestyle=line_of(without.wait, waits), linewidth=1.2)
        for x, y, one, filled in ((xs[0], ys[0], start, False), (xs[1], ys[1], end, True)):
            axes.errorbar(
                x, y, yerr=_stderr(one), fmt=mark_of(without.learner), color=colour, capsize=2, markersize=5,
                markerfacecolor=colour if filled else "white",
            )  # fmt: skip
    log_axis(axes, "x", [one.comp / 1e12 for _, start, end, _ in pairs for one in (start, end)])
    log_axis(axes, "y", [_quality(one) for _, start, end, _ in pairs for one in (start, end)])
    axes.set_xlabel("training TFLOPs over the stream", fontsize=9)
    axes.set_ylabel(quality_label(comparison), fontsize=9)
    legends(figure, [without for without, _, _, _ in pairs])
    handles = [
        Line2D([], [], color="#444444", marker="o", markerfacecolor="white", linestyle="", label="without replay"),
        Line2D([], [], color="#444444", marker="o", linestyle="", label="with replay"),
    ]
    axes.legend(handles=handles, fontsize=8, frameon=False)
    return figure


def replay_pairs(
    comparison: Comparison, numbers: Sequence[Numbers]
) -> list[tuple[Run, Numbers, Numbers, Any]]:  # fmt: skip
    """(the run without, its numbers, those with replay, which replay), all else the same."""
    without: dict[tuple, tuple[Run, Numbers]] = {}
    for run, one in zip(comparison.runs, numbers, strict=True):
        if not run.replay and one.quality:
            without[_but_replay(run)] = (run, one)
    pairs = []
    for run, one in zip(comparison.runs, numbers, strict=True):
        if run.replay and one.quality and (before := without.get(_but_replay(run))):
            pairs.append((*before, one, run.replay))
    return pairs


def _but_replay(run: Run) -> tuple:
    return tuple((name, repr(value)) for name, value in sorted(run.settings.items()) if name != "replay")


def _errorbars(axes: Axes, points: Sequence[tuple[float, Numbers]], run: Run, dashes: object) -> None:
    has_error = any(one.quality and one.quality.stderr is not None for _, one in points)
    axes.errorbar(
        [x for x, _ in points], [_quality(one) for _, one in points],
        yerr=[_stderr(one) for _, one in points] if has_error else None,
        color=colour_of(run.learner), marker=mark_of(run.learner), linestyle=dashes, linewidth=1.1, markersize=4,
        capsize=2,
    )  # fmt: skip


def _quality(one: Numbers) -> float:
    assert one.quality is not None
    return one.quality.mean


def _stderr(one: Numbers) -> float:
    assert one.quality is not None
    return one.quality.stderr or 0.0
