"""Which run to take: within a budget, on the Pareto front, and against another wait or a learner that grows.

Runs are chosen by validation data alone (numbers.validation_score); the page shows test numbers of what was chosen. The
page computes the front and the choice again when a slider moves: page/page.js has the same few lines, and a test
compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import GROWING, TAKEN_BY, Comparison, Run

Change = Literal["wait", "replay", "growth"]


@dataclass(frozen=True)
class Budget:
    """What may be spent, and what must be reached. None is no limit."""

    comp: float | None = None
    """Training FLOPs over the stream."""
    num_params: float | None = None
    """After the last arrival."""
    final: float | None = None
    """Error rate or perplexity after the last arrival, on validation data."""


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the points that no other beats: less or equal in everything, and less in something."""

    def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def best_within(numbers: Sequence[Numbers], budget: Budget) -> int | None:
    """Index of the run of the lowest validation score that keeps to the budget; None if none does.

    Of equals the one of fewer training FLOPs, then of fewer parameters, then the first.
    """
    keeping = [
        (one.validation_score, one.comp, one.num_params, index)
        for index, one in enumerate(numbers)
        if one.validation_score is not None
        and (budget.comp is None or one.comp <= budget.comp)
        and (budget.num_params is None or one.num_params <= budget.num_params)
        and (
            budget.final is None
            or (one.final_validation is not None and one.final_validation.mean <= budget.final)
        )
    ]  # fmt: skip
    return min(keeping)[-1] if keeping else None


def alternatives(comparison: Comparison) -> list[list[tuple[Change, int]]]:
    """For each run: the finished runs that another decision would have been, and which decision.

    wait: all else is the same, but how long a stage is and how often it grows, which count stages. replay: all else is
    the same. growth: a learner that grows for one that does not, or the other way, of the same wait, replay, size to
    begin with, epochs.
    """
    found: list[list[tuple[Change, int]]] = []
    keys = [{change: _key(run, change) for change in _LEFT_OUT} for run in comparison.runs]
    members: dict[tuple, list[int]] = {}
    for index, run in enumerate(comparison.runs):
        if run.is_finished:
            for change, key in keys[index].items():
                members.setdefault((change, key), []).append(index)
    for index, run in enumerate(comparison.runs):
        mine: list[tuple[Change, int]] = []
        for change, key in keys[index].items():
            for other in members.get((change, key), []):
                there = comparison.runs[other]
                differs = {
                    "wait": run.wait != there.wait,
                    "replay": run.replay != there.replay,
                    "growth": (run.learner in GROWING) != (there.learner in GROWING),
                }[change]
                if differs:
                    mine.append((change, other))
        found.append(mine)
    return found


_LEFT_OUT: dict[Change, tuple[str, ...]] = {
    "wait": ("wait", "grow_every", "updates", "updates_per_mega_batch"),
    "replay": ("replay",),
    "growth": ("learner", *TAKEN_BY),
}


def _key(run: Run, change: Change) -> tuple:
    left_out = set(_LEFT_OUT[change])
    if run.kind == "language model":
        left_out.discard("experts")  # of every learner there: its size to begin with
    return tuple(sorted((name, repr(value)) for name, value in run.settings.items() if name not in left_out))
