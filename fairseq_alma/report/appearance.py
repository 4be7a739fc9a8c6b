"""Colours and markers of learners, and one line style for each wait. The figures and the page of the report use them.

The wait is the number of mega-batches that a learner gathers before it trains on them.

`APPEARANCES` is the only list of learners in the report. A test checks that it contains every learner of the catalogue
(core/catalogue.py). A learner that a plugin adds is not in this list. It gets a colour that depends on its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FEW_ARRIVALS = 12
"""A curve has a marker at each arrival if the stream has at most this many mega-batches."""


@dataclass(frozen=True)
class Appearance:
    """The colour and the markers of the points and curves of one learner."""

    colour: str
    marker: str
    """The matplotlib name of the marker in figures."""
    symbol: str
    """The plotly name of the marker on the page.

    The marker has the same shape as `marker`, if plotly has a marker of this shape.
    """


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

# The line style of a curve shows the wait of the learner. _MATPLOTLIB_DASHES contains the line styles in figures, and
# _PLOTLY_DASHES those on the page. For example, the matplotlib style (0, (1, 3)) starts at offset 0 and repeats a dash
# of length 1 and a gap of length 3.
_MATPLOTLIB_DASHES: tuple = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))
_PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def appearance_of(learner: str) -> Appearance:
    """Return the colour and the markers of a learner.

    If `APPEARANCES` does not contain the learner, its marker is a star, and its colour depends on its name.
    """
    if learner in APPEARANCES:
        return APPEARANCES[learner]
    colour = _COLOURS_OF_PLUGINS[sum(learner.encode()) % len(_COLOURS_OF_PLUGINS)]
    return Appearance(colour, "*", "star")


def matplotlib_dashes(wait: str, waits: Sequence[str]) -> Any:
    """Return the matplotlib line style that shows a wait.

    There are six styles. The first six waits in `waits` have different styles; for further waits, the styles repeat.

    Args:
        wait: the wait of a curve, one of `waits`.
        waits: all waits in the figure or on the page.
    """
    return _MATPLOTLIB_DASHES[waits.index(wait) % len(_MATPLOTLIB_DASHES)]


def plotly_dashes(wait: str, waits: Sequence[str]) -> str:
    """Return the plotly line style that shows a wait.

    There are six styles. The first six waits in `waits` have different styles; for further waits, the styles repeat.

    Args:
        wait: the wait of a curve, one of `waits`.
        waits: all waits in the figure or on the page.
    """
    return _PLOTLY_DASHES[waits.index(wait) % len(_PLOTLY_DASHES)]
