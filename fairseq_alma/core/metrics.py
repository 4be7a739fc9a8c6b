"""The paper's metrics, and further ones, computed from the rows of a ledger. `summarize` makes summary.json of them."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.json_types import Amount, Fraction, Perplexity
from fairseq_alma.core.ledger import Ledger, LedgerRow
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.settings import NonNegative


def cumulative_error_rate(rows: Sequence[LedgerRow], first: int = 1) -> float:
    """Return CER, the cumulative error rate (equation 1 of the paper): the sum of the error rates over t = 1..B.

    With `first` = 0, the untrained learner (t = 0) is included, as in the first version of the paper.
    """
    return sum(_measured(row.scores.error_rate) for row in rows if row.t >= first)


def average_perplexity(rows: Sequence[LedgerRow]) -> float:
    """Return the mean test perplexity over t = 1..B.

    The mean includes the arrivals before the first stage, with the perplexity of the untrained learner.
    """
    return _mean([_measured(row.scores.perplexity) for row in rows if row.t >= 1])


def average_perplexity_after_first_stage(rows: Sequence[LedgerRow]) -> float | None:
    """Return the mean test perplexity over all arrivals from the first trained stage on; None if there is no stage."""
    perplexities = [_measured(row.scores.perplexity) for row in rows if row.t >= 1 and row.stage >= 1]
    return _mean(perplexities) if perplexities else None


def prequential_error_rate(rows: Sequence[LedgerRow]) -> float | None:
    """Return the prequential validation error: the mean of `LedgerRow.prequential.error_rate` over t = 2..B.

    The row of arrival t scores the predictor from before this arrival. So the mean, a fraction between 0 and 1, is over
    the predictors after the arrivals 1..B-1, each scored on the validation data of the next mega-batch. An untrained
    predictor is scored too. The result is None if B = 1, or if the score of an arrival is missing.
    """
    scores = [row.prequential.error_rate if row.prequential else None for row in rows if row.t >= 2]
    known = [score for score in scores if score is not None]
    return _mean(known) if known and len(known) == len(scores) else None


def prequential_perplexity(rows: Sequence[LedgerRow]) -> float | None:
    """Return the prequential validation perplexity of a language model: the geometric mean over t = 1..B.

    The geometric mean is exp of the mean loss per token. With the arithmetic mean, an untrained model, whose perplexity
    is about the size of the vocabulary, would count hundreds of times as much as a trained one. It is None if the
    validation perplexity of an arrival is missing or is not a number.
    """
    values = [row.scores.validation_perplexity for row in rows if row.t >= 1]
    known = [math.log(value) for value in values if value is not None and value > 0]
    return math.exp(_mean(known)) if known and len(known) == len(values) else None


def period_averages(rows: Sequence[LedgerRow]) -> dict[str, float]:
    """Return averages of the matrix of perplexities, with one row per arrival and one column per period.

    Row t of the matrix belongs to the predictor after arrival t, for t = 1..B. An average is a geometric mean, that is,
    exp of the mean loss, over one part of the matrix:

    backward_perplexity         below the diagonal: periods that arrived before the last one
    in_distribution_perplexity  the diagonal: the period that has just arrived
    forward_perplexity          above the diagonal: periods that arrive later

    TiC-LM calls them backward transfer, in-distribution and forward transfer (Li et al. 2025). Its regret, which
    subtracts from each loss that of a model trained on all periods, is in the report: it needs a second run.

    An average without values is left out.
    """
    losses = {row.t: period_losses(row) for row in rows if row.t >= 1}
    return {f"{name}_perplexity": perplexity_of(loss) for name, loss in averages_by_part(losses).items()}


def period_losses(row: LedgerRow) -> list[float]:
    """Return the loss per token, in nats, on the test text of each period; [] if they were not measured."""
    return [math.log(value) for value in row.scores.period_perplexities or []]


def averages_by_part(matrix: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """Return the mean over each part of a matrix of losses: `backward`, `in_distribution` and `forward`.

    The matrix maps an arrival t to a value for each period, from the period that arrives at t = 1 on. See
    `period_averages` for the parts. A value that is NaN, and a part without values, is left out.
    """
    values: dict[str, list[float]] = {"backward": [], "in_distribution": [], "forward": []}
    for t, row in matrix.items():
        for j, value in enumerate(row, start=1):
            if math.isnan(value):
                continue
            values["in_distribution" if j == t else "backward" if j < t else "forward"].append(value)
    return {name: _mean(found) for name, found in values.items() if found}


UNUSUAL_NATS = 0.5
"""How far the loss on a new mega-batch may lie outside of what was seen before, in nats per token: a factor of 1.65 in
perplexity. Ordinary periods of Python's proposals differed from the validation set by at most 0.43."""


