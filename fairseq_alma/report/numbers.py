"""Results of a group of runs: the paper's metrics, each with its mean and standard error over the seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fairseq_alma.core.metrics import PREQUENTIAL_KEYS, mean_and_standard_error
from fairseq_alma.report.runs import Array, Comparison, Run, RunGroup

Rule = Literal["prequential", "validation"]
"""By which score the best group of a comparison is chosen. `rule_of` describes the two rules."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error. The standard error is None for a single seed."""

    mean: float
    stderr: float | None = None

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return `12.34 ± 0.56`, or `12.34` for a single seed.

        Args:
            digits: number of decimals.
            scale: factor that multiplies the mean and the standard error; 100 for percent.
        """
        text = f"{scale * self.mean:.{digits}f}"
        return text if self.stderr is None else f"{text} ± {scale * self.stderr:.{digits}f}"


@dataclass(frozen=True)
class Numbers:
    """Results of a group of runs that differ only in the seed. A result that does not exist yet is None.

    Each result is the mean over the runs in `RunGroup.counted_runs`, usually the finished runs.
    """

    quality: Estimate | None
    """Quality over the complete stream, on test data.

    In vision, the cumulative error rate CER (equation 1 of the paper). For language models, the mean perplexity over
    the arrivals t = 1..B.
    """
    after_first_stage: Estimate | None
    """Mean test perplexity over the arrivals from the first stage on; None in vision."""
    final: Estimate
    """Test error rate or perplexity after the last arrival."""
    final_validation: Estimate | None
    """Validation error rate or perplexity after the last arrival."""
    validation_score: float | None
    """Score on validation data by the rule of the comparison. The group with the lowest score is the best.

    With the rule "prequential": the prequential error rate, a fraction, or the prequential perplexity. With the rule
    "validation": CER or average perplexity on validation data. None if the group is unfinished, or if values are
    missing in its ledgers.
    """
    num_params: float
    """Number of parameters of the predictor after the last arrival."""
    forward_flops: float
    """FLOPs of one forward pass after the last arrival, on one example or one input of tokens_per_sample tokens."""
    mem: float
    """The paper's metric Mem: the number of parameters, summed over the arrivals t = 0..B."""
    comp: float
    """The paper's metric Comp: the training FLOPs, summed over the stream."""
    num_updates: float
    """Number of optimizer updates over the stream. For an ensemble, the sum over its members."""
    wall_seconds: float | None
    """Wall time of a run in seconds. If summary.json contains no wall time, this is the time spent in training."""
    prequential: Estimate | None = None
    """Prequential error rate, a fraction, or prequential perplexity."""
    forgetting: Estimate | None = None
    """Mean forgetting, a difference of error rates. None if the runs have no error matrix."""
    backward_transfer: Estimate | None = None
    """Backward transfer, a difference of accuracies; see `forgetting`."""
    forward_transfer: Estimate | None = None
    """Forward transfer, a difference of accuracies; see `forgetting`."""


def all_numbers(comparison: Comparison) -> list[Numbers]:
    """Return the results of every group of runs in a comparison, in the order of `comparison.groups`."""
    untrained, rule = untrained_value(comparison), rule_of(comparison)
    return [numbers_of(group, untrained, rule) for group in comparison.groups]


def rule_of(comparison: Comparison) -> Rule:
    """Return the rule by which the best group of a comparison is chosen.

    "prequential": the prequential score. It is used if all runs have it that could be chosen by the other rule.
    "validation": CER or average perplexity on the data that also chose the epoch or checkpoint of each stage. In
        vision, this score is too low for small waits.
    """
    return "validation" if runs_without_prequential(comparison) else "prequential"


def runs_without_prequential(comparison: Comparison) -> list[Run]:
    """Return the finished runs that have validation values for all arrivals, but no prequential score."""
    runs = [run for group in comparison.finished_groups for run in group.counted_runs]
    return [run for run in runs if _prequential(run) is None and not np.isnan(validation_score(run, untrained=1.0))]


def _prequential(run: Run) -> float | None:
    return next((run.summary[key] for key in PREQUENTIAL_KEYS if key in run.summary), None)


