"""What several figure modules use: colours and markers of learners, line styles of waits, panels, axes, legends, notes.

`APPEARANCES` is the only list of learners in the report. A test checks that it contains every learner of the catalogue
(core/catalogue.py). A learner that a plugin adds is not in this list. It gets a colour that depends on its name.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fairseq_alma.core import catalogue
from fairseq_alma.report.numbers import Numbers, ranking
from fairseq_alma.report.runs import Comparison, RunGroup, learner_position, waits_of

WIDTH = 3.4
"""Width of a panel in inches. Two panels fit side by side on a page."""
HEIGHT = 2.9
"""Height of a panel in inches."""
MAX_PANELS = 12
"""Maximum number of panels in a figure."""
MAX_GROUPS = 4
"""Maximum number of groups of runs in a figure with one row per group. Also the maximum number of routing maps."""
MAX_LINES = 40
"""Maximum number of curves in a panel. The page (index.html) shows all curves."""
FEW_ARRIVALS = 12
"""A curve has a marker at each arrival if the stream has at most this many mega-batches."""


@dataclass(frozen=True)
class Appearance:
    """The colour and the markers of the points and curves of one learner."""

    colour: str
    marker: str
    """The matplotlib name of the marker in figures."""
    symbol: str
    """The plotly name of the marker on the page, which has the same shape."""


# The first six colours are from the palette of Okabe and Ito. Its yellow is not used, because it is hard to see in
# print. The last three colours are from Paul Tol. The markers also differ, for colour-blind readers and for prints in
# black and white.
APPEARANCES = {
    "sm": Appearance("#0072B2", "o", "circle"),
    "ens": Appearance("#D55E00", "s", "square"),
    "umix": Appearance("#009E73", "^", "triangle-up"),
    "gens": Appearance("#CC79A7", "D", "diamond"),
    "gmoe": Appearance("#E69F00", "v", "triangle-down"),
    "ff": Appearance("#56B4E9", "P", "cross"),
    "moe": Appearance("#882255", "X", "x"),
    "gmoe_flat": Appearance("#999933", "<", "triangle-left"),
    "ens_moe": Appearance("#332288", ">", "triangle-right"),
}
# The colours for learners that plugins add. The name of a learner determines the colour of the learner.
_COLOURS_OF_PLUGINS = ("#000000", "#117733", "#661100", "#777777")

MATPLOTLIB_DASHES: tuple = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))
PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Line styles in figures and on the page: the line style of a curve shows its wait."""


def appearance_of(learner: str) -> Appearance:
    """Return the colour and the markers of a learner.

    If `APPEARANCES` does not contain the learner, its marker is a star, and its colour depends on its name.
    """
    if learner in APPEARANCES:
        return APPEARANCES[learner]
    colour = _COLOURS_OF_PLUGINS[sum(learner.encode()) % len(_COLOURS_OF_PLUGINS)]
    return Appearance(colour, "*", "star")


def dashes_of(wait: str, waits: Sequence[str], styles: Sequence[Any] = MATPLOTLIB_DASHES) -> Any:
    """Return the line style that shows a wait, one of `waits`. If there are more waits than styles, styles repeat."""
    return styles[waits.index(wait) % len(styles)]


def best_by_validation(indices: Collection[int], numbers: Sequence[Numbers]) -> list[int]:
    """Return those of some groups with the best validation scores, the best first: at most MAX_GROUPS."""
    return [index for index in ranking(numbers) if index in indices][:MAX_GROUPS]


