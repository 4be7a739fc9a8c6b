"""What a run has recorded about the mega-batches that arrived: their digests, and what was decided at each arrival.

RUN/arrivals.json       digest of each mega-batch
RUN/decisions.jsonl     one line per arrival: whether a stage was trained, the reason (wait=auto), the prequential score

Earlier versions of ALMA stored the decisions in arrivals.json, without prequential scores. Such a run is continued.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_whole
from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.ledger import Prequential


@dataclass(frozen=True)
class Decision:
    """What was recorded at one arrival, before its stage was trained."""

    due: bool
    """Whether a stage starts at this arrival."""
    prequential: Prequential | None = None
    """Score of the predictor on the validation data of the mega-batch that arrived; None if it was not measured."""
    reason: str | None = None
    """With wait=auto: why the stage starts or not, in words for the user."""


class Arrivals:
    """Reads and writes arrivals.json and decisions.jsonl in a run folder.

    Args:
        folder: the run folder.
        durable: if True, the disk must have stored the decisions before `write` returns.

    Raises:
        RunError: if one of the files is damaged.
    """

    def __init__(self, folder: Path, durable: bool):
        self._path = folder / "arrivals.json"
        self._lines = JsonLines(folder / "decisions.jsonl", durable)
        self._stored: dict[str, Any] = read_json(self._path) if self._path.exists() else {"digests": []}
        self.digests: list[str] = list(self._stored["digests"])
        """Digest of each mega-batch of the stream, in order."""
        # Earlier versions stored the decisions in arrivals.json. They stay there.
        self._decisions = {int(t): Decision(due) for t, due in self._stored.get("decisions", {}).items()}
        self.unwritten: list[dict[str, Any]] = []
        """Lines for decisions.jsonl that `write` will append."""
        for number, line in enumerate(self._lines.values(), start=1):
            try:
                self._decisions.update([_decision_of(line)])
            except (KeyError, TypeError, ValueError) as error:
                raise RunError(f"{self._lines.path}, line {number} is damaged ({error!r}): restore the file") from error

    def use(self, digests: Sequence[str]) -> None:
        """Write the digests of the stream to arrivals.json. Mega-batches may have been added since the run started."""
        if list(digests) != self.digests or not self._path.exists():
            self.digests = list(digests)
            self._stored["digests"] = self.digests
            write_whole(self._path, json.dumps(self._stored) + "\n")

    def decision(self, t: int) -> Decision | None:
        """Return what was recorded at arrival t; None if nothing was recorded yet."""
        return self._decisions.get(t)

    def add(self, t: int, decision: Decision) -> None:
        """Store the decision at arrival t. It is only in memory until `write` is called."""
        scores = decision.prequential.to_json() if decision.prequential else {}
        reason = {"reason": decision.reason} if decision.reason else {}
        self.unwritten.append({"t": t, "due": decision.due, **reason, **scores})
        self._decisions[t] = decision

    def restore(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add those decisions that are not stored yet. `lines` are lines of decisions.jsonl."""
        for t, decision in map(_decision_of, lines):
            stored = self._decisions.get(t)
            if stored is None or (decision.due and not stored.due):  # see `RunRecord.decision`
                self.add(t, decision)

    def write(self) -> None:
        """Append the decisions that are only in memory to decisions.jsonl."""
        # Append lines instead of writing all decisions again: with B arrivals, that would write O(B^2) bytes.
        if self.unwritten:
            self._lines.append(*self.unwritten)
            self.unwritten = []


def _decision_of(line: dict[str, Any]) -> tuple[int, Decision]:
    ahead = Prequential.from_json(line)
    return int(line["t"]), Decision(bool(line["due"]), ahead, line.get("reason"))
