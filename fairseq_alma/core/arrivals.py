"""What a run has recorded about the mega-batches that arrived: their digests, and what was decided at each arrival.

RUN/arrivals.json       digest of each mega-batch
RUN/decisions.jsonl     one line per arrival: whether a stage was trained, the reason (wait=auto), the prequential score
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_whole
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.json_types import value_of
from fairseq_alma.core.ledger import Prequential
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.settings import Count


@dataclass(frozen=True)
class Decision:
    """What is decided and recorded at one arrival, before its stage is trained."""

    due: bool
    """True if a stage starts at this arrival, False if the learner waits for more mega-batches."""
    reason: str | None = None
    """With wait=auto: why the stage starts or not, in words for the user."""
    is_skipped: bool = False
    """Whether no stage trains on the mega-batch that arrived."""
    prequential: Prequential | None = None
    """Score of the predictor on the validation data of the mega-batch that arrived; None if it was not measured."""


class StoredArrivals(TypedDict):
    """The content of arrivals.json."""

    digests: list[str]


def read_arrivals(folder: Path) -> StoredArrivals:
    """Return the content of arrivals.json in a run folder. Raise RunError if the file is damaged."""
    return read_json(RunFolder(folder).arrivals, StoredArrivals, advice="restore the file from a backup")


class Arrivals:
    """Reads and writes arrivals.json and decisions.jsonl in a run folder. Raises RunError if one of them is damaged.

    If `durable`, the disk has stored the decisions when `write` returns.
    """

    def __init__(self, folder: Path, durable: bool):
        paths = RunFolder(folder)
        self._path = paths.arrivals
        self._lines = JsonLines(paths.decisions, durable)
        self.digests: list[str] = list(read_arrivals(folder)["digests"]) if self._path.exists() else []
        """Digest of each mega-batch of the stream, in order."""
        self._decisions: dict[int, Decision] = {}
        self.unwritten: list[dict[str, Any]] = []
        """Lines for decisions.jsonl that `write` will append."""
        for number, (t, decision) in enumerate(self._lines.parsed(decision_of), start=1):
            if not 0 <= t - len(self._decisions) <= 1:
                raise RunError(
                    f"{self._lines.path}, line {number} is damaged (t is {t} after {len(self._decisions)} decisions): "
                    f"restore the file"
                )
            self._decisions[t] = decision

    def use(self, digests: Sequence[str]) -> None:
        """Write the digests of the stream to arrivals.json. Mega-batches may have been added since the run started."""
        if list(digests) != self.digests or not self._path.exists():
            self.digests = list(digests)
            write_whole(self._path, json.dumps(StoredArrivals(digests=self.digests)) + "\n")

    def decision(self, t: int) -> Decision | None:
        """Return what was recorded at arrival t; None if nothing was recorded yet."""
        return self._decisions.get(t)

    def add(self, t: int, decision: Decision) -> None:
        """Store the decision at arrival t. It is only in memory until `write` is called."""
        scores = decision.prequential.to_json() if decision.prequential else {}
        reason = {"reason": decision.reason} if decision.reason else {}
        skipped = {"skipped": True} if decision.is_skipped else {}
        self.unwritten.append({"t": t, "due": decision.due, **skipped, **reason, **scores})
        self._decisions[t] = decision

    def restore(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add those decisions that are not stored yet. `lines` are lines of decisions.jsonl."""
        for t, decision in map(decision_of, lines):
            stored = self._decisions.get(t)
            if stored is None or (decision.due and not stored.due):  # see `SeedRecord.decision`
                self.add(t, decision)

    def write(self) -> None:
        """Append the decisions that are only in memory to decisions.jsonl."""
        # Append lines instead of writing all decisions again: with B arrivals, that would write O(B^2) bytes.
        if self.unwritten:
            self._lines.append(*self.unwritten)
            self.unwritten = []


class _Line(TypedDict):
    """A line of decisions.jsonl, besides the prequential score."""

    t: Count
    due: bool
    skipped: NotRequired[bool]
    reason: NotRequired[str]


def decision_of(line: dict[str, Any]) -> tuple[int, Decision]:
    """Return the arrival and the decision in a line of decisions.jsonl. Raise ValueError if the line is damaged."""
    value_of(line, _Line)
    decision = Decision(line["due"], line.get("reason"), line.get("skipped", False), Prequential.from_json(line))
    return line["t"], decision
