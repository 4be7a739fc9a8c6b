"""Stores the progress of several runs that are trained together and differ only in the seed.

Each run has its own run folder and ledger. The runs share the saved learner and the done marks (files with the results
of finished steps).

A stage may take only milliseconds, so the learner is not saved at each stage but at most once in SAVE_SECONDS, and at
the end. Ledger rows and decisions of stages that are not saved yet stay in memory. A save writes, in this order:

1. the learner;
2. a done mark, which also contains the rows and decisions that are only in memory;
3. these rows and decisions, to the files of each run.

If the process is killed before 2, the next process continues from the save before. If it is killed later, the next
process first adds the rows and decisions of the done mark that the files lack. So a row is never ahead of the saved
learner, and no row is ever removed.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from fairseq_alma.core.done_marks import mark_of, read_mark, write_mark
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import remove, sync_unsynced
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.protocol import Cost, Stored, T
from fairseq_alma.core.run_record import RunRecord
from fairseq_alma.core.waiting import Due

SAVE_SECONDS = 1.0
"""Minimum time between two saves of the learner, in seconds. It is also the most time that a kill costs, in addition to
the step that was being computed."""

_OF_RECORDS = ("ledger.jsonl", "decisions.jsonl", "summary.json")
"""The files that the records write. The next done mark vouches for them."""

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
        delete_old: function that deletes what the learner saved before its last but one save after a training, as far
            as it is not needed.

    Raises:
        RunError: if the done mark of the last save is damaged, or if a ledger lacks rows before those in this mark.
    """

    def __init__(self, records: Sequence[RunRecord], delete_old: Callable[[], None] = lambda: None):
        self.records, self._delete_old = list(records), delete_old
        self._stages = self.records[0].stages
        self._marks = set(self._stages.glob("stage_*/*.done.json"))
        """The done marks that may be deleted later."""
        of_learner = [_step_of(mark) for mark in self._marks if not mark.match("evaluate.*")]
        self._saved: Step = max(of_learner, default=(0, "train"))
        """The step after which the learner was saved last; stage 0 if it was never saved."""
        self._stage_before = self._saved[0]
        """The stage of the last save after a training; at first, of the last save."""
        self._last = self._of_learner = (0, "train")
        """The last step that `step` was called for, and the step after which the learner has its present state."""
        self._learner: Stored | None = None
        self._unsaved: list[Spent] | None = None
        """The cost of the last step, if the learner has not been saved since."""
        self._saved_at = time.monotonic()
        self._restore()
        ledgers = [{row.stage: row for row in rows if row.updated or row.t == 0} for rows in self.rows()]
        is_finished = all(
            len(rows) > record.num_mega_batches for rows, record in zip(self.rows(), records, strict=True)
        )
        self._known = {
            stage: [ledger[stage] for ledger in ledgers]
            for stage in ledgers[0]
            if all(stage in one for one in ledgers)
            and (is_finished or not of_learner or (stage, "train") <= self._saved)
        }
        """For each stage whose results are in all ledgers, the row of each seed.

        If a newer save was removed by hand, the ledgers may have rows after the last save. These stages are trained
        again, unless the ledgers are complete."""

    def _restore(self) -> None:
        """Add the rows and decisions in the done mark of the last save that the files lack."""
        mark = self._mark(*self._saved)
        for record in self.records:
            compressed = record.ledger.path.with_name(f"{record.ledger.path.name}.gz")
            if compressed.exists() and not record.ledger.path.exists():
                raise RunError(f"{compressed} is compressed, so the run cannot be continued: decompress it with gunzip")
        logs = read_mark(mark, len(self.records))[1] if mark.exists() else []
        for record, log in zip(self.records, logs, strict=False):
            record.defers = True
            record.restore(log)
        for record in self.records:
            record.defers = True
            record.write()

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k, which may not exist. All seeds share this folder."""
        return self._stages / f"stage_{k:03d}"

    def _mark(self, k: int, name: str) -> Path:
        return mark_of(self.stage_folder(k), name)

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Run a step for all seeds together, or return its results if it is finished.

        If something must be computed after the steps of earlier processes, load the learner.

        Raises:
            ValueError: if the step does not return one result per seed.
            RunError: if a done mark is damaged, or if a ledger lacks a row.
        """
        self._learner = learner
        if self._saved == (k, "grow") and name == "train":  # earlier versions also saved learners that never grow
            self._last = self._saved
        results: Any = self._recorded(k, name)
        if results is not None:
            self._last = self._last if name == "evaluate" else (k, name)
            return cast(T, results)
        self._load()
        began, results = time.monotonic(), do()
        count = len(results) if isinstance(results, list) else 1
        if not isinstance(results, list) or count != len(self.records):
            raise ValueError(f"step {name!r} of stage {k} returned {count} results for {len(self.records)} seeds")
        if name != "evaluate":
            growth = self._unsaved if self._last == (k, "grow") else None
            self._unsaved = [a + b for a, b in zip(growth, results, strict=True)] if growth else results
            self._last = self._of_learner = (k, name)
            if name == "grow":
                is_due = time.monotonic() - began >= SAVE_SECONDS
            else:
                is_due = self._is_due() or self._saved == (k, "grow")
            if is_due:
                self._save()
        return cast(T, results)

    def _recorded(self, k: int, name: str) -> list[Any] | None:
        """Return the results of a step if it is recorded, otherwise None."""
        if rows := self._known.get(k):
            # A row has the cost of the whole stage. So all of it is returned for the training, and nothing for growth.
            of_row = {"evaluate": lambda row: row.scores, "train": lambda row: row.spent, "grow": lambda row: Spent()}
            return [of_row[name](row) for row in rows]
        if k <= self._saved[0] and self._mark(k, name).exists():
            return cast(list[Any], read_mark(self._mark(k, name), len(self.records))[0])
        # The done mark of the training includes the cost of growth, unless growth has a done mark.
        return [Spent() for _ in self.records] if (k, name) == (self._saved[0], "grow") else None

    def _load(self) -> None:
        """Load the learner, if something must be computed and it does not have the state after the last step.

        Raises:
            RunError: if no save has this state.
        """
        if self._last >= self._saved and self._of_learner == self._last:
            return
        if self._learner is None or self._last != self._saved:
            raise RunError(
                f"the networks in {self._stages} are those of stage {self._saved[0]}, but {self._stages.parent} "
                f"does not contain exactly the results up to this stage: restore ledger.jsonl, "
                f"decisions.jsonl and the folder {self._stages.name} from a backup, or choose another out="
            )
        k, name = self._saved
        self._learner.load(self.stage_folder(k) / name)
        self._of_learner = self._saved

    def _is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= SAVE_SECONDS

    def _save(self) -> None:
        """Save the learner, and then write the rows and decisions that are only in memory."""
        assert self._learner is not None and self._unsaved is not None
        k, name = self._last
        mark = self._mark(k, name)
        self._learner.save(self.stage_folder(k) / name)
        log = [record.unwritten() for record in self.records]
        write_mark(mark, self._unsaved, log)
        self._saved, self._unsaved = (k, name), None
        self._write()
        self._marks.add(mark)
        if name == "train":  # after growth, predictor.json still names the files of the stage before
            for old in [mark for mark in self._marks if _step_of(mark)[0] < self._stage_before]:
                remove(old)
                self._marks.remove(old)
            self._stage_before = k
            self._delete_old()
        self._saved_at = time.monotonic()

    def _write(self) -> None:
        """Write the rows and decisions that are only in memory, if the saved learner is not behind them."""
        if self._unsaved is None and self._last >= self._saved:
            # A row says that the files that its evaluation has written are complete.
            if any(record.has_unwritten for record in self.records):
                sync_unsynced(but=_OF_RECORDS)
            for record in self.records:
                record.write()

    def prequential(self, t: int, do: Callable[[], list[Prequential]]) -> list[Prequential | None]:
        """Return the prequential score of each seed at arrival t. Call `do`, if a seed has no decision for t yet.

        If a killed process has stored the score only for the first seeds, `do` measures it again for all seeds. The
        first seeds keep the stored score, which is equal.
        """
        measured: list[Prequential] = []

        def of_seed(number: int) -> Prequential:
            # Measure the scores of all seeds together, and only if they are needed.
            if not measured:
                self._load()
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
        self._write()
        return due

    def known_scores(self, t: int) -> list[Scores] | None:
        """Return the scores of each seed in the ledger row of arrival t, or None if a ledger does not have this row."""
        known = [record.known_scores(t) for record in self.records]
        return None if None in known else cast(list[Scores], known)

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

        If the learner has changed since the last save, the row is written with the next one.
        """
        for number, record in enumerate(self.records):
            # All costs in `spent` are lists with one entry per seed. isinstance() is needed only by the type checker.
            of_seed = [step[number] for step in spent if isinstance(step, list)]
            ahead = prequential[number] if prequential else None
            record.arrival(t, stage, updated, scores[number], of_seed, ahead)
        if self._unsaved is not None and (self._is_due() or t == self.records[0].num_mega_batches):
            self._save()
        self._write()

    def rows(self) -> list[list[LedgerRow]]:
        """Return one list per seed, with the rows that the ledger of this seed has so far."""
        return [record.rows() for record in self.records]


def _step_of(mark: Path) -> Step:
    return int(mark.parent.name.removeprefix("stage_")), mark.name.partition(".")[0]
