"""What a run came to: the paper's scalars, mean and standard error over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq_alma.core.ledger import mean_and_standard_error
from fairseq_alma.report.runs import Array, Comparison, Run, Seed


@dataclass(frozen=True)
class Number:
    """Mean over seeds, and its standard error; None for a single seed."""

    mean: float
    stderr: float | None = None

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """`12.34 ± 0.56`."""
        text = f"{scale * self.mean:.{digits}f}"
        return text if self.stderr is None else f"{text} ± {scale * self.stderr:.{digits}f}"


@dataclass(frozen=True)
class Numbers:
    """Of the counted seeds of a run, up to the last arrival. What a run has not come to yet is None."""

    quality: Number | None
    """Vision: CER, equation 1. Language model: average perplexity over t = 1..B."""
    after_first_stage: Number | None
    """Language model: average perplexity from the first stage on."""
    final: Number
    """Test error rate or perplexity after the last arrival."""
    final_validation: Number | None
    validation_score: float | None
    """What runs are chosen by: `quality` of the validation data. See `validation_score`."""
    num_params: float
    """Of the learner after the last arrival."""
    forward_flops: float
    """Of one example, or one input of tokens_per_sample, after the last arrival."""
    mem: float
    comp: float
    """Training FLOPs."""
    num_updates: float
    wall_seconds: float | None


def numbers_of(run: Run, untrained: float) -> Numbers:
    """Raises nothing: what cannot be said is None.

    Args:
        run: finished or not.
        untrained: see `validation_score`.
    """
    summaries = [dict(seed.summary) for seed in run.counted if seed.summary]
    moments = mean_and_standard_error(summaries) if summaries else {"mean": {}, "stderr": {}}

    def number(key: str) -> Number | None:
        return Number(moments["mean"][key], moments["stderr"].get(key)) if key in moments["mean"] else None

    def mean(key: str) -> float | None:
        return moments["mean"].get(key)

    complete = run.is_finished and bool(summaries)
    if not complete:  # seeds that stand at different arrivals are compared where all of them are
        summaries = [_so_far(seed, run.last_t) for seed in run.counted]
        moments = mean_and_standard_error(summaries)
    last = [run.last_t if not complete else seed.last_t for seed in run.counted]
    final = number("final")
    assert final is not None
    scores = [validation_score(seed, untrained) for seed in run.counted] if complete else []
    wall = mean("wall_seconds")
    return Numbers(
        quality=(number("cer") or number("average_perplexity")) if complete else None,
        after_first_stage=number("average_perplexity_after_first_stage") if complete else None,
        final=final,
        final_validation=number("final_validation"),
        validation_score=_mean(scores) if scores and not any(map(np.isnan, scores)) else None,
        num_params=_mean([seed.num_params[t] for seed, t in zip(run.counted, last, strict=True)]),
        forward_flops=_mean([seed.forward_flops[t] for seed, t in zip(run.counted, last, strict=True)]),
        mem=mean("mem") or 0.0,
        comp=mean("comp") or 0.0,
        num_updates=_mean([seed.num_updates[: t + 1].sum() for seed, t in zip(run.counted, last, strict=True)]),
        wall_seconds=wall if wall is not None else _mean([seed.train_seconds.sum() for seed in run.counted]),
    )


def _so_far(seed: Seed, t: int) -> dict[str, Any]:
    """Of `seed.summary` what can be said at arrival t."""
    found = {
        "final": float(seed.quality[t]),
        "mem": float(seed.num_params[: t + 1].sum()),
        "comp": float(seed.train_flops[: t + 1].sum()),
        "wall_seconds": seed.summary.get("wall_seconds", float(seed.train_seconds.sum())),
    }
    return found if np.isnan(seed.validation[t]) else {**found, "final_validation": float(seed.validation[t])}


def validation_score(seed: Seed, untrained: float) -> float:
    """The sum (vision) or mean (language model) over t = 1..B of what the validation data say: CER without a test set.

    An arrival before the first stage has no validation value in vision; it is charged `untrained`, which is one number
    for all runs of a comparison, so that it cannot rank them. NaN if a trained arrival has none.
    """
    values = np.where(np.isnan(seed.validation) & (seed.stage == 0), untrained, seed.validation)[1:]
    return float(values.sum() if "cer" in seed.summary else values.mean())


def untrained_value(comparison: Comparison) -> float:
    """What an untrained learner of this stream is charged: the mean of quality at t = 0."""
    return _mean([seed.quality[0] for run in comparison.runs for seed in run.counted])


def all_numbers(comparison: Comparison) -> list[Numbers]:
    """Run by run."""
    untrained = untrained_value(comparison)
    return [numbers_of(run, untrained) for run in comparison.runs]


def running_average(quality: Array, stage: Array) -> Array:
    """Mean over 1..t from the first stage on, [T]; NaN before it, where a learner has learned nothing."""
    trained = (stage > 0) & (np.arange(len(quality)) >= 1)
    total, count = np.cumsum(np.where(trained, quality, 0.0)), np.cumsum(trained)
    return np.where(trained, total / np.maximum(count, 1), np.nan)


def standard_error(values_ST: Array) -> Array | None:
    """Over seeds, [T]; None for one."""
    if len(values_ST) < 2:
        return None
    return values_ST.std(axis=0, ddof=1) / len(values_ST) ** 0.5


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values) / len(values))
