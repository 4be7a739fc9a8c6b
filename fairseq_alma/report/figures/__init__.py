"""The paper's figures, as matplotlib figures. Each module draws one kind; `all_figures` knows them all."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures.curves import over_the_stream, running_averages
from fairseq_alma.report.figures.experts import expert_loads, routing_maps
from fairseq_alma.report.figures.radar import radar
from fairseq_alma.report.figures.tradeoffs import (
    against_compute,
    against_parameters,
    against_wait,
    replay_segments,
)
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison

Drawing = Callable[[Comparison, Sequence[Numbers]], Figure | None]

FIGURES: dict[str, Drawing] = {
    "over_the_stream": over_the_stream,
    "against_wait": against_wait,
    "against_compute": against_compute,
    "against_parameters": against_parameters,
    "replay": replay_segments,
    "running_average": running_averages,
    "radar": radar,
    "expert_load": expert_loads,
}
"""Name of the file -> what draws it; None where these runs have nothing for it."""


def all_figures(comparison: Comparison, numbers: Sequence[Numbers]) -> Iterator[tuple[str, Figure]]:
    """(name of the file, figure), one at a time.

    Raises:
        RunError: a routing file is damaged; `figures_or_faults` goes on.
    """
    for name, figure in figures_or_faults(comparison, numbers):
        if isinstance(figure, RunError):
            raise figure
        yield name, figure


def figures_or_faults(
    comparison: Comparison, numbers: Sequence[Numbers]
) -> Iterator[tuple[str, Figure | RunError]]:  # fmt: skip
    """As all_figures; in place of a figure that cannot be drawn, why."""
    for name, draw in FIGURES.items():
        with rc_context(PLAIN_TEXT):
            figure = draw(comparison, numbers)
        if figure:
            yield name, figure
    for name, draw_map in routing_maps(comparison, numbers):
        try:
            with rc_context(PLAIN_TEXT):
                figure = draw_map()
        except RunError as error:
            yield name, error
        else:
            yield name, figure


PLAIN_TEXT: dict[Any, Any] = {"text.parse_math": False}
"""A setting with dollar signs is no formula."""