def numbers_of(group: RunGroup, untrained: float, rule: Rule) -> Numbers:
    """Return the results of one group of runs. The group may be unfinished.

    Args:
        group: runs with equal settings.
        untrained: error rate or perplexity before the first stage, used where the ledger contains no validation value.
            See the function `validation_score`.
        rule: the rule by which groups are chosen, as returned by `rule_of`.
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
        return Estimate(means[key], errors.get(key)) if key in means else None

    final = estimate("final")
    assert final is not None
    scores: list[float | None] = []
    if is_complete:
        scores = [_prequential(run) if rule == "prequential" else validation_score(run, untrained) for run in runs]
    is_scored = bool(scores) and not any(score is None or np.isnan(score) for score in scores)
    wall_seconds = means.get("wall_seconds")
    return Numbers(
        quality=(estimate("cer") or estimate("average_perplexity")) if is_complete else None,
        after_first_stage=estimate("average_perplexity_after_first_stage") if is_complete else None,
        final=final,
        final_validation=estimate("final_validation"),
        validation_score=_mean(scores) if is_scored else None,
        num_params=_mean([run.num_params[t] for run, t in zip(runs, last, strict=True)]),
        forward_flops=_mean([run.forward_flops[t] for run, t in zip(runs, last, strict=True)]),
        mem=means.get("mem") or 0.0,
        comp=means.get("comp") or 0.0,
        num_updates=_mean([run.num_updates[: t + 1].sum() for run, t in zip(runs, last, strict=True)]),
        wall_seconds=_mean([run.train_seconds.sum() for run in runs]) if wall_seconds is None else wall_seconds,
        prequential=(estimate(PREQUENTIAL_KEYS[0]) or estimate(PREQUENTIAL_KEYS[1])) if is_complete else None,
        forgetting=estimate("forgetting") if is_complete else None,
        backward_transfer=estimate("backward_transfer") if is_complete else None,
        forward_transfer=estimate("forward_transfer") if is_complete else None,
    )


def _summary_until(run: Run, t: int) -> dict[str, Any]:
    """Return a summary of an unfinished run, computed from the arrivals 0..t.

    This summary has fewer entries than `Run.summary`. For example, it has no CER, which needs the complete stream.
    """
    summary = {
        "final": float(run.quality[t]),
        "mem": float(run.num_params[: t + 1].sum()),
        "comp": float(run.train_flops[: t + 1].sum()),
        "wall_seconds": run.summary.get("wall_seconds", float(run.train_seconds.sum())),
    }
    if not np.isnan(run.validation[t]):
        summary["final_validation"] = float(run.validation[t])
    return summary


def validation_score(run: Run, untrained: float) -> float:
    """Return CER or average perplexity, computed from validation data over t = 1..B.

    The report uses this score to choose between groups by the rule "validation" (see `rule_of`).

    Args:
        run: a finished run.
        untrained: error rate or perplexity of the untrained learner. It is used for arrivals before the first stage,
            because a vision ledger contains no validation values for them. Give the same number for all runs of a
            comparison, so that no run has an advantage.

    Returns:
        The sum of the error rates, or the mean of the perplexities. NaN if the ledger has no validation value for an
        arrival after the first stage.
    """
    values = np.where(np.isnan(run.validation) & (run.stage == 0), untrained, run.validation)[1:]
    return float(values.sum() if "cer" in run.summary else values.mean())


def untrained_value(comparison: Comparison) -> float:
    """Return the mean error rate or perplexity of the untrained learners (t = 0), over all runs of the comparison."""
    return _mean([run.quality[0] for group in comparison.groups for run in group.counted_runs])


def running_average(quality: Array, stage: Array) -> Array:
    """Return, for each arrival, the mean of `quality` from the first stage to this arrival; NaN before the first stage.

    Args:
        quality: error rate or perplexity at each of T arrivals, an array [T].
        stage: number of the stage that finished last, at each arrival, an array [T]; 0 before the first stage.
    """
    trained = (stage > 0) & (np.arange(len(quality)) >= 1)
    total, count = np.cumsum(np.where(trained, quality, 0.0)), np.cumsum(trained)
    return np.where(trained, total / np.maximum(count, 1), np.nan)


def standard_error(values_ST: Array) -> Array | None:
    """Return the standard error over seeds at each of T arrivals, as an array [T]; None for a single seed.

    Args:
        values_ST: values with one row per seed (S) and one column per arrival (T).
    """
    if len(values_ST) < 2:
        return None
    return values_ST.std(axis=0, ddof=1) / len(values_ST) ** 0.5


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values) / len(values))
