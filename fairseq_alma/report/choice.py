"""Functions that help a user to choose a setting by the results of runs.

A group contains the runs of one setting with several seeds. The page of the report (index.html) shows each group as one
"run".

The functions find three things: the best group within a budget; the groups that the validation data cannot tell from
it; and the Pareto front, which consists of all groups that no other group beats. alternatives.py finds the alternatives
to a group.

Groups are chosen under an objective (see objectives.py) by their scores on validation data, never by test results: by
the prequential score if all runs have it, otherwise by the validation error (see `objectives.rule_of`). The page says
which rule it used, and then shows the test results of the chosen group. When the user moves a slider on the page,
page/choice.js computes all this again in JavaScript. A test checks that JavaScript and Python give the same results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.objectives import BIAS, DEFAULT, OBJECTIVES, Objective, rule_of
from fairseq_alma.report.runs import Comparison, RunGroup

SAME_STEP = 1.02
"""Two budgets are one step of a slider if the larger one is at most this many times the smaller one."""
T_95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
    2.09,
)  # fmt: skip
"""Quantiles of Student's t distribution for a two-sided 95% interval, with 1, 2, ... degrees of freedom. With more, 2.0
is used."""


@dataclass(frozen=True)
class Budget:
    """Limits that the mean results of a group (runs that differ only in the seed) must not exceed. None: no limit."""

    comp: float | None = None
    """Maximum training FLOPs over the stream."""
    num_params: float | None = None
    """Maximum number of parameters of the predictor after the last arrival."""
    target: float | None = None
    """Maximum score on validation data under the objective: an error rate (a fraction) or a perplexity."""

    def allows(self, numbers: Numbers, objective: Objective = DEFAULT) -> bool:
        """Return True if `numbers`, the results of a group of runs, are within all limits of this budget."""
        if self.comp is not None and numbers.comp > self.comp:
            return False
        if self.num_params is not None and numbers.num_params > self.num_params:
            return False
        score = numbers.scores[objective].score
        return self.target is None or (score is not None and score <= self.target)


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point beats.

    Small coordinates are good. Point A beats point B if A is smaller in at least one coordinate and larger in none.
    """

    def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def best_within(numbers: Sequence[Numbers], budget: Budget, objective: Objective = DEFAULT) -> int | None:
    """Return the index of the best group of runs among the groups within the budget.

    Without a target, this is the group with the lowest score on validation data. If several groups have the same score,
    the group with the fewest training FLOPs is chosen. If the FLOPs are equal too, the group with the fewest parameters
    is chosen, and then the first group.

    Who gives a target wants to know the cheapest way to reach it. So with a target, the group with the fewest training
    FLOPs is chosen; if they are equal, the one with the lowest score, and then the one with the fewest parameters.

    Args:
        numbers: the results of each group.
        budget: limits for the training FLOPs, the parameters and the score on validation data.
        objective: what the score measures.

    Returns:
        An index in `numbers`, or None if no group with a score is within the budget.
    """
    candidates: list[tuple[float, float, float, int]] = []
    for index in _candidates(numbers, budget, objective):
        score, comp, num_params = _score(numbers[index], objective), numbers[index].comp, numbers[index].num_params
        key = (score, comp, num_params) if budget.target is None else (comp, score, num_params)
        candidates.append((*key, index))
    return min(candidates)[-1] if candidates else None


def _candidates(numbers: Sequence[Numbers], budget: Budget, objective: Objective) -> list[int]:
    """Return the indices of the groups within the budget that have a score on validation data."""
    return [
        index
        for index, result in enumerate(numbers)
        if result.scores[objective].score is not None and budget.allows(result, objective)
    ]


def _score(numbers: Numbers, objective: Objective) -> float:
    score = numbers.scores[objective].score
    return float("inf") if score is None else score


