"""Results of a group of runs: the paper's metrics, each with its mean and standard error over the seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_alma.core.error_matrix import TRANSFER_METRICS
from fairseq_alma.core.metrics import PREQUENTIAL_KEYS, mean_and_standard_error
from fairseq_alma.report.objectives import (
    DEFAULT,
    OBJECTIVES,
    Objective,
    Rule,
    rule_of,
    validation_score,
    value_on_test,
)
from fairseq_alma.report.runs import Array, Comparison, Run, RunGroup


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error. The standard error is None for a single seed."""

    mean: float
    stderr: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate | None":
        """Return the estimate from values, one for each seed; None if there are none."""
        if not values:
            return None
        if len(values) == 1 or not np.isfinite(values).all():
            return cls(_mean(values))
        with np.errstate(over="ignore"):
            error = float(np.std(values, ddof=1) / len(values) ** 0.5)
        return cls(_mean(values), error if math.isfinite(error) else None)

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return `12.34 ± 0.56`, or `12.34` for a single seed, with `digits` decimals. For percent, `scale` is 100.

        The perplexities of diverged runs, from a million on, have three significant digits.
        """
        values = [scale * self.mean] if self.stderr is None else [scale * self.mean, scale * self.stderr]
        return " ± ".join(f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}" for value in values)


@dataclass(frozen=True)
class Score:
    """Results of a finished group of runs under one objective. All values are error rates (fractions) or perplexities.

    The lists have one entry for each run of `RunGroup.counted_runs`. If the value of a run does not exist, the list is
    empty, and so is the result that is computed from it.
    """

    test: tuple[float, ...] = ()
    """Values on test data, which the report shows."""
    validation: tuple[float, ...] = ()
    """Scores on validation data, by which the report chooses."""

    @property
    def value(self) -> Estimate | None:
        """Mean and standard error of the values on test data."""
        return Estimate.of(self.test)

    @property
    def validation_estimate(self) -> Estimate | None:
        """Mean and standard error of the scores on validation data."""
        return Estimate.of(self.validation)

    @property
    def score(self) -> float | None:
        """Mean of the scores on validation data. The group with the lowest score is the best."""
        return _mean(self.validation) if self.validation else None


@dataclass(frozen=True)
class Numbers:
    """Results of a group of runs that differ only in the seed. A result that does not exist yet is None.

    Each result is the mean over the runs in `RunGroup.counted_runs`, usually the finished runs.
    """

    quality: Estimate | None
    """The paper's measure of quality over the complete stream, on test data.

    In vision, the cumulative error rate CER (equation 1 of the paper). For language models, the mean perplexity over
    the arrivals t = 1..B (arithmetic mean; the objectives have the geometric mean).
    """
    final: Estimate
    """Test error rate or perplexity after the last arrival."""
    final_validation: Estimate | None
    """Validation perplexity after the last arrival. In vision, the validation error of the last mega-batches (see
    `objectives.validation_score`); for an unfinished run, the validation error of the last stage."""
    scores: Mapping[Objective, Score]
    """Results under each objective. They are empty if the group is unfinished."""
    num_params: float
    """Number of parameters of the predictor after the last arrival."""
    forward_flops: float
    """FLOPs of one forward pass after the last arrival, on one example or one input of tokens_per_sample tokens."""
    mem: float
    """The paper's metric Mem: the number of parameters, summed over the arrivals t = 0..B."""
    comp: float
    """The paper's metric Comp: the training FLOPs, summed over the stream."""
    wall_seconds: float | None
    """Wall time in seconds: that of all seeds if one process trained them together, otherwise that of one seed. If
    summary.json contains no wall time, this is the time spent in training."""
    bits_per_byte: Estimate | None = None
    """Language models: test loss in bits per byte after the last arrival; None if a ledger lacks it."""
    prequential: Estimate | None = None
    """Prequential error rate, a fraction, or prequential perplexity."""
    transfer: Mapping[str, Estimate] = field(default_factory=dict)
    """Mean forgetting, a difference of error rates, and backward and forward transfer, differences of accuracies. Empty
    if the runs have no error matrix."""

    @property
    def validation_score(self) -> float | None:
        """Score on validation data under the default objective; None if the group is unfinished or has no score."""
        return self.scores[DEFAULT].score


def all_numbers(comparison: Comparison) -> list[Numbers]:
    """Return the results of every group of runs in a comparison, in the order of `comparison.groups`."""
    untrained = _mean([run.quality[0] for group in comparison.groups for run in group.counted_runs])
    rules = {objective: rule_of(comparison, objective) for objective in OBJECTIVES}
    return [numbers_of(group, untrained, rules) for group in comparison.groups]


