"""The ledger: one row per arrival, and the paper's metrics as pure functions of the rows."""

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import RunError


@dataclass(frozen=True)
class Spent:
    """The cost of a step, summed over all members of a learner."""

    train_flops: int = 0
    """FLOPs of the forward and backward passes of all updates. Comp is their sum."""
    num_updates: int = 0
    """Number of optimizer updates."""
    train_seconds: float = 0.0
    """Wall-clock time of training."""
    validation_flops: int = 0
    """FLOPs of validation, and of ranking for growth. Reported separately; not part of Comp."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Spent)))


@dataclass(frozen=True)
class Scores:
    """What the evaluator measures of a learner. A field that does not apply is None and is not written."""

    num_params: int
    """Number of parameters of the predictor."""
    forward_flops: int
    """FLOPs of a prediction for one example; for a language model, for one sequence of tokens_per_sample tokens."""
    error_rate: float | None = None
    """Test error rate, a fraction between 0 and 1."""
    perplexity: float | None = None
    """Test perplexity per token."""
    word_perplexity: float | None = None
    """Test perplexity per word."""
    validation_loss: float | None = None
    """Validation loss, in nats per token or example."""
    validation_error_rate: float | None = None
    """Validation error rate, a fraction between 0 and 1."""
    validation_perplexity: float | None = None
    """Validation perplexity per token."""
    num_experts: int | None = None
    """Number of experts in each mixture."""
    num_members: int | None = None
    """Number of networks that predict together."""
    expert_load: list[list[float]] | None = None
    """Mixtures: for each layer, the share of the validation tokens or examples that each expert gets. For an ensemble,
    the layers of one member follow those of the member before."""
    overflow: float | None = None
    """Mixtures: share of the routed tokens whose expert was full."""

    def __post_init__(self):
        if (self.error_rate is None) == (self.perplexity is None):
            raise ValueError("scores hold either an error_rate or a perplexity")


@dataclass(frozen=True)
class LedgerRow:
    """The state of the learner after arrival t, and the cost since the arrival before."""

    t: int
    """Number of the arrival; 0 is the untrained learner."""
    stage: int
    """Number of the last finished stage; 0 before the first one."""
    updated: bool
    """Whether a stage was trained at this arrival."""
    scores: Scores
    spent: Spent = field(default_factory=Spent)

    def to_json(self) -> dict[str, Any]:
        """Return the row as one flat JSON object, without the fields that do not apply."""
        scores = {key: value for key, value in asdict(self.scores).items() if value is not None}
        return {"t": self.t, "stage": self.stage, "updated": self.updated, **scores, **asdict(self.spent)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LedgerRow":
        """Return the row in a flat JSON object. Unknown keys, which a later version may write, are ignored.

        Raises:
            KeyError, TypeError, ValueError: the object is not a ledger row.
        """
        scores = Scores(**{name: value[name] for name in _SCORES if name in value})
        spent = Spent(**{name: value[name] for name in _SPENT if name in value})
        return cls(int(value["t"]), int(value["stage"]), bool(value["updated"]), scores, spent)


# Computed once: a report may read half a million rows.
_SCORES = tuple(f.name for f in fields(Scores))
_SPENT = tuple(f.name for f in fields(Spent))


class Ledger:
    """The rows of a run in a file of JSON lines. A row is appended when its numbers are final.

    The ledger of a finished run may be compressed, as ledger.jsonl.gz. Such a file can only be read.

    Args:
        path: the file.
        durable: whether each row reaches the disk before `append` returns.
    """

    def __init__(self, path: str | Path, durable: bool = True):
        self.path = Path(path)
        self._durable = durable

    def rows(self) -> list[LedgerRow]:
        """Return all complete rows, in order. A last line that a kill has cut short is not a row.

        Raises:
            RunError: a line is damaged, or the arrivals are out of order. The message names file and line.
        """
        if not self.path.exists():
            return []
        rows: list[LedgerRow] = []
        content = self._whole_lines()
        lines: Sequence[bytes | str] = content.split(b"\n")[:-1]
        with suppress(UnicodeDecodeError):  # the loop below names the line
            lines = content.decode("utf-8").split("\n")[:-1]  # all at once: json would guess the encoding of each line
        for number, line in enumerate(lines, start=1):
            try:
                row = LedgerRow.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise RunError(f"{self.path}, line {number} is damaged ({error!r}): restore the file") from error
            if row.t != len(rows):
                raise RunError(f"{self.path}, line {number} holds arrival t={row.t}, t={len(rows)} was expected")
            rows.append(row)
        return rows

    def append(self, row: LedgerRow) -> None:
        """Add one complete line. The rest of an interrupted append is cut off first."""
        whole = self._whole_lines() if self.path.exists() else b""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.truncate(len(whole))
            file.seek(0, os.SEEK_END)
            file.write((json.dumps(row.to_json()) + "\n").encode())
            if self._durable:
                file.flush()
                os.fsync(file.fileno())

    def _whole_lines(self) -> bytes:
        # Bytes, not text: a damaged file may not be text, and `append` needs the exact length in bytes.
        content = self.path.read_bytes()
        if self.path.suffix == ".gz":
            try:
                content = gzip.decompress(content)
            except (OSError, EOFError, zlib.error) as error:
                raise RunError(f"{self.path} is damaged ({error!r}): restore the file") from error
        return content[: content.rfind(b"\n") + 1]


def cumulative_error_rate(rows: Sequence[LedgerRow], first: int = 1) -> float:
    """Return CER (equation 1): the error rate summed over t = 1..B. The untrained learner at t = 0 does not count.

    In the paper's first version it does: `first` = 0.
    """
    return sum(_measured(row.scores.error_rate) for row in rows if row.t >= first)


def average_perplexity(rows: Sequence[LedgerRow]) -> float:
    """Return the mean test perplexity over t = 1..B. While a learner waits, its untrained perplexity counts."""
    return _mean([_measured(row.scores.perplexity) for row in rows if row.t >= 1])


def average_perplexity_after_first_stage(rows: Sequence[LedgerRow]) -> float | None:
    """Return the mean test perplexity over the arrivals from the first stage on; None before the first stage."""
    perplexities = [_measured(row.scores.perplexity) for row in rows if row.t >= 1 and row.stage >= 1]
    return _mean(perplexities) if perplexities else None


def cumulative_params(rows: Sequence[LedgerRow]) -> int:
    """Return Mem: the number of parameters of the predictor, summed over t = 0..B."""
    return sum(row.scores.num_params for row in rows)


def cumulative_flops(rows: Sequence[LedgerRow]) -> int:
    """Return Comp: the training FLOPs of the whole stream."""
    return sum(row.spent.train_flops for row in rows)


def summarize(rows: Sequence[LedgerRow], cer_from: int = 1) -> dict[str, Any]:
    """Return the scalars of a run for summary.json. Integers are exact.

    Args:
        rows: the ledger.
        cer_from: first arrival that counts for CER.

    Raises:
        ValueError: the ledger has no arrival after t = 0.
    """
    if len(rows) < 2:
        raise ValueError("a run has a summary only after its first arrival")
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
    """Return summary.json of several seeds: mean and standard error of each scalar that all of them have.

    The standard error is the sample standard deviation divided by sqrt(number of seeds); None for one seed.
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
        raise ValueError("a ledger holds either error rates or perplexities; this one does not hold those asked for")
    return value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
