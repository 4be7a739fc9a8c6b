"""Several seeds computed together: one set of done marks, a ledger each."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.core.ledger import LedgerRow, Scores, Spent
from fairseq_alma.core.run_record import RunRecord


class StackRecord:
    """S runs in lock step, their stages shared. Every step answers with a list, one entry a seed.

    A stage of which a kill has left no mark is done again for all seeds at once: computed alone, a seed would
    differ from itself in the stack by rounding.

    Args:
        records: one a seed, all made with the same `stages` folder.
    """

    def __init__(self, records: Sequence[RunRecord]):
        self.records = list(records)

    def stage_folder(self, k: int) -> Path:
        """Where stage k lives, of all seeds."""
        return self.records[0].stage_folder(k)

    def step(self, k: int, name: str, learner: Any, do: Callable[[], list[Any]]) -> list[Any]:
        """As RunRecord.step, for all seeds."""
        results = self.records[0].step(k, name, learner, do)
        if len(results) != len(self.records):
            raise ValueError(f"step {name!r} of stage {k} has {len(results)} results for {len(self.records)} seeds")
        return results

    def decision(self, t: int, due: bool) -> bool:
        """As RunRecord.decision: the same for all seeds, and the first one's where a kill came between them."""
        for record in self.records:
            due = record.decision(t, due)
        return due

    def arrival(self, t: int, stage: int, updated: bool, scores: list[Scores], spent: Sequence[list[Spent]]) -> None:
        """As RunRecord.arrival: a row in each seed's ledger."""
        for number, record in enumerate(self.records):
            record.arrival(t, stage, updated, scores[number], [step[number] for step in spent])

    def rows(self) -> list[list[LedgerRow]]:
        """The ledgers so far, seed after seed."""
        return [record.rows() for record in self.records]