def new_figure(num_panels: int, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a new figure and its panels. A row has at most four panels. By default, all have the same y axis."""
    columns = min(4, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(WIDTH * columns + 0.8, HEIGHT * rows + 0.6), layout="constrained", dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flatten().tolist()
    for unused in panels[num_panels:]:
        unused.set_axis_off()
    for axes in panels[:num_panels]:
        axes.grid(which="both", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, panels[:num_panels]


def scale_axis(axes: Axes, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """Label an axis with round numbers. It is logarithmic if its largest value is at least three times the smallest.

    `values` are all values that are drawn along the axis. Values <= 0, NaN and infinity are ignored.
    """
    positive = [value for value in values if value > 0 and value != float("inf")]
    axis = axes.xaxis if which == "x" else axes.yaxis
    if not positive:
        return
    ratio = max(positive) / min(positive)
    if ratio < 3:
        axis.set_major_locator(MaxNLocator(4 if which == "x" else 5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value)))
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    # Label the axis at 1, 2, 5, 10, 20, ... If the largest value is at least 300 times the smallest, these would be too
    # many labels, so label the axis only at 1, 10, 100, ...
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 300 else (1.0,)))
    # Minor ticks at 2, 3, ... 9, 20, ..., whose distances show that the axis is logarithmic.
    axis.set_minor_locator(LogLocator(subs=tuple(range(2, 10)), numticks=100))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value)))


def spread_labels(axes: Axes, height_points: float = 8.0) -> None:
    """Move the annotations at the ends of curves apart, by at least `height_points`. Scale the axes before."""
    panel_points = HEIGHT * 72 * 0.75  # approximately: the layout is computed when the figure is written
    labels = []
    for text in axes.texts:
        if isinstance(text, Annotation):
            pixels = axes.transData.transform(text.xy)
            labels.append((float(axes.transAxes.inverted().transform(pixels)[1]) * panel_points, text))
    lowest = -float("inf")
    for position, text in sorted(labels, key=lambda label: label[0]):
        placed = max(position, lowest + height_points)
        text.set_position((text.get_position()[0], placed - position))
        lowest = placed


def name_logarithmic_axes(figure: Figure) -> None:
    """Add "(log)" to the label of each axis that is logarithmic and has a label."""
    for axes in figure.axes:
        if axes.get_xscale() == "log" and axes.get_xlabel():
            axes.set_xlabel(f"{axes.get_xlabel()} (log)")
        if axes.get_yscale() == "log" and axes.get_ylabel():
            axes.set_ylabel(f"{axes.get_ylabel()} (log)")


def with_unit(value: float) -> str:
    """Return a number as text, such as `2.3k` or `65M`. For a number below 1000, no letter is added, as in `0.07`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def add_learners_and_waits(figure: Figure, groups: Sequence[RunGroup], dashed_waits: bool = True) -> None:
    """Add a legend with the colour and marker of each learner and, if `dashed_waits`, the line style of each wait."""
    learners = sorted({group.learner for group in groups}, key=lambda name: (learner_position(name), name))
    handles = []
    for name in learners:
        style = appearance_of(name)
        label = catalogue.label_of(name)
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, markersize=4, label=label))
    waits = waits_of(groups)
    if dashed_waits and len(waits) > 1:
        for wait in waits:
            dashes = dashes_of(wait, waits)
            handles.append(Line2D([], [], color="#444444", linestyle=dashes, label=f"wait {wait}"))
    elif dashed_waits:
        handles.append(Line2D([], [], color="none", label=f"wait {waits[0]}"))
    add_legend(figure, handles)


def marker_fill(learner: str, number: int) -> str:
    """Return the colour inside the markers of the curve `number` of a learner. It tells up to four curves apart."""
    colour = appearance_of(learner).colour
    half = "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
    return (colour, "#ffffff", half, "#000000")[number % 4]


def legend_entry(comparison: Comparison, group: RunGroup, dashes: Any = "-", fill: str | None = None) -> Line2D:
    """Return the legend entry of one group of runs: a line with its label, marks, dashes and filling of the marker."""
    style = appearance_of(group.learner)
    return Line2D(
        [], [], color=style.colour, marker=style.marker, markersize=4, linestyle=dashes, markerfacecolor=fill,
        label=comparison.label_of(group),
    )  # fmt: skip


def add_legend(figure: Figure, handles: Sequence[Line2D]) -> Legend:
    """Add a legend with the entries `handles` to the right of the panels. Return the legend."""
    return figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False, handlelength=3)


def add_note(figure: Figure, text: str) -> None:
    """Write a small note below the panels."""
    figure.supxlabel(text, fontsize=7, color="#555555")


def note_left_out(figure: Figure, count: int) -> None:
    """Add a note that says that the figure leaves out `count` groups of runs. Do nothing if `count` is 0."""
    if count:
        add_note(figure, f"only the best runs by validation are shown; {count} runs are left out")


def quality_label(comparison: Comparison) -> str:
    """Return the axis label for the quality over the complete stream: CER or average perplexity."""
    if comparison.is_vision:
        return f"CER over {comparison.num_arrivals} mega-batches"
    return "average test perplexity"
