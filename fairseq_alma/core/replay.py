"""The setting `replay`, and the share that `replay=auto` chooses."""

from typing import Literal

Replay = Literal[False, "all", "uniform", "auto"] | float
"""Type of the setting `replay`. `StreamSettings.replay` describes the meaning."""

LEAST_SHARE = 0.5
"""The share with few passes: with one to five passes over the new text, no other one was clearly better in any order of
the text (results/frontier/replay.md)."""
MOST_PASSES = 2.5
"""How often a stage reads its new text at most. With ten passes, a share of 0.75 was the best, with 20 one of 0.875
(results/frontier/replay.md and replay_books.md)."""


def auto_share(passes: float) -> float:
    """Return the part of each batch that `replay=auto` takes from earlier mega-batches.

    `passes` is how often the updates of the stage would read its new text if they read no other.
    """
    return max(LEAST_SHARE, 1 - MOST_PASSES / passes)
