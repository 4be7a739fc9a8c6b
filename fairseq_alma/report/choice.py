"""Functions that help a user to choose a setting by the results of runs.

A group contains the runs of one setting with several seeds. The page of the report (index.html) shows each group as one
"run".

The functions find three things: the best group within a budget; the Pareto front, which consists of all groups that no
other group beats; and the alternatives to a group. An alternative is a finished group that differs from the
group in one decision of the user: how long to wait, whether to replay, or whether to grow.

Groups are chosen by their results on validation data (Numbers.validation_score), never by test results: by the
prequential score if all runs have it, otherwise by the validation error over the stream (see `numbers.rule_of`). The
page says which rule it used, and then shows the test results of the chosen group. When the user moves a slider on the
page, page/choice.js computes the best group and the Pareto front again in JavaScript. A test checks that JavaScript and
Python give the same results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairseq_alma.core.catalogue import WAIT_SETTINGS, grows, learners_that_take
from fairseq_alma.report.numbers import Numbers, rule_of, runs_without_prequential
from fairseq_alma.report.runs import Comparison, Run, RunGroup

SAME_STEP = 1.02
"""Two budgets are one step of a slider if the larger one is at most this many times the smaller one."""
T_95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
    2.09,
)  # fmt: skip
"""Quantiles of Student's t distribution for a two-sided 95% interval, with 1, 2, ... degrees of freedom. With more, 2.0
is used."""

Change = Literal["wait", "replay", "growth"]
"""The decision in which two groups of runs differ: how long to wait, whether to replay, or whether to grow."""


@dataclass(frozen=True)
class Budget:
    """Limits that the mean results of a group (runs that differ only in the seed) must not exceed. None: no limit."""

    comp: float | None = None
    """Maximum training FLOPs over the stream."""
    num_params: float | None = None
    """Maximum number of parameters of the predictor after the last arrival."""
    final: float | None = None
    """Maximum error rate or perplexity on validation data after the last arrival."""

    def allows(self, numbers: Numbers) -> bool:
        """Return True if `numbers`, the results of a group of runs, are within all limits of this budget."""
        if self.comp is not None and numbers.comp > self.comp:
            return False
        if self.num_params is not None and numbers.num_params > self.num_params:
            return False
        if self.final is None:
            return True
        return numbers.final_validation is not None and numbers.final_validation.mean <= self.final


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point beats.

    Small coordinates are good. Point A beats point B if A is smaller in at least one coordinate and larger in none.
    """

    def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def score_name(comparison: Comparison) -> str:
    """Return the name of the score by which the best group of a comparison is chosen."""
    quality = "error" if comparison.is_vision else "perplexity"
    if rule_of(comparison) == "prequential":
        return f"prequential {quality}"
    return f"{'CER' if comparison.is_vision else 'average perplexity'} on validation data"


def score_scale(comparison: Comparison) -> int:
    """Return the factor that multiplies scores where they are shown: 100 if they are error rates, otherwise 1."""
    return 100 if comparison.is_vision and rule_of(comparison) == "prequential" else 1


def explanation(comparison: Comparison) -> str:
    """Return sentences that say by which score the best group is chosen, and why."""
    if rule_of(comparison) == "prequential":
        if comparison.is_vision:
            return (
                "Prequential error: the mean error on the validation data of each mega-batch, measured when it "
                "arrives, before any stage uses it."
            )
        return (
            "Prequential perplexity: the geometric mean over the arrivals of the perplexity on the validation set, "
            "with untrained arrivals."
        )
    num_without = len(runs_without_prequential(comparison))
    num_runs = sum(len(group.counted_runs) for group in comparison.finished_groups)
    kind = "CER is computed" if comparison.is_vision else "the mean perplexity is computed"
    return (
        f"Here {kind} from the validation data of the stages, because {num_without} of {num_runs} finished runs have "
        "no prequential score: an earlier version of ALMA wrote them, or only one mega-batch arrived. The same data "
        "chose the epoch or checkpoint of each stage, so this score is too low for small waits."
    )


def best_within(numbers: Sequence[Numbers], budget: Budget) -> int | None:
    """Return the index of the best group of runs among the groups within the budget.

    Without a limit of the final error, this is the group with the lowest validation score. If several groups have the
    same score, the group with the fewest training FLOPs is chosen. If the FLOPs are equal too, the group with the
    fewest parameters is chosen, and then the first group.

    A limit of the final error is a target. Who gives a target wants to know the cheapest way to reach it. So the group
    with the fewest training FLOPs is chosen; if they are equal, the one with the fewest parameters, and then the one
    with the lowest score.

    Args:
        numbers: the results of each group.
        budget: limits for the training FLOPs, the parameters and the final validation error or perplexity.

    Returns:
        An index in `numbers`, or None if no group with a validation score is within the budget.
    """
    candidates: list[tuple[float, float, float, int]] = []
    for index, result in enumerate(numbers):
        if result.validation_score is not None and budget.allows(result):
            score, cost = result.validation_score, (result.comp, result.num_params)
            candidates.append((score, *cost, index) if budget.final is None else (*cost, score, index))
    return min(candidates)[-1] if candidates else None