def ranking(numbers: Sequence[Numbers], objective: Objective = DEFAULT) -> list[int]:
    """Return the indices of all groups, the best one first: that with the lowest score on validation data.

    Of equal scores, the one with the fewest training FLOPs comes first, and then the one with the fewest parameters.
    Groups without a score, for example unfinished ones, come last.
    """

    def key(index: int) -> tuple[float, ...]:
        score = numbers[index].scores[objective].score
        return (score is None, score or 0.0, numbers[index].comp, numbers[index].num_params)

    return sorted(range(len(numbers)), key=key)


def best_of(numbers: Sequence[Numbers], objective: Objective = DEFAULT) -> int | None:
    """Return the index of the best group (see `ranking`); None if no group has a score on validation data."""
    first = next(iter(ranking(numbers, objective)), None)
    return None if first is None or numbers[first].scores[objective].score is None else first


def numbers_of(group: RunGroup, untrained: float, rules: Mapping[Objective, Rule]) -> Numbers:
    """Return the results of one group of runs. The group may be unfinished.

    Args:
        group: runs with equal settings.
        untrained: mean error rate or perplexity of the untrained learners (t = 0) of the comparison, for arrivals
            without a validation value; see `objectives.validation_score`.
        rules: the rule by which groups are chosen under each objective, as returned by `objectives.rule_of`.
    """
    runs = group.counted_runs
    summaries = [dict(run.summary) for run in runs if run.summary]
    is_complete = group.is_finished and bool(summaries)
    if is_complete:
        last = [run.last_t for run in runs]
    else:  # some runs may have reached a later arrival than others, so use the last arrival that all have reached
        last = [group.last_t] * len(runs)
        summaries = [_summary_until(run, group.last_t) for run in runs]
    statistics = mean_and_standard_error(summaries)
    means, errors = statistics["mean"], statistics["stderr"]

    def estimate(key: str) -> Estimate | None:
        if key not in means:
            return None
        error = errors.get(key)
        return Estimate(means[key], error if error is not None and math.isfinite(error) else None)

    final = estimate("final")
    assert final is not None
    scores = dict.fromkeys(OBJECTIVES, Score())
    if is_complete:
        for name in OBJECTIVES:
            validation = [validation_score(run, name, rules[name], untrained) for run in runs]
            scores[name] = Score(_if_complete([value_on_test(run, name) for run in runs]), _if_complete(validation))
    final_validation = Estimate.of(scores["final"].validation) or estimate("final_validation")
    has_wall_time = "wall_seconds" in means
    return Numbers(
        quality=(estimate("cer") or estimate("average_perplexity")) if is_complete else None,
        final=final,
        final_validation=final_validation,
        scores=scores,
        num_params=_mean([run.num_params[t] for run, t in zip(runs, last, strict=True)]),
        forward_flops=_mean([run.forward_flops[t] for run, t in zip(runs, last, strict=True)]),
        mem=means.get("mem") or 0.0,
        comp=means.get("comp") or 0.0,
        wall_seconds=_mean([_wall_seconds(run, group, has_wall_time) for run in runs]),
        bits_per_byte=Estimate.of(
            _if_complete([float(run.bits_per_byte[t]) for run, t in zip(runs, last, strict=True)])
        ),
        prequential=(estimate(PREQUENTIAL_KEYS[0]) or estimate(PREQUENTIAL_KEYS[1])) if is_complete else None,
        transfer={name.replace("_", " "): one for name in TRANSFER_METRICS if is_complete and (one := estimate(name))},
    )


def _wall_seconds(run: Run, group: RunGroup, has_wall_time: bool) -> float:
    """Return the wall time of a run, see `Numbers.wall_seconds`. Without one, the time spent in training."""
    if not has_wall_time or run.summary.get("wall_seconds") is None:
        return float(run.train_seconds.sum())
    return float(run.summary["wall_seconds"]) / (1 if group.is_trained_together else run.seeds_of_process)


def _if_complete(values: Sequence[float | None]) -> tuple[float, ...]:
    """Return the values as a tuple, or an empty tuple if one of them is None or is not a number."""
    known = tuple(value for value in values if value is not None and not np.isnan(value))
    return known if len(known) == len(values) else ()


def _summary_until(run: Run, t: int) -> dict[str, Any]:
    """Return a summary of an unfinished run, computed from the arrivals 0..t, without CER and other averages."""
    summary = {
        "final": float(run.quality[t]),
        "mem": float(run.num_params[: t + 1].sum()),
        "comp": float(run.train_flops[: t + 1].sum()),
        "wall_seconds": run.summary.get("wall_seconds", float(run.train_seconds.sum())),
    }
    if not np.isnan(run.validation[t]):
        summary["final_validation"] = float(run.validation[t])
    return summary


def standard_error(values_ST: Array) -> Array | None:
    """Return the standard error over S seeds at each of T arrivals: [S, T] -> [T]; None for a single seed."""
    with np.errstate(invalid="ignore", over="ignore"):  # a run has diverged
        return None if len(values_ST) < 2 else values_ST.std(axis=0, ddof=1) / len(values_ST) ** 0.5


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values) / len(values))
