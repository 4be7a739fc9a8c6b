"""Learners by colour and mark, waits by line style, as in the paper; readable in print and by colour-blind readers."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fairseq_alma.report.runs import LEARNERS, Comparison, Run

# Okabe and Ito's palette without its yellow, which print loses; then three of Tol's.
_COLOURS = {
    "sm": "#0072B2", "ens": "#D55E00", "umix": "#009E73", "gens": "#CC79A7", "gmoe": "#E69F00", "ff": "#56B4E9",
    "moe": "#882255", "gmoe_flat": "#999933", "ens_moe": "#332288",
}  # fmt: skip
_MARKS = {
    "sm": "o", "ens": "s", "umix": "^", "gens": "D", "gmoe": "v", "ff": "P", "moe": "X",
    "gmoe_flat": "<", "ens_moe": ">",
}  # fmt: skip
_OTHER_COLOURS = ("#000000", "#117733", "#661100", "#777777")
_LINES: tuple = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))
WIDTH = 3.4
"""Of a panel, in inches: two fit a column of print."""
HEIGHT = 2.9
FEW_ARRIVALS = 12
"""Up to so many each arrival has a mark."""
MOST_PANELS = 12
MOST_LINES = 40
"""Of one figure; what is left out is said below it, and the page has all."""


def colour_of(learner: str) -> str:
    if learner in _COLOURS:
        return _COLOURS[learner]
    return _OTHER_COLOURS[sum(learner.encode()) % len(_OTHER_COLOURS)]


def mark_of(learner: str) -> str:
    return _MARKS.get(learner, "*")


def line_of(wait: int, waits: Sequence[int]) -> Any:
    """The dashes of a wait, among all waits of a comparison in order."""
    return _LINES[waits.index(wait) % len(_LINES)]


def waits_of(runs: Iterable[Run]) -> list[int]:
    return sorted({run.wait for run in runs})


def new_figure(num_panels: int, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """Panels side by side, at most four a row."""
    columns = min(4, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(WIDTH * columns + 0.8, HEIGHT * rows + 0.6), layout="constrained", dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flatten().tolist()
    for spare in panels[num_panels:]:
        spare.set_axis_off()
    for axes in panels[:num_panels]:
        axes.grid(which="both", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, panels[:num_panels]


def log_axis(axes: Axes, which: str, values: Iterable[float]) -> None:
    """Logarithmic where the values ask for it, with numbers that people read."""
    positive = [value for value in values if value > 0 and value != float("inf")]
    axis = axes.xaxis if which == "x" else axes.yaxis
    if not positive:
        return
    ratio = max(positive) / min(positive)
    if ratio < 3:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 300 else (1.0,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: readable(value)))


def readable(value: float) -> str:
    """`2.3k`, `65M`, `0.07`."""
    for size, unit in ((1e15, "e15"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and unit != "e15":
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def legends(figure: Figure, runs: Sequence[Run], lines_by_wait: bool = True) -> None:
    """Learners by colour, then waits by dashes, beside the panels."""
    learners = sorted({run.learner for run in runs}, key=lambda name: (list(LEARNERS) + [name]).index(name))
    handles = [
        Line2D([], [], color=colour_of(name), marker=mark_of(name), markersize=4, label=LEARNERS.get(name, name))
        for name in learners
    ]
    waits = waits_of(runs)
    if lines_by_wait and len(waits) > 1:
        handles += [Line2D([], [], color="#444444", linestyle=line_of(w, waits), label=f"wait {w}") for w in waits]
    elif lines_by_wait:
        handles.append(Line2D([], [], color="none", label=f"wait {waits[0]}"))
    add_legend(figure, handles)


def add_legend(figure: Figure, handles: Sequence[Line2D]) -> Legend:
    return figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False, handlelength=3)


def note_below(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=7, color="#555555")


def note_left_out(figure: Figure, count: int) -> None:
    """Nothing, if none was."""
    if count:
        note_below(figure, f"the best by validation; {count} runs are not shown")


def quality_label(comparison: Comparison) -> str:
    """Of what is summed up over the stream."""
    if comparison.is_vision:
        return f"CER over {comparison.num_arrivals} mega-batches"
    return "average test perplexity"
