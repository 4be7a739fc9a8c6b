"""Stores the progress of several runs that are trained together and differ only in the seed.

Each run has its own run folder and ledger. The runs share the saved learner and the done marks (files with the results
of finished steps).

A stage may take only milliseconds, so the learner is not saved at each stage but at most once in SAVE_SECONDS, and at
the end. The ledgers get their rows at once. If the process is killed, the next one continues from the last save: it
removes the rows of later stages, and trains these stages again, with the same result.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from fairseq_alma.core.done_marks import mark_of, read_mark, write_mark
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.protocol import Cost, Stored, T
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.waiting import Due

SAVE_SECONDS = 1.0
"""Minimum time between two saves of the learner, in seconds. It is also the most time that a kill costs, in addition to
the step that was being computed."""

Step = tuple[int, str]
"""Index of a stage, and "grow" or "train". The names are in alphabetical order, so steps can be compared by `<`."""


class StackRecord:
    """Stores the progress of runs with different seeds that are trained together, one run per seed.

    The result of each step is a list with one entry per seed. If the process is killed during a stage, the stage is
    repeated for all seeds together. A continued run must have the same results as an uninterrupted run. So the seeds
    are never trained separately, because separate training has other rounding errors, which would change the results
    slightly.

    The results of the steps up to the last save are read from the ledgers, and from done marks if a ledger has no row
    for the stage yet. In runs of earlier versions, all steps have done marks.

    Args:
        records: one RunRecord per seed. All of them must use the same `stages` folder.
        delete_old: function that deletes what the learner saved before its last save, as far as it is not needed.
    """

    def __init__(self, records: Sequence[RunRecord], delete_old: Callable[[], None] = lambda: None):
        self.records, self._delete_old = list(records), delete_old
        self._stages = self.records[0].stages
        self._saved: Step = max(map(_step_of, self._marks("grow", "train")), default=(0, "train"))
        """The step after which the learner was saved last; stage 0 if it was never saved."""
        self._is_loaded = self._saved[0] == 0
        """Whether the learner has the state of the last save, or a later one."""
        self._unsaved: tuple[Step, list[Spent], Stored] | None = None
        """The last step, its cost and the learner, if the learner has not been saved since."""
        self._saved_at = time.monotonic()
        k, name = self._saved
        for record in self.records:
            record.remove_after(k if name == "train" else k - 1)
        ledgers = [{row.stage: row for row in rows if row.updated or row.t == 0} for rows in self.rows()]
        self._known = {
            stage: [ledger[stage] for ledger in ledgers] for stage in ledgers[0] if all(stage in one for one in ledgers)
        }
        """For each stage whose results are in all ledgers, the row of each seed."""

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k, which may not exist. All seeds share this folder."""
        return self._stages / f"stage_{k:03d}"

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Run a step for all seeds together, or return its results if it is finished.

        If the learner was saved after this step, load it.

        Raises:
            ValueError: if the step does not return one result per seed.
            RunError: if a done mark is damaged, or if a ledger lacks a row.
        """
        if not self._is_loaded and (k, name) == self._saved:
            learner.load(self.stage_folder(k) / name)
            self._is_loaded = True
        results: Any = self._recorded(k, name)
        if results is None:
            self._check_loaded(k)
            results = do()
        count = len(results) if isinstance(results, list) else 1
        if not isinstance(results, list) or count != len(self.records):
            raise ValueError(f"step {name!r} of stage {k} returned {count} results for {len(self.records)} seeds")
        if name != "evaluate" and (k, name) > self._saved:
            self._unsaved = ((k, name), self._with_unsaved_growth(k, results), learner)
            if time.monotonic() - self._saved_at >= SAVE_SECONDS:
                self._save()
        return cast(T, results)

    def _recorded(self, k: int, name: str) -> list[Any] | None:
        """Return the results of a step if it is recorded, otherwise None."""
        if rows := self._known.get(k):
            # A row has the cost of the whole stage. So all of it is returned for the training, and nothing for growth.
            of_row = {"evaluate": lambda row: row.scores, "train": lambda row: row.spent, "grow": lambda row: Spent()}
            return [of_row[name](row) for row in rows]
        if k > self._saved[0]:
            return None
        if (mark := mark_of(self.stage_folder(k), name)).exists():
            return read_mark(mark)
        # The done mark of the training includes the cost of growth, unless growth has a done mark.
        return [Spent() for _ in self.records] if (k, name) == (self._saved[0], "grow") else None

    def _check_loaded(self, k: int) -> None:
        """Raise RunError if something must be computed in stage k, but the learner was saved in a later stage."""
        if not self._is_loaded:
            raise RunError(
                f"{self.records[0].folder} contains the networks of stage {self._saved[0]}, but not all results up to "
                f"this stage (stage {k}): restore ledger.jsonl and decisions.jsonl, or choose another out="
            )

    def _with_unsaved_growth(self, k: int, costs: list[Spent]) -> list[Spent]:
        """Return the costs of a step of stage k. If the stage has grown without a save since, add the costs of this."""
        if self._unsaved is None or self._unsaved[0] != (k, "grow"):
            return costs
        return [growth + cost for growth, cost in zip(self._unsaved[1], costs, strict=True)]

    def _save(self) -> None:
        """Save the learner, and write the done mark of its last step."""
        if self._unsaved is None:
            return
        (k, name), costs, learner = self._unsaved
        folder = self.stage_folder(k)
        learner.save(folder / name)
        write_mark(mark_of(folder, name), costs, durable=False)
        self._saved, self._unsaved, self._saved_at = (k, name), None, time.monotonic()
        if name == "train":  # after growth, predictor.json still names the files of the stage before
            self._delete_earlier()

    def _delete_earlier(self) -> None:
        """Delete the done marks of the stages before that of the last save, and what the learner saved with them."""
        for mark in self._marks("grow", "train", "evaluate"):
            if _step_of(mark)[0] < self._saved[0]:
                mark.unlink()
        self._delete_old()

    def _marks(self, *names: str) -> list[Path]:
        return [mark for name in names for mark in self._stages.glob(mark_of(Path("stage_*"), name).as_posix())]

    def prequential(self, t: int, do: Callable[[], list[Prequential]]) -> list[Prequential | None]:
        """Return the prequential score of each seed at arrival t. Call `do`, if a seed has no decision for t yet.

        If a killed process has stored the score only for the first seeds, `do` measures it again for all seeds. The
        first seeds keep the stored score, which is equal.
        """
        measured: list[Prequential] = []

        def of_seed(number: int) -> Prequential:
            # Measure the scores of all seeds together, and only if they are needed.
            if not measured:
                self._check_loaded(self._saved[0])
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
        """Add the row of arrival t to the ledger of each seed.

        At the last arrival, save the learner before, because a run counts as finished when its ledger is complete.
        """
        if t == self.records[0].num_mega_batches and len(self.records[-1].rows()) <= t:
            self._save()
            self._delete_earlier()  # again, because a killed process may not have done it after its last save
        for number, record in enumerate(self.records):
            # All costs in `spent` are lists with one entry per seed. isinstance() is needed only by the type checker.
            of_seed = [step[number] for step in spent if isinstance(step, list)]
            ahead = prequential[number] if prequential else None
            record.arrival(t, stage, updated, scores[number], of_seed, ahead)

    def rows(self) -> list[list[LedgerRow]]:
        """Return one list per seed, with the rows that the ledger of this seed has so far."""
        return [record.rows() for record in self.records]


def _step_of(mark: Path) -> Step:
    return int(mark.parent.name.removeprefix("stage_")), mark.name.partition(".")[0]
