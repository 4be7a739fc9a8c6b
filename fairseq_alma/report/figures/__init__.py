"""Figures like those of the paper, drawn with matplotlib.

Each module draws one kind of figure. `FIGURES` lists the functions that draw them. In the figures, "run" means a group:
runs with equal settings and several seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from matplotlib import rc_context
from matplotlib.figure import Figure

from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures.arrivals import forgetting
from fairseq_alma.report.figures.curves import on_tasks, over_the_stream, running_averages
from fairseq_alma.report.figures.maps import error_maps, expert_loads, perplexities_by_period
from fairseq_alma.report.figures.radar import radar
from fairseq_alma.report.figures.routing import routing_maps
from fairseq_alma.report.figures.style import name_logarithmic_axes
from fairseq_alma.report.figures.tradeoffs import (
    against_compute,
    against_parameters,
    against_wait,
    replay_segments,
)
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison

FIGURES: dict[str, Callable[[Comparison, Sequence[Numbers]], Figure | None]] = {
    "over_the_stream": over_the_stream,
    "against_wait": against_wait,
    "against_compute": against_compute,
    "against_parameters": against_parameters,
    "replay": replay_segments,
    "running_average": running_averages,
    "tasks": on_tasks,
    "radar": radar,
    "expert_load": expert_loads,
    "periods": perplexities_by_period,
    "forgetting": forgetting,
}
"""The figures of a report: file name without suffix -> function that draws the figure, or returns None if there is
nothing to draw. `routing_maps` and `error_maps` are not in this list, because they make one figure for each of several
groups."""


def figures_or_errors(comparison: Comparison, numbers: Sequence[Numbers]) -> Iterator[tuple[str, Figure | RunError]]:
    """Yield (file name without suffix, figure) for every figure that is not empty.

    If the data file of a map, routing.npz or errors.jsonl, is damaged, yield (file name, RunError) for this map.
    """
    drawings: list[tuple[str, Callable[[], Figure | None]]]
    drawings = [(name, partial(draw, comparison, numbers)) for name, draw in FIGURES.items()]
    for name, draw in (*drawings, *routing_maps(comparison, numbers), *error_maps(comparison, numbers)):
        try:
            with rc_context({"text.parse_math": False}):  # draw dollar signs as they are, not as formulas
                figure = draw()
        except RunError as error:
            yield name, error
            continue
        if figure:
            if name in FIGURES:
                name_logarithmic_axes(figure)
            yield name, figure
