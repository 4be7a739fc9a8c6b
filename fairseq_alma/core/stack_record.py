"""The record of the runs of several seeds that are trained together.

Each run has its own run folder and ledger. The runs share the done marks (files with the results of finished steps).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from fairseq_alma.core.ledger import LedgerRow, Scores
from fairseq_alma.core.protocol import Cost, Stored, T
from fairseq_alma.core.run_record import RunRecord


class StackRecord:
    """Records the runs of several seeds that are trained together. Each step returns a list with one entry per seed.

    If the process is killed during a stage, the stage is repeated for all seeds together. The seeds are not
    trained separately, because rounding would make the results slightly different.

    Args:
        records: one RunRecord per seed. All of them must use the same `stages` folder.
    """

    def __init__(self, records: Sequence[RunRecord]):
        self.records = list(records)

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k, which is the same for all seeds."""
        return self.records[0].stage_folder(k)

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Run a step for all seeds together, or skip the step if its done mark exists. See `RunRecord.step`.

        Raises:
            ValueError: if the step does not return one result per seed.
        """
        results = self.records[0].step(k, name, learner, do)
        if not isinstance(results, list) or len(results) != len(self.records):
            count = len(results) if isinstance(results, list) else 1
            raise ValueError(f"step {name!r} of stage {k} returned {count} results for {len(self.records)} seeds")
        return results

    def decision(self, t: int, due: bool) -> bool:
        """Store and return `due`: whether a stage starts at arrival t.

        If a decision for t is already stored, return the stored decision instead. A killed process may have stored it
        only for the first seeds. Then it is stored for the remaining seeds too.
        """
        for record in self.records:
            due = record.decision(t, due)
        return due

    def arrival(self, t: int, stage: int, updated: bool, scores: list[Scores], spent: Sequence[Cost]) -> None:
        """Add the row of arrival t to the ledger of each seed."""
        for number, record in enumerate(self.records):
            # The method step() returns only lists, so all costs in `spent` are lists. isinstance() is only for mypy.
            of_seed = [step[number] for step in spent if isinstance(step, list)]
            record.arrival(t, stage, updated, scores[number], of_seed)

    def rows(self) -> list[list[LedgerRow]]:
        """Return the ledger rows of each seed so far."""
        return [record.rows() for record in self.records]
