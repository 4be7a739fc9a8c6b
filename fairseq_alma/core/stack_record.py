"""Several seeds that are computed together: they share the done marks, and each has its own ledger."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fairseq_alma.core.ledger import LedgerRow, Scores
from fairseq_alma.core.protocol import Cost, Stored, T
from fairseq_alma.core.run_record import RunRecord


class StackRecord:
    """The records of S runs that advance together and share their stages. Each step returns a list, one entry per seed.

    If a kill leaves a stage without its mark, the stage is repeated for all seeds at once: a seed that is computed
    alone would differ from the same seed in the stack by rounding.

    Args:
        records: one for each seed, all made with the same `stages` folder.
    """

    def __init__(self, records: Sequence[RunRecord]):
        self.records = list(records)

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k, which all seeds share."""
        return self.records[0].stage_folder(k)

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Do a step for all seeds, or skip it if it is done. See `RunRecord.step`.

        Raises:
            ValueError: the step does not return one result for each seed.
        """
        results = self.records[0].step(k, name, learner, do)
        if not isinstance(results, list) or len(results) != len(self.records):
            count = len(results) if isinstance(results, list) else 1
            raise ValueError(f"step {name!r} of stage {k} has {count} results for {len(self.records)} seeds")
        return results

    def decision(self, t: int, due: bool) -> bool:
        """Record whether a stage was due at arrival t. If a kill left different records, the first seed decides."""
        for record in self.records:
            due = record.decision(t, due)
        return due

    def arrival(self, t: int, stage: int, updated: bool, scores: list[Scores], spent: Sequence[Cost]) -> None:
        """Add the row of arrival t to the ledger of each seed."""
        for number, record in enumerate(self.records):
            of_seed = [step[number] for step in spent if isinstance(step, list)]  # `step` has made sure of lists
            record.arrival(t, stage, updated, scores[number], of_seed)

    def rows(self) -> list[list[LedgerRow]]:
        """Return the ledger of each seed so far."""
        return [record.rows() for record in self.records]
