"""The ledger (table of scores and costs) of a run. `fairseq_alma.core.metrics` computes the paper's metrics from it.

An arrival is the moment at which one mega-batch becomes available. The ledger has one row per arrival, and one row for
the untrained learner.
"""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.json_types import Amount, Fraction, Loss, Perplexity, value_of
from fairseq_alma.core.settings import Count, NonNegative


@dataclass(frozen=True)
class Spent:
    """Cost of one step that grows or trains a learner, summed over all members (networks) of the learner."""

    train_flops: NonNegative = 0
    """Number of floating-point operations (FLOPs) in the forward and backward passes of all updates. The paper's metric
    Comp is the sum of this number over all rows of the ledger."""
    num_updates: NonNegative = 0
    """Number of optimizer updates."""
    train_seconds: Amount = 0.0
    """Wall-clock time of training, in seconds."""
    validation_flops: NonNegative = 0
    """FLOPs of validation, which are not part of the metric Comp. For a growing mixture of experts, the FLOPs for
    ranking the experts before a growth are included."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Spent)))


class GateCheck(TypedDict):
    """The perplexities of two predictors on one text."""

    text: str
    """What the text is."""
    deployed: Perplexity
    """Perplexity per token of the deployed predictor."""
    new: Perplexity
    """Perplexity per token of the new predictor."""
    passed: bool


class GateDecision(TypedDict):
    """Whether the predictor of a stage was deployed (setting `gate`)."""

    passed: bool
    deployed: NonNegative
    """The stage whose predictor is deployed from now on."""
    checks: list[GateCheck]


@dataclass(frozen=True)
class Scores:
    """Scores and sizes of a learner, as measured by the evaluator.

    A field that does not apply to the learner is None and is not written to the ledger.
    """

    num_params: NonNegative
    """Number of parameters of the predictor, which is the network or ensemble that makes the current prediction."""
    forward_flops: NonNegative
    """FLOPs of one prediction. In vision, this is a prediction for one example. For language models, it is a prediction
    for one sequence of tokens_per_sample tokens."""
    error_rate: Fraction | None = None
    """Test error rate, a fraction between 0 and 1."""
    perplexity: Perplexity | None = None
    """Test perplexity per token."""
    word_perplexity: Perplexity | None = None
    """Test perplexity per word."""
    bits_per_byte: Loss | None = None
    """Test loss in bits per UTF-8 byte of the text. None if the stream does not say how many bytes the text has."""
    validation_loss: Loss | None = None
    """Validation loss in nats, per token for language models and per example in vision."""
    validation_error_rate: Fraction | None = None
    """Validation error rate, a fraction between 0 and 1."""
    validation_perplexity: Perplexity | None = None
    """Validation perplexity per token."""
    num_experts: NonNegative | None = None
    """Number of experts in each mixture of experts."""
    num_members: NonNegative | None = None
    """Number of networks whose outputs are combined into one prediction."""
    num_stored: NonNegative | None = None
    """With replay: number of examples (vision) or tokens (language models) that are kept for replay by later stages."""
    expert_load: list[list[Amount]] | None = None
    """For learners with mixtures of experts: expert_load[layer][expert] is the fraction of the validation tokens or
    examples that are routed to this expert. For an ensemble, the list contains first the layers of the first member,
    then the layers of the second member, and so on."""
    overflow: Fraction | None = None
    """For mixtures of experts: fraction of the routed tokens that were dropped because their expert was full."""
    scored_tokens: NonNegative | None = None
    """Number of tokens on which an untrained language model was scored; None if all tokens were scored.

    To save time, such a model is scored only on the first tokens of the test set and of the validation set. If the
    number differs between the two sets, because one of them is very small, this is the larger number."""
    period_perplexities: list[Perplexity] | None = None
    """Chronological streams: perplexity per token on the test text of each period, also of those that arrive later.

    None if an untrained model was scored on the first tokens only."""
    score_seconds: Amount | None = field(default=None, compare=False)
    """Language models: wall-clock time of these scores, of that of the gate and of the new mega-batch, in seconds."""
    gate: GateDecision | None = None
    """With `gate`: whether the predictor of the last stage was deployed, and why."""

    def __post_init__(self):
        if (self.error_rate is None) == (self.perplexity is None):
            raise ValueError("scores must contain either an error_rate or a perplexity, but not both")


@dataclass(frozen=True)
class Prequential:
    """Score of a predictor on data of a mega-batch that arrives only now ("test, then train").

    No stage that trained the predictor has used these data, neither for training nor for choosing an epoch. In vision,
    they are the validation data of the mega-batch. For language models, see `num_tokens`.
    """

    error_rate: Fraction | None
    """In vision: error rate, a fraction between 0 and 1."""
    loss: Loss
    """Loss per example or token, in nats."""
    num_tokens: Count | None = None
    """Language models: number of tokens that were scored, of the mega-batch's own validation text, or, if the stream
    has none, the first ones of its training text."""

    def to_json(self) -> dict[str, float]:
        """Return the scores under the names that they have in the ledger."""
        values = {
            "prequential_error_rate": self.error_rate,
            "prequential_loss": self.loss,
            "prequential_tokens": self.num_tokens,
        }
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Prequential | None":
        """Return the scores in a JSON object; None if it has none. Raise ValueError if one is missing or no score."""
        if _Ahead.__annotations__.keys().isdisjoint(value):
            return None
        value_of(value, _Ahead)
        error_rate, num_tokens = value.get("prequential_error_rate"), value.get("prequential_tokens")
        if error_rate is None and num_tokens is None:
            raise ValueError("prequential_error_rate or prequential_tokens is missing")
        return cls(error_rate, value["prequential_loss"], num_tokens)


class _Ahead(TypedDict):
    """The keys of `Prequential.to_json`."""

    prequential_error_rate: NotRequired[Fraction]
    prequential_loss: Loss
    prequential_tokens: NotRequired[Count]


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
    """Score on data of mega-batch t of the predictor from before arrival t. None at t = 0.

    Language models have it if the stream has periods, or if the mega-batch was added to the stream later."""
    is_skipped: bool = False
    """Whether no stage trains on mega-batch t (setting `skip_mega_batches`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as a flat JSON object, without the fields that are None."""
        scores = {key: value for key, value in asdict(self.scores).items() if value is not None}
        changed = {"changed_settings": self.changed_settings} if self.changed_settings else {}
        prequential = self.prequential.to_json() if self.prequential else {}
        skipped = {"skipped": True} if self.is_skipped else {}
        row = {"t": self.t, "stage": self.stage, "updated": self.updated, **skipped, **scores, **prequential}
        return {**row, **asdict(self.spent), **changed}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LedgerRow":
        """Return the row for a JSON object that `to_json` returned. Raise ValueError if it is no ledger row.

        Unknown keys are ignored, because a later version may have written them.
        """
        head = value_of(value, _Head)
        if None in value.values():
            raise ValueError("a value is null, but a row only has the values that are known")
        scores, spent, prequential = value_of(value, Scores), value_of(value, Spent), Prequential.from_json(value)
        changed, skipped = head.get("changed_settings"), head.get("skipped", False)
        return cls(head["t"], head["stage"], head["updated"], scores, spent, changed, prequential, skipped)


def deployed_stage(rows: Sequence[LedgerRow]) -> int:
    """Return the stage whose predictor is deployed, in predictor.json, after these rows; 0 if there is none."""
    gate = rows[-1].scores.gate if rows else None
    return gate["deployed"] if gate else rows[-1].stage if rows else 0


class _Head(TypedDict):
    """The keys of a row besides those of the scores and the cost."""

    t: NonNegative
    stage: NonNegative
    updated: bool
    skipped: NotRequired[bool]
    changed_settings: NotRequired[dict[str, list[Any]]]


_MAX_LEDGER_BYTES, _MAX_RATIO = 1 << 24, 100
"""A compressed ledger is damaged if it decompresses to more than _MAX_LEDGER_BYTES + _MAX_RATIO times its size. Rows
are compressed to about a tenth of their size."""


class Ledger:
    """The ledger file of a run, with one row (JSON object) per line. Rows are appended and never changed.

    Exception: the last row is removed if a stage is trained at this arrival after all (see `SeedRecord.decision`).

    The ledger of a finished run may be compressed as ledger.jsonl.gz. No rows can be added to it. If `durable`, the
    disk has stored the row when `append` returns.
    """

    def __init__(self, path: str | Path, durable: bool = True):
        self.path = Path(path)
        self._lines = _CompressibleLines(path, durable)

    def rows(self) -> list[LedgerRow]:
        """Return all complete rows, in order. Ignore an incomplete last line, which a killed process may have left.

        If a line is damaged or the arrivals are out of order, raise a RunError that names the file and the line.
        """
        rows = self._lines.parsed(LedgerRow.from_json)
        for number, row in enumerate(rows):
            if row.t != number:
                raise RunError(
                    f"{self.path}, line {number + 1} contains arrival t={row.t}, expected t={number}: "
                    f"restore the file from a backup"
                )
        return rows

    def remove_from(self, t: int) -> None:
        """Remove the row of arrival t and all later ones."""
        self._lines.keep_if(lambda row: row["t"] < t)

    def append(self, *rows: LedgerRow) -> None:
        """Append rows to the file. First remove an incomplete last line, which a killed process may have left."""
        self._lines.append(*(row.to_json() for row in rows))


class _CompressibleLines(JsonLines):
    """The lines of a file that may be compressed."""

    def complete_lines(self) -> bytes:
        if self.path.suffix != ".gz" or not self.path.exists():
            return super().complete_lines()
        most_bytes = _MAX_LEDGER_BYTES + _MAX_RATIO * self.path.stat().st_size
        try:
            with gzip.open(self.path) as file:
                content = file.read(most_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise RunError(f"{self.path} is damaged ({error!r}): restore the file from a backup") from error
        if len(content) > most_bytes:
            raise RunError(f"{self.path} decompresses to more than {most_bytes:,} bytes: restore it from a backup")
        return content[: content.rfind(b"\n") + 1]
