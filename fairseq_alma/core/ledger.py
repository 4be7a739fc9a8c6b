"""The ledger (table of scores and costs) of a run, and functions that compute the paper's metrics from the ledger.

An arrival is the moment at which one mega-batch becomes available. The ledger has one row per arrival, and one row for
the untrained learner.
"""

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_whole
from fairseq_alma.core.json_lines import JsonLines


@dataclass(frozen=True)
class Spent:
    """Cost of one step that grows or trains a learner, summed over all members (networks) of the learner."""

    train_flops: int = 0
    """Number of floating-point operations (FLOPs) in the forward and backward passes of all updates. The paper's metric
    Comp is the sum of this number over all rows of the ledger."""
    num_updates: int = 0
    """Number of optimizer updates."""
    train_seconds: float = 0.0
    """Wall-clock time of training, in seconds."""
    validation_flops: int = 0
    """FLOPs of validation, which are not part of the metric Comp. For a growing mixture of experts, the FLOPs for
    ranking the experts before a growth are included."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Spent)))


@dataclass(frozen=True)
class Scores:
    """Scores and sizes of a learner, as measured by the evaluator.

    A field that does not apply to the learner is None and is not written to the ledger.
    """

    num_params: int
    """Number of parameters of the predictor, which is the network or ensemble that makes the current prediction."""
    forward_flops: int
    """FLOPs of one prediction. In vision, this is a prediction for one example. For language models, it is a prediction
    for one sequence of tokens_per_sample tokens."""
    error_rate: float | None = None
    """Test error rate, a fraction between 0 and 1."""
    perplexity: float | None = None
    """Test perplexity per token."""
    word_perplexity: float | None = None
    """Test perplexity per word."""
    validation_loss: float | None = None
    """Validation loss in nats, per token for language models and per example in vision."""
    validation_error_rate: float | None = None
    """Validation error rate, a fraction between 0 and 1."""
    validation_perplexity: float | None = None
    """Validation perplexity per token."""
    num_experts: int | None = None
    """Number of experts in each mixture of experts."""
    num_members: int | None = None
    """Number of networks whose outputs are combined into one prediction."""
    num_stored: int | None = None
    """With replay: number of examples (vision) or tokens (language models) that are kept for replay by later stages."""
    expert_load: list[list[float]] | None = None
    """For learners with mixtures of experts: expert_load[layer][expert] is the fraction of the validation tokens or
    examples that are routed to this expert. For an ensemble, the list contains first the layers of the first member,
    then the layers of the second member, and so on."""
    overflow: float | None = None
    """For mixtures of experts: fraction of the routed tokens that were dropped because their expert was full."""
    scored_tokens: int | None = None
    """Number of tokens on which an untrained language model was scored; None if all tokens were scored.

    To save time, such a model is scored only on the first tokens of the test set and of the validation set. If the
    number differs between the two sets, because one of them is very small, this is the larger number."""
    period_perplexities: list[float] | None = None
    """Chronological streams: perplexity per token on the test text of each period, also of those that arrive later.

    None if an untrained model was scored on the first tokens only."""

    def __post_init__(self):
        if (self.error_rate is None) == (self.perplexity is None):
            raise ValueError("scores must contain either an error_rate or a perplexity, but not both")


@dataclass(frozen=True)
class Prequential:
    """Score of a predictor on the validation data of a mega-batch that arrives only now ("test, then train").

    No stage that trained the predictor has used these data, neither for training nor for choosing an epoch.
    """

    error_rate: float
    """Error rate, a fraction between 0 and 1."""
    loss: float
    """Loss per example, in nats."""

    def to_json(self) -> dict[str, float]:
        """Return the two scores under the names that they have in the ledger."""
        return {"prequential_error_rate": self.error_rate, "prequential_loss": self.loss}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Prequential | None":
        """Return the scores in a JSON object that contains the result of `to_json`; None if it contains no scores.

        Raises:
            KeyError: if only one of the two scores is in the object.
        """
        if "prequential_error_rate" not in value and "prequential_loss" not in value:
            return None
        return cls(value["prequential_error_rate"], value["prequential_loss"])


@dataclass(frozen=True)
class LedgerRow:
    """Scores of the learner after arrival t, and the cost of the steps since the previous arrival."""

    t: int
    """Index of the arrival, from 1. The row with index 0 describes the untrained learner."""
    stage: int
    """Index of the last finished stage, counted from 1; 0 if no stage has been trained yet."""
    updated: bool
    """Whether a stage was trained at this arrival."""
    scores: Scores
    spent: Spent = field(default_factory=Spent)
    changed_settings: dict[str, list[Any]] | None = None
    """If the run was forked, so that it has other settings from the stage of this arrival on: name of each changed
    setting -> old value, new value."""
    prequential: Prequential | None = None
    """In vision: score on the validation data of mega-batch t of the predictor from before arrival t.

    None at t = 0, and in ledgers of earlier versions."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as a flat JSON object, without the fields that are None."""
        scores = {key: value for key, value in asdict(self.scores).items() if value is not None}
        changed = {"changed_settings": self.changed_settings} if self.changed_settings else {}
        ahead = self.prequential.to_json() if self.prequential else {}
        row = {"t": self.t, "stage": self.stage, "updated": self.updated, **scores, **ahead}
        return {**row, **asdict(self.spent), **changed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LedgerRow":
        """Return the row for a JSON object that `to_json` returned.

        Keys that this version of ALMA does not know are ignored, because a later version may have written them.

        Raises:
            KeyError, TypeError, ValueError: if the object is not a ledger row.
        """
        scores = Scores(**{name: value[name] for name in _SCORES if name in value})
        spent = Spent(**{name: value[name] for name in _SPENT if name in value})
        changed = value.get("changed_settings")
        ahead = Prequential.from_json(value)
        return cls(int(value["t"]), int(value["stage"]), bool(value["updated"]), scores, spent, changed, ahead)


# Compute the field names only once and not for every row, because a report may read half a million rows.
_SCORES = tuple(f.name for f in fields(Scores))
_SPENT = tuple(f.name for f in fields(Spent))


class Ledger:
    """The ledger file of a run, with one row (JSON object) per line. Rows are appended and never changed.

    Exception: the last row is removed if a stage is trained at this arrival after all (see `RunRecord.decision`).

    The ledger of a finished run may be compressed as ledger.jsonl.gz. No rows can be added to a compressed ledger.

    Args:
        path: path of the file.
        durable: if True, `append` waits until the disk has stored the row.
    """

    def __init__(self, path: str | Path, durable: bool = True):
        self.path = Path(path)
        self._lines = JsonLines(path, durable)

    def rows(self) -> list[LedgerRow]:
        """Return all complete rows, in order. Ignore an incomplete last line, which a killed process may have left.

        Raises:
            RunError: if a line is damaged or the arrivals are out of order. The message contains file and line number.
        """
        if not self.path.exists():
            return []
        rows: list[LedgerRow] = []
        content = self._read_complete_lines()
        lines: Sequence[bytes | str] = content.split(b"\n")[:-1]
        # Decode all lines at once. This is faster, because json.loads would detect the encoding of each line
        # separately. If the decoding fails, `lines` still contains bytes, and the loop below raises an error with the
        # number of the damaged line.
        with suppress(UnicodeDecodeError):
            lines = content.decode("utf-8").split("\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                row = LedgerRow.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise RunError(
                    f"{self.path}, line {number} is damaged ({error!r}): restore the file from a backup"
                ) from error
            if row.t != len(rows):
                raise RunError(
                    f"{self.path}, line {number} contains arrival t={row.t}, expected t={len(rows)}: "
                    f"restore the file from a backup"
                )
            rows.append(row)
        return rows

    def remove_last(self) -> None:
        """Remove the last row. The file is replaced by a new one, so that it is complete at any moment."""
        write_whole(self.path, b"".join(self._read_complete_lines().splitlines(keepends=True)[:-1]).decode())

    def append(self, row: LedgerRow) -> None:
        """Append a row to the file. First remove an incomplete last line, which a killed process may have left."""
        self._lines.append(row.to_json())

    def _read_complete_lines(self) -> bytes:
        if self.path.suffix != ".gz":
            return self._lines.complete_lines()
        try:
            content = gzip.decompress(self.path.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise RunError(f"{self.path} is damaged ({error!r}): restore the file from a backup") from error
        return content[: content.rfind(b"\n") + 1]


def cumulative_error_rate(rows: Sequence[LedgerRow], first: int = 1) -> float:
    """Return CER, the cumulative error rate (equation 1 of the paper): the sum of the error rates over t = 1..B.

    Args:
        rows: rows of the ledger.
        first: first arrival whose error rate is added. The default, 1, leaves out the untrained learner (t = 0). With
            0, the untrained learner is included, as in the first version of the paper.
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

    The row of arrival t scores the predictor from before this arrival. So the mean is over the predictors after the
    arrivals 1..B-1, each scored on the validation data of the next mega-batch. An untrained predictor is scored too.

    Returns:
        The mean, a fraction between 0 and 1. None if B = 1, or if the score of an arrival is missing.
    """
    scores = [row.prequential for row in rows if row.t >= 2]
    known = [score.error_rate for score in scores if score is not None]
    return _mean(known) if known and len(known) == len(scores) else None


def prequential_perplexity(rows: Sequence[LedgerRow]) -> float | None:
    """Return the prequential validation perplexity of a language model: the geometric mean over t = 1..B.

    The geometric mean is exp of the mean loss per token. With the arithmetic mean, an untrained model, whose perplexity
    is about the size of the vocabulary, would count hundreds of times as much as a trained one.

    Returns:
        The perplexity. None if the validation perplexity of an arrival is missing or is not a number.
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

    TiC-LM calls them backward transfer, in-distribution and forward transfer (Li et al. 2025), and subtracts from each
    loss that of a model trained on all periods.

    An average without values is left out.
    """
    logs: dict[str, list[float]] = {}
    for row in rows:
        for j, value in enumerate(row.scores.period_perplexities or [], start=1):
            name = "in_distribution" if j == row.t else "backward" if j < row.t else "forward"
            if row.t >= 1:
                logs.setdefault(name, []).append(math.log(value))
    order = ("backward", "in_distribution", "forward")
    return {f"{name}_perplexity": math.exp(_mean(logs[name])) for name in order if name in logs}


def cumulative_params(rows: Sequence[LedgerRow]) -> int:
    """Return the paper's metric Mem: the number of parameters of the predictor, summed over t = 0..B."""
    return sum(row.scores.num_params for row in rows)


def cumulative_flops(rows: Sequence[LedgerRow]) -> int:
    """Return the paper's metric Comp: the number of training FLOPs, summed over all arrivals."""
    return sum(row.spent.train_flops for row in rows)


PREQUENTIAL_KEYS = ("prequential_error_rate", "prequential_perplexity")
"""Names of the prequential score in summary.json: of vision runs, and of language models."""


def summarize(rows: Sequence[LedgerRow], cer_from: int = 1) -> dict[str, Any]:
    """Return the content of summary.json for one run: the metrics of the run, and its numbers of arrivals and stages.

    The prequential score is left out if the ledger does not have it for all arrivals.

    Args:
        rows: all rows of the ledger.
        cer_from: first arrival whose error rate is added to CER, 0 or 1.

    Raises:
        ValueError: if the ledger has no arrival after t = 0.
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
    ahead = prequential_error_rate(rows) if is_vision else prequential_perplexity(rows)
    if ahead is not None:
        quality[PREQUENTIAL_KEYS[0 if is_vision else 1]] = ahead
    validation = last.scores.validation_perplexity or last.scores.validation_error_rate
    return {
        **quality,
        "final_validation": validation,
        "mem": cumulative_params(rows),
        "comp": cumulative_flops(rows),
        "num_arrivals": last.t,
        "num_stages": last.stage,
    }


def mean_and_standard_error(per_seed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of summary.json for the runs of several seeds: mean and standard error of each metric.

    A metric is left out if the summary of at least one seed does not contain it. The standard error is the sample
    standard deviation divided by sqrt(number of seeds). It is None if there is only one seed.

    Args:
        per_seed: the summary of each run, as returned by `summarize`.
    """
    mean: dict[str, float] = {}
    stderr: dict[str, float | None] = {}
    for key in per_seed[0]:
        values = [value for summary in per_seed if isinstance(value := summary.get(key), int | float)]
        if len(values) < len(per_seed):
            continue
        mean[key] = _mean(values)
        if len(values) > 1:
            variance = sum((value - mean[key]) ** 2 for value in values) / (len(values) - 1)
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