def excess_losses(rows: Sequence[LedgerRow]) -> dict[int, float]:
    """Return, by arrival, how much harder the new mega-batch was than the validation set, in nats per token.

    Both are scored with the same language model, that from before the arrival, so the progress of the run does not
    change the difference. Arrivals without a prequential score of a trained model are left out.
    """
    return {
        row.t: row.prequential.loss - before.scores.validation_loss
        for before, row in pairwise(rows)
        if row.prequential is not None and row.prequential.num_tokens and before.scores.validation_loss is not None
    }


def unusual_arrivals(excess: Mapping[int, float]) -> list[int]:
    """Return the arrivals whose mega-batches are far harder or easier than earlier ones. See `excess_losses`.

    An unusual arrival does not widen the range for later ones.
    """
    low = high = 0.0
    found = []
    for t, value in sorted(excess.items()):
        if low - UNUSUAL_NATS <= value <= high + UNUSUAL_NATS:
            low, high = min(low, value), max(high, value)
        else:
            found.append(t)
    return found


def cumulative_params(rows: Sequence[LedgerRow]) -> int:
    """Return the paper's metric Mem: the number of parameters of the predictor, summed over t = 0..B."""
    return sum(row.scores.num_params for row in rows)


def cumulative_flops(rows: Sequence[LedgerRow]) -> int:
    """Return the paper's metric Comp: the number of training FLOPs, summed over all arrivals."""
    return sum(row.spent.train_flops for row in rows)


PREQUENTIAL_KEYS = ("prequential_error_rate", "prequential_perplexity")
"""Names of the prequential score in summary.json: of vision runs, and of language models."""

FINAL_KEY = "final_validation"
"""Name of the validation score after the last arrival in summary.json."""


def summarize(rows: Sequence[LedgerRow], cer_from: int = 1) -> dict[str, Any]:
    """Return the content of summary.json for one run: the metrics of the run, and its numbers of arrivals and stages.

    The prequential score is left out if the ledger does not have it for all arrivals. For `cer_from`, 0 or 1, see
    `cumulative_error_rate`. Raise ValueError if the ledger has no arrival after t = 0.
    """
    if len(rows) < 2:
        raise ValueError(
            "the ledger has no arrival yet after t = 0, so there is nothing to summarize: continue the run"
        )
    last = rows[-1]
    quality: dict[str, float | None]
    if last.scores.error_rate is not None:
        quality = {"cer": cumulative_error_rate(rows, cer_from), "final": last.scores.error_rate}
    else:
        quality = {
            "average_perplexity": average_perplexity(rows),
            "average_perplexity_after_first_stage": average_perplexity_after_first_stage(rows),
            "final": last.scores.perplexity,
        }
    is_vision = last.scores.error_rate is not None
    quality |= period_averages(rows)
    prequential = prequential_error_rate(rows) if is_vision else prequential_perplexity(rows)
    if prequential is not None:
        quality[PREQUENTIAL_KEYS[0 if is_vision else 1]] = prequential
    validation = last.scores.validation_perplexity or last.scores.validation_error_rate
    return {
        **quality,
        FINAL_KEY: validation,
        "mem": cumulative_params(rows),
        "comp": cumulative_flops(rows),
        "num_arrivals": last.t,
        "num_stages": last.stage,
    }


def score_of(summary: Mapping[str, Any]) -> float:
    """Return the score of a run, or of its seeds, for Hydra. A lower score is better; it is NaN for a diverged run.

    It is the prequential score, or for images with only one arrival, which have none, the final validation score.

    Args:
        summary: the content of summary.json of a run, or the mean over its seeds.
    """
    final = summary.get(FINAL_KEY)
    if final is None or not math.isfinite(final):
        return math.nan
    return next((summary[key] for key in PREQUENTIAL_KEYS if summary.get(key) is not None), final)


