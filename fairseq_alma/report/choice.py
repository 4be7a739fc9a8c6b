"""Which run to choose: the best within a budget, the Pareto front, and what other decisions would have given.

Runs are chosen by validation data alone (numbers.validation_score); the page then shows the test results of the chosen
run. When a slider moves, the page computes the front and the choice again with its own short code
(page/choice.js); a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairseq_alma.core.catalogue import WAIT_SETTINGS, grows, learners_that_take
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup

Change = Literal["wait", "replay", "growth"]
"""A decision in which two runs differ."""


@dataclass(frozen=True)
class Budget:
    """Limits that a run must keep. None means no limit."""

    comp: float | None = None
    """Maximum training FLOPs over the stream."""
    num_params: float | None = None
    """Maximum number of parameters after the last arrival."""
    final: float | None = None
    """Maximum error rate or perplexity on validation data after the last arrival."""

    def allows(self, numbers: Numbers) -> bool:
        """Return True if a run with these numbers keeps all limits."""
        if self.comp is not None and numbers.comp > self.comp:
            return False
        if self.num_params is not None and numbers.num_params > self.num_params:
            return False
        if self.final is None:
            return True
        return numbers.final_validation is not None and numbers.final_validation.mean <= self.final


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point beats.

    A point beats another if it is less or equal in every coordinate and less in at least one.
    """

    def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def best_within(numbers: Sequence[Numbers], budget: Budget) -> int | None:
    """Return the index of the lowest validation score within the budget, or None if no run keeps it.

    Ties go to fewer training FLOPs, then to fewer parameters, then to the first.
    """
    candidates = [
        (result.validation_score, result.comp, result.num_params, index)
        for index, result in enumerate(numbers)
        if result.validation_score is not None and budget.allows(result)
    ]
    return min(candidates)[-1] if candidates else None


def alternatives(comparison: Comparison) -> list[list[tuple[Change, int]]]:
    """Return for each group the finished groups that differ from it in one decision, with that decision.

    wait: everything else is equal, except for the number of updates and how often the learner grows, which both depend
    on the number of stages.
    replay: everything else is equal.
    growth: one learner grows and the other does not; wait, replay, initial size and training are equal.

    Returns:
        For each group of the comparison, pairs of the decision and the index of the other group.
    """
    names = {name for group in comparison.groups for name in group.settings}
    may_differ: dict[Change, set[str]] = {
        "wait": set(WAIT_SETTINGS),
        "replay": {"replay"},
        # The settings that only some learners take: in vision, not in language models, `experts` is one of them.
        "growth": {"learner", *(name for name in names if learners_that_take(name, comparison.half))},
    }
    keys = [{change: _key_without(group, may_differ[change]) for change in may_differ} for group in comparison.groups]
    finished: dict[tuple, list[int]] = {}
    for index, group in enumerate(comparison.groups):
        if group.is_finished:
            for change, key in keys[index].items():
                finished.setdefault((change, key), []).append(index)
    return [
        [
            (change, other)
            for change, key in keys[index].items()
            for other in finished.get((change, key), [])
            if _differ(change, group, comparison.groups[other])
        ]
        for index, group in enumerate(comparison.groups)
    ]


def _differ(change: Change, a: RunGroup, b: RunGroup) -> bool:
    """Return True if two groups made this decision differently."""
    if change == "wait":
        return a.wait != b.wait
    if change == "replay":
        return a.replay != b.replay
    return grows(a.learner) != grows(b.learner)


def _key_without(group: RunGroup, names: set[str]) -> tuple:
    """Return all settings but these, as a key that is equal for groups with equal settings."""
    return tuple(sorted((name, repr(value)) for name, value in group.settings.items() if name not in names))