def slider_steps(values: Sequence[float]) -> list[float]:
    """Return the steps of a slider: the values from small to large, where values that are almost equal are one step.

    A step stands for all values from its smallest one up to 2% above this. The step is the largest of them, so that a
    limit at this step allows all of them.
    """
    steps: list[float] = []
    smallest = None
    for value in sorted(set(values)):
        if smallest is not None and value <= smallest * SAME_STEP:
            steps[-1] = value
        else:
            steps.append(value)
            smallest = value
    return steps


@dataclass(frozen=True)
class Difference:
    """Difference between the qualities of two groups of runs, paired over the seeds that both have."""

    mean: float
    """Mean over the pairs of CER or average perplexity of the second group minus that of the first."""
    margin: float | None
    """Half the width of the 95% confidence interval (Student's t distribution); None for a single pair."""
    num_pairs: int
    """Number of seeds that both groups have. If they share none, the means over all seeds are one pair."""

    @property
    def verdict(self) -> str:
        """What the difference shows: "one seed", "no clear difference", "better" or "worse"."""
        if np.isinf(self.mean):  # a run has diverged
            return "worse" if self.mean > 0 else "better"
        if self.margin is None:
            return "one seed"
        if not abs(self.mean) > self.margin:
            return "no clear difference"
        return "worse" if self.mean > 0 else "better"


def difference(first: RunGroup, second: RunGroup) -> Difference | None:
    """Return how much worse the second group is than the first on test data; None if a group has no such result.

    Runs of equal seeds see the same mega-batches, so their difference has less noise than the difference of means.
    """
    qualities = [
        {run.seed: quality for run in group.counted_runs if (quality := _quality_of(run)) is not None}
        for group in (first, second)
    ]
    if not all(qualities):
        return None
    infinite = [any(np.isinf(value) for value in one.values()) for one in qualities]
    if any(infinite):
        return None if all(infinite) else Difference(float("inf") if infinite[1] else -float("inf"), None, 1)
    shared = sorted(seed for seed in qualities[0].keys() & qualities[1].keys() if seed is not None)
    if not shared:
        means = [float(np.mean(list(one.values()))) for one in qualities]
        return Difference(means[1] - means[0], None, 1)
    gaps = np.array([qualities[1][seed] - qualities[0][seed] for seed in shared])
    margin = None
    if len(gaps) > 1:
        quantile = T_95[len(gaps) - 2] if len(gaps) - 2 < len(T_95) else 2.0
        margin = float(quantile * gaps.std(ddof=1) / len(gaps) ** 0.5)
    return Difference(float(gaps.mean()), margin, len(gaps))


def _quality_of(run: Run) -> float | None:
    value = run.summary.get("cer", run.summary.get("average_perplexity"))
    return float(value) if value is not None and not np.isnan(value) else None


def alternatives(comparison: Comparison) -> list[list[tuple[Change, int]]]:
    """Find the alternatives to each group of runs: the finished groups that differ from this one in one decision.

    One decision can change several settings. For each decision, these settings may differ:

    wait: the wait, the number of updates and the growth interval. The wait determines the number of stages, and users
        adapt the number of updates and the growth interval to the number of stages.
    replay: the setting `replay`.
    growth: the learner, and the settings that only some learners have. The learner of one group must grow, and the
        learner of the other group must not grow.

    All other settings must be equal.

    Returns:
        For each group of the comparison, a list of (decision, index of the alternative in `comparison.groups`).
    """
    names = {name for group in comparison.groups for name in group.settings}
    may_differ: dict[Change, set[str]] = {
        "wait": set(WAIT_SETTINGS),
        "replay": {"replay"},
        # Two groups with different learners may also differ in the settings that only some learners have. For such a
        # setting, learners_that_take returns the names of these learners. For a setting that all learners have, it
        # returns an empty list. The result depends on `comparison.half` ("vision" or "language model"): for example,
        # only some vision learners have the setting `experts`, but all language model learners have it.
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
    """Return True if the groups `a` and `b` differ in the decision `change`.

    Args:
        change: the decision that is checked: the wait, the use of replay, or whether the learner grows.
        a: a group of runs.
        b: another group of runs.
    """
    if change == "wait":
        return a.wait != b.wait
    if change == "replay":
        return a.replay != b.replay
    return grows(a.learner) != grows(b.learner)


def _key_without(group: RunGroup, names: set[str]) -> tuple:
    """Return all settings of a group except the settings `names`, as a tuple that can be a dictionary key.

    Groups with equal tuples have equal values of all other settings.
    """
    return tuple(sorted((name, repr(value)) for name, value in group.settings.items() if name not in names))
