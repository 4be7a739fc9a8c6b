"""Functions for choosing a run: the best run within a budget, the Pareto front, and runs that differ in one decision.

Runs are chosen by validation data alone (numbers.validation_score); the page then shows the test results of the chosen
run. When a slider moves, the page computes the best run and the Pareto front again in JavaScript (page/choice.js). A
test checks that the Python and the JavaScript implementation give the same results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairseq_alma.core.catalogue import WAIT_SETTINGS, grows, learners_that_take
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup

Change = Literal["wait", "replay", "growth"]
"""A decision of the user: how long to wait, whether to replay, whether to grow."""


@dataclass(frozen=True)
class Budget:
    """Limits that a run must not exceed. None means no limit."""

    comp: float | None = None
    """Maximum training FLOPs over the stream."""
    num_params: float | None = None
    """Maximum number of parameters after the last arrival."""
    final: float | None = None
    """Maximum error rate or perplexity on validation data after the last arrival."""

    def allows(self, numbers: Numbers) -> bool:
        """Return True if a run with these numbers exceeds none of the limits."""
        if self.comp is not None and numbers.comp > self.comp:
            return False
        if self.num_params is not None and numbers.num_params > self.num_params:
            return False
        if self.final is None:
            return True
        return numbers.final_validation is not None and numbers.final_validation.mean <= self.final


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point beats.

    A point beats another if it is smaller in at least one coordinate and larger in none. Small values are good.
    """

    def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def best_within(numbers: Sequence[Numbers], budget: Budget) -> int | None:
    """Return the index in `numbers` of the run with the lowest validation score within the budget; None if none fits.

    Among runs with equal scores, the one with the fewest training FLOPs is chosen, then the one with the fewest
    parameters, then the first.
    """
    candidates = [
        (result.validation_score, result.comp, result.num_params, index)
        for index, result in enumerate(numbers)
        if result.validation_score is not None and budget.allows(result)
    ]
    return min(candidates)[-1] if candidates else None


def alternatives(comparison: Comparison) -> list[list[tuple[Change, int]]]:
    """Find the alternatives to each group: the finished groups that differ from this group in a single decision.

    Which settings may differ depends on the decision:

    wait: the wait, and also the number of updates and the growth interval. The wait determines the number of stages,
        and users adapt these two settings to it.
    replay: only the replay setting.
    growth: the learner and the settings that only some learners have. One learner grows and the other does not.

    All other settings are equal.

    Returns:
        For each group of the comparison, a list of (decision, index of the other group).
    """
    names = {name for group in comparison.groups for name in group.settings}
    may_differ: dict[Change, set[str]] = {
        "wait": set(WAIT_SETTINGS),
        "replay": {"replay"},
        # Use the settings that only some learners have. In vision, `experts` is one of them; in language models, all
        # learners have it.
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
    """Return True if two groups differ in the decision `change`."""
    if change == "wait":
        return a.wait != b.wait
    if change == "replay":
        return a.replay != b.replay
    return grows(a.learner) != grows(b.learner)


def _key_without(group: RunGroup, names: set[str]) -> tuple:
    """Return all settings of a group except `names`, as a tuple to be compared with that of another group."""
    return tuple(sorted((name, repr(value)) for name, value in group.settings.items() if name not in names))