def rivals(
    comparison: Comparison, numbers: Sequence[Numbers], budget: Budget, objective: Objective = DEFAULT
) -> list[int]:
    """Return the groups within the budget that the validation data cannot tell from the best one.

    A group with the same results as the best one (`same_results`) is no rival. Of several rivals with the same results,
    only the first is returned. A group is a rival of the best one for one of two reasons:

    noise: the difference of their scores is within its 95% interval. The interval is computed from the seeds that both
        have; for a single pair of seeds, from the noise of all groups with several seeds (`noise_of`).
    bias: the group waits longer than the best one, and the rule is "validation". Then the score of the best one can be
        too low, by up to BIAS. The group is a rival if its score is lower than the score corrected by BIAS.

    Returns:
        Indices in `numbers`, lowest score first. Empty if the budget has a target, because then the cheapest group is
        the best, or if no group is within the budget.
    """
    best = best_within(numbers, budget, objective)
    if best is None or budget.target is not None:
        return []
    is_biased = comparison.is_vision and rule_of(comparison, objective) == "validation"
    noise, groups = noise_of(numbers, objective), comparison.groups
    lowest = _score(numbers[best], objective)
    by_seed = [scores_by_seed(group, result, objective) for group, result in zip(groups, numbers, strict=True)]

    def is_rival(index: int) -> bool:
        score = _score(numbers[index], objective)
        if index == best or np.isinf(score):
            return False
        if is_biased and groups[index].wait > groups[best].wait and score * (1 - BIAS) <= lowest:
            return True
        gap = difference(by_seed[best], by_seed[index])
        if gap is None:
            return False
        if gap.margin is not None:
            return not gap.mean > gap.margin
        return noise is not None and gap.mean <= 2 * 2**0.5 * noise * lowest

    found = [index for index in _candidates(numbers, budget, objective) if is_rival(index)]
    found.sort(key=lambda index: (_score(numbers[index], objective), index))
    first = same_results(comparison, numbers)
    of_first: dict[int, int] = {}
    for index in found:
        of_first.setdefault(first[index], index)
    return [index for number, index in of_first.items() if number != first[best]]


def same_results(comparison: Comparison, numbers: Sequence[Numbers]) -> list[int]:
    """Return for each group the index of the first group that has the same results; its own index if there is none.

    Different settings can mean the same computation. With a single stage, a growing ensemble never grows, so it is the
    single model that it starts from; and replay has nothing to repeat. Results are the same if the values of each seed
    under each objective, on test and on validation data, the training FLOPs and the parameters are all equal.
    """
    firsts: dict[tuple, int] = {}
    found = []
    for index, (group, result) in enumerate(zip(comparison.groups, numbers, strict=True)):
        scores = tuple((result.scores[name].test, result.scores[name].validation) for name in OBJECTIVES)
        key = (tuple(run.seeds for run in group.counted_runs), scores, result.comp, result.num_params)
        found.append(firsts.setdefault(key, index) if any(test for test, _ in scores) else index)
    return found


def noise_of(numbers: Sequence[Numbers], objective: Objective) -> float | None:
    """Return the standard deviation of scores over seeds, as a fraction of the score; None if no group has two seeds.

    The variances of all groups with several seeds are averaged.
    """
    variances = []
    for result in numbers:
        values = result.scores[objective].validation
        if len(values) > 1 and np.isfinite(values).all() and np.mean(values) > 0:
            variances.append(float(np.var(values, ddof=1) / np.mean(values) ** 2))
    return float(np.mean(variances)) ** 0.5 if variances else None


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
    """Difference between the results of two groups of runs, paired over the seeds that both have."""

    mean: float
    """Mean over the pairs of the value of the second group minus that of the first."""
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


Values = Mapping[int | str | None, float]
"""Results of a group of runs: seeds (`Run.seeds`) -> error rate or perplexity."""


def values_by_seed(group: RunGroup, numbers: Numbers, objective: Objective = DEFAULT) -> Values:
    """Return the values of a group on test data, for `difference`. Empty if the group is unfinished."""
    return _by_seed(group, numbers.scores[objective].test)


def scores_by_seed(group: RunGroup, numbers: Numbers, objective: Objective = DEFAULT) -> Values:
    """Return the scores of a group on validation data, for `difference`. Empty if the group has no score."""
    return _by_seed(group, numbers.scores[objective].validation)


def _by_seed(group: RunGroup, values: Sequence[float]) -> Values:
    return dict(zip((run.seeds for run in group.counted_runs), values, strict=True)) if values else {}


def difference(first: Values, second: Values) -> Difference | None:
    """Return how much larger (worse) the second results are than the first; None if a group has no results.

    Runs of equal seeds see the same mega-batches, so their difference has less noise than the difference of means.
    """
    if not first or not second:
        return None
    infinite = [any(np.isinf(value) for value in values.values()) for values in (first, second)]
    if any(infinite):
        return None if all(infinite) else Difference(float("inf") if infinite[1] else -float("inf"), None, 1)
    shared = [seeds for seeds in first if seeds is not None and seeds in second]
    if not shared:
        means = [float(np.mean(list(values.values()))) for values in (first, second)]
        return Difference(means[1] - means[0], None, 1)
    gaps = np.array([second[seeds] - first[seeds] for seeds in shared])
    margin = None
    if len(gaps) > 1:
        quantile = T_95[len(gaps) - 2] if len(gaps) - 2 < len(T_95) else 2.0
        margin = float(quantile * gaps.std(ddof=1) / len(gaps) ** 0.5)
    return Difference(float(gaps.mean()), margin, len(gaps))
