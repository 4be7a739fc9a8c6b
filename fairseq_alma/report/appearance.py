"""Colours and markers of learners, and line styles for each wait, in figures and on the page.

`APPEARANCES` is the only place in the report that lists learners. A test checks that it contains every learner of the
catalogue (core/catalogue.py). A learner that a plugin adds gets a colour that depends on its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FEW_ARRIVALS = 12
"""On a stream with at most this many arrivals, a curve has a marker at each arrival."""


@dataclass(frozen=True)
class Appearance:
    """How points and curves of a learner are drawn."""

    colour: str
    marker: str
    """The matplotlib marker."""
    symbol: str
    """The plotly marker, with the same shape as `marker` if plotly has such a marker."""


# Use the palette of Okabe and Ito without yellow, which is hard to see in print, and then three colours of Paul Tol.
# The markers also differ, for colour-blind readers and for prints in black and white.
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
_COLOURS_OF_PLUGINS = ("#000000", "#117733", "#661100", "#777777")

_MATPLOTLIB_DASHES: tuple = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))
_PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def appearance_of(learner: str) -> Appearance:
    """Return how a learner is drawn. A learner that is not in `APPEARANCES` gets a star and a fixed colour."""
    if learner in APPEARANCES:
        return APPEARANCES[learner]
    colour = _COLOURS_OF_PLUGINS[sum(learner.encode()) % len(_COLOURS_OF_PLUGINS)]
    return Appearance(colour, "*", "star")


def matplotlib_dashes(wait: int, waits: Sequence[int]) -> Any:
    """Return the matplotlib line style of a wait. Each of the first six waits in `waits` has its own style."""
    return _MATPLOTLIB_DASHES[waits.index(wait) % len(_MATPLOTLIB_DASHES)]


def plotly_dashes(wait: int, waits: Sequence[int]) -> str:
    """Return the plotly line style of a wait. Each of the first six waits in `waits` has its own style."""
    return _PLOTLY_DASHES[waits.index(wait) % len(_PLOTLY_DASHES)]
