"""Stores the progress of several runs that are trained together and differ only in the seed.

Each run has its own run folder and ledger. The runs share the done marks (files with the results of finished steps).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores
from fairseq_alma.core.protocol import Cost, Stored, T
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.waiting import Due


class StackRecord:
    """Stores the progress of runs with different seeds that are trained together, one run per seed.

    The result of each step is a list with one entry per seed. If the process is killed during a stage, the stage is
    repeated for all seeds together. A continued run must have the same results as an uninterrupted run. So the seeds
    are never trained separately, because separate training has other rounding errors, which would change the results
    slightly.

    Args:
        records: one RunRecord per seed. All of them must use the same `stages` folder.
    """

    def __init__(self, records: Sequence[RunRecord]):
        self.records = list(records)

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k. All seeds share this folder."""
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

    def prequential(self, t: int, do: Callable[[], list[Prequential]]) -> list[Prequential | None]:
        """Return the prequential score of each seed at arrival t. Call `do`, if a seed has no decision for t yet.

        If a killed process has stored the score only for the first seeds, `do` measures it again for all seeds. The
        first seeds keep the stored score, which is equal.
        """
        measured: list[Prequential] = []

        def of_seed(number: int) -> Prequential:
            # Measure the scores of all seeds together, and only if they are needed.
            if not measured:
                measured.extend(do())
            return measured[number]

        return [record.prequential(t, partial(of_seed, number)) for number, record in enumerate(self.records)]

    def decision(self, t: int, due: Due) -> Due:
        """Store whether a stage starts at arrival t, with the reason if there is one, and return it.

        All seeds have the same decision. If a decision for t is already stored, return the stored decision instead. If
        a killed process has stored the decision only for the first seeds, store it for the remaining seeds too.
        """
        for record in self.records:
            due = record.decision(t, due)
        return due

    def arrival(
        self,
        t: int,
        stage: int,
        updated: bool,
        scores: list[Scores],
        spent: Sequence[Cost],
        prequential: list[Prequential | None] | None = None,
    ) -> None:
        """Add the row of arrival t to the ledger of each seed."""
        for number, record in enumerate(self.records):
            # All costs in `spent` are lists with one entry per seed. isinstance() is needed only by the type checker.
            of_seed = [step[number] for step in spent if isinstance(step, list)]
            ahead = prequential[number] if prequential else None
            record.arrival(t, stage, updated, scores[number], of_seed, ahead)

    def rows(self) -> list[list[LedgerRow]]:
        """Return one list per seed, with the rows that the ledger of this seed has so far."""
        return [record.rows() for record in self.records]