class Summary(TypedDict, total=False):
    """The content of summary.json, as far as it is read. Metrics that a run does not have are missing."""

    cer: Amount
    average_perplexity: Perplexity
    average_perplexity_after_first_stage: Perplexity | None
    final: Perplexity | Fraction
    final_validation: Perplexity | Fraction | None
    prequential_error_rate: Fraction
    prequential_perplexity: Perplexity
    forgetting: float
    backward_transfer: float
    forward_transfer: float
    mem: Amount
    comp: Amount
    num_arrivals: NonNegative
    num_stages: NonNegative
    wall_seconds: Amount | None


class SummaryFile(Summary, total=False):
    """The content of summary.json of one run, or of the runs of several seeds."""

    mean: dict[str, Any]
    stderr: dict[str, Any]
    per_seed: list[Summary]


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of summary.json in a folder. Raise RunError if the file is damaged."""
    advice = "remove the file, and run the training command again, which writes it"
    found = dict(read_json(folder / "summary.json", SummaryFile, advice=advice))
    if not found:
        raise RunError(f"{folder / 'summary.json'} is damaged (it has no metrics): {advice}")
    return found


def check_summary(ledger: Path, rows: Sequence[LedgerRow], summary: Mapping[str, Any], cer_from: int = 1) -> None:
    """Compare the metrics in `summary`, the content of summary.json, with those of the ledger with these rows.

    A row can be damaged in such a way that it is still a row. Then its numbers do not give these metrics, and RunError
    is raised. The summary may lack metrics, and may belong to another number of arrivals.
    """
    if len(rows) < 2 or summary.get("num_arrivals") != rows[-1].t:
        return
    for name, value in summarize(rows, cer_from).items():
        # The logarithm may be computed in another way on another machine.
        if name in summary and not _is_same(summary[name], value):
            raise RunError(
                f"{ledger} gives {name} {value}, but summary.json beside it says {summary[name]}, so one of the two is "
                f"damaged: restore both from a backup, or, if only summary.json is wrong, remove it"
            )


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a loss in nats; infinity if it is too large for a float."""
    return math.inf if loss >= 700 else math.exp(loss)  # NaN stays NaN


def checked_rows(folder: Path, cer_from: int = 1) -> list[LedgerRow]:
    """Return the rows of the ledger in a run folder. For `cer_from` and the errors, see `check_summary`."""
    summary = read_summary(folder) if (folder / "summary.json").exists() else {}
    rows = Ledger(folder / "ledger.jsonl").rows()
    check_summary(folder / "ledger.jsonl", rows, summary, cer_from)
    return rows


def _is_same(a: Any, b: float | None) -> bool:
    if b is None or type(a) not in (int, float):
        return a is b
    return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def write_mean(folder: Path, runs: Sequence[Path]) -> None:
    """Write summary.json of the folder that contains the runs of several seeds: the means over these runs."""
    write_json(RunFolder(folder).summary, mean_and_standard_error([read_summary(run) for run in runs]))


def mean_and_standard_error(per_seed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of summary.json for the runs of several seeds: mean and standard error of each metric.

    A metric is left out if the summary of at least one seed does not contain it. The standard error is the sample
    standard deviation divided by sqrt(number of seeds). It is None if there is only one seed.
    """
    mean: dict[str, float] = {}
    stderr: dict[str, float | None] = {}
    for key in per_seed[0]:
        values = [value for summary in per_seed if isinstance(value := summary.get(key), int | float)]
        if len(values) < len(per_seed):
            continue
        mean[key] = _mean(values)
        if len(values) > 1:
            # Not a power, which raises OverflowError for the perplexity of a diverged run.
            variance = sum((value - mean[key]) * (value - mean[key]) for value in values) / (len(values) - 1)
            stderr[key] = (variance / len(values)) ** 0.5
        else:
            stderr[key] = None
    return {"mean": mean, "stderr": stderr, "per_seed": list(per_seed)}


def _measured(value: float | None) -> float:
    if value is None:
        raise ValueError(
            "this ledger lacks the requested metric: a ledger contains either error rates (vision) or perplexities "
            "(language models), so request the metric that it contains"
        )
    return value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
