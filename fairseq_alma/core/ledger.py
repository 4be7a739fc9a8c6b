"""One row per arrival, and the paper's scalars as pure functions of the rows."""

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
    """What a learner spent on a step, all its members together."""

    train_flops: int = 0
    """Forward + backward of every update: what Comp charges."""
    num_updates: int = 0
    train_seconds: float = 0.0
    validation_flops: int = 0
    """Validation and ranking passes while training: reported apart, never charged."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Spent)))


@dataclass(frozen=True)
class Scores:
    """What the environment measures of a learner. A field that does not apply is None and not written."""

    num_params: int
    forward_flops: int
    """Of one example; of one input of tokens_per_sample for a language model."""
    error_rate: float | None = None
    """On the test set, a fraction."""
    perplexity: float | None = None
    """On the test set, per token."""
    word_perplexity: float | None = None
    validation_loss: float | None = None
    """Nats per token or example."""
    validation_error_rate: float | None = None
    validation_perplexity: float | None = None
    num_experts: int | None = None
    num_members: int | None = None
    expert_load: list[list[float]] | None = None
    """Mixtures: share of the validation tokens or examples that each expert gets, layer by layer;
    of an ensemble member after member."""
    overflow: float | None = None
    """Mixtures: share of the routed tokens that found their expert full."""

    def __post_init__(self):
        if (self.error_rate is None) == (self.perplexity is None):
            raise ValueError("scores hold either an error_rate or a perplexity")


@dataclass(frozen=True)
class LedgerRow:
    """Arrival t: the state of the learner after it, and what was spent since the arrival before."""

    t: int
    """0 is the untrained learner."""
    stage: int
    """The last stage that is finished; 0 is untrained."""
    updated: bool
    """Whether the model changed at this arrival."""
    scores: Scores
    spent: Spent = field(default_factory=Spent)

    def to_json(self) -> dict[str, Any]:
        """Flat, without the fields that do not apply."""
        scores = {key: value for key, value in asdict(self.scores).items() if value is not None}
        return {"t": self.t, "stage": self.stage, "updated": self.updated, **scores, **asdict(self.spent)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LedgerRow":
        """The row in a flat dict. Keys of a later release are passed over.

        Raises:
            KeyError, TypeError, ValueError: it is not a ledger row.
        """

        scores = Scores(**{name: value[name] for name in _SCORES if name in value})
        spent = Spent(**{name: value[name] for name in _SPENT if name in value})
        return cls(int(value["t"]), int(value["stage"]), bool(value["updated"]), scores, spent)


# A report reads half a million rows.
_SCORES = tuple(f.name for f in fields(Scores))
_SPENT = tuple(f.name for f in fields(Spent))


class Ledger:
    """The rows of a run in a file of JSON lines. A row is appended when its numbers are final.

    A finished one may be kept compressed, as ledger.jsonl.gz: it is read, and not appended to.
    """

    def __init__(self, path: str | Path, durable: bool = True):
        self.path = Path(path)
        self._durable = durable

    def rows(self) -> list[LedgerRow]:
        """All whole rows, in order. A last line cut short by a kill is not a row.

        Raises:
            RunError: a damaged line, or arrivals out of order, with file and line.
        """
        if not self.path.exists():
            return []
        rows: list[LedgerRow] = []
        content = self._whole_lines()
        lines: Sequence[bytes | str] = content.split(b"\n")[:-1]
        with suppress(UnicodeDecodeError):  # which is told line by line below
            lines = content.decode("utf-8").split("\n")[:-1]  # once: json would look for the encoding of every line
        for number, line in enumerate(lines, start=1):
            try:
                row = LedgerRow.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise RunError(f"{self.path}, line {number} is damaged ({error!r}): restore the file") from error
            if row.t != len(rows):
                raise RunError(f"{self.path}, line {number} holds arrival t={row.t}, t={len(rows)} was wanted")
            rows.append(row)
        return rows

    def append(self, row: LedgerRow) -> None:
        """Add one whole line. What a killed append left behind is cut off first."""
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
        # Bytes: what a disk left there need not be text, and their number must be that of the file.
        content = self.path.read_bytes()
        if self.path.suffix == ".gz":
            try:
                content = gzip.decompress(content)
            except (OSError, EOFError, zlib.error) as error:
                raise RunError(f"{self.path} is damaged ({error!r}): restore the file") from error
        return content[: content.rfind(b"\n") + 1]


def cumulative_error_rate(rows: Sequence[LedgerRow], first: int = 1) -> float:
    """CER, equation 1: the error rate summed over t = 1..B. The untrained t = 0 is not charged.

    The paper's first version charges it: `first` = 0.
    """
    return sum(_measured(row.scores.error_rate) for row in rows if row.t >= first)


def average_perplexity(rows: Sequence[LedgerRow]) -> float:
    """Mean test perplexity over t = 1..B: a learner that waits is charged its untrained perplexity."""
    return _mean([_measured(row.scores.perplexity) for row in rows if row.t >= 1])


def average_perplexity_after_first_stage(rows: Sequence[LedgerRow]) -> float | None:
    """Mean test perplexity over the arrivals from the first stage on; None before it."""
    perplexities = [_measured(row.scores.perplexity) for row in rows if row.t >= 1 and row.stage >= 1]
    return _mean(perplexities) if perplexities else None


def cumulative_params(rows: Sequence[LedgerRow]) -> int:
    """Mem: parameters of the learner summed over t = 0..B."""
    return sum(row.scores.num_params for row in rows)


def cumulative_flops(rows: Sequence[LedgerRow]) -> int:
    """Comp: training FLOPs of the whole stream."""
    return sum(row.spent.train_flops for row in rows)


def summarize(rows: Sequence[LedgerRow], cer_from: int = 1) -> dict[str, Any]:
    """The scalars of a run for summary.json. Exact integers stay integers.

    Args:
        rows: the ledger.
        cer_from: the first arrival that CER charges.

    Raises:
        ValueError: there is no arrival after t = 0 yet.
    """
    if len(rows) < 2:
        raise ValueError("a run is summed up after its first arrival")
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
    """`summary.json` of several seeds: mean and standard error of each scalar that all of them have.

    The standard error is the sample standard deviation over sqrt(number of seeds); None for one seed.
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
        raise ValueError("a ledger holds either error rates or perplexities: this one has none of the kind asked for")
    return value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
