"""Stores the progress of a run, for one seed or for several seeds that are trained together.

Each seed has its own run folder and ledger (`SeedRecord`). The seeds share the saved learner and the done marks (files
with the cost of finished steps, such as RUN/stages/stage_001/train.done.json).

The learner is saved after each step, or, if a stage may take only milliseconds, at most once in a given time and at the
end. Ledger rows and decisions of stages that are not saved yet stay in memory. A save writes, in this order:

1. the learner;
2. a done mark, which also contains the rows and decisions that are only in memory;
3. these rows and decisions, to the files of each seed.

If the process is killed before 2, the next process continues from the save before. If it is killed later, the next
process first adds the rows and decisions of the done mark that the files lack. So a row is never ahead of the saved
learner, and no row is ever removed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, cast

from fairseq_alma.core.arrivals import Decision, decision_of
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, remove, sync_unsynced, write_json
from fairseq_alma.core.json_types import value_of
from fairseq_alma.core.ledger import LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.run_folder import index_of_stage
from fairseq_alma.core.seed_record import SeedRecord

_OF_RECORDS = ("ledger.jsonl", "decisions.jsonl", "summary.json")
"""The files that the records of the seeds write. The next done mark vouches for them."""

StepName = Literal["grow", "train"]
"""Name of a step that changes the learner."""

SaveStep = tuple[int, str]
"""Index of a stage, and "grow" or "train". The names are in alphabetical order, so steps can be compared by `<`."""


class SavedLearner(Protocol):
    """A learner as a `RunRecord` uses it: an object whose state can be saved to a folder and restored from it."""

    def save(self, folder: Path) -> None:
        """Write the state to `folder`, so that `load` can restore it."""

    def load(self, folder: Path) -> None:
        """Restore the state that was saved to `folder`."""


class RunRecord:
    """Stores the progress of a run. The result of each step is a list with one entry per seed.

    If the process is killed during a stage, the stage is repeated for all seeds together. Separate training has other
    rounding errors, and a continued run must have the same results as an uninterrupted one.

    The results of finished steps are read from the ledgers, and from done marks if a ledger has no row for the stage
    yet. A finished step is not run again, and the learner is loaded only if something must be computed after it.

    Args:
        seeds: one SeedRecord per seed. All of them share the same stages.
        save_seconds: minimum time between two saves of the learner, in seconds. It is also the most time that a kill
            costs, in addition to the step that was being computed. By default, each step is saved.
        delete_old: function that deletes what the learner saved before its last but one save after a training, as far
            as it is not needed. The done marks of these saves are then deleted too. By default, all saves are kept.

    Raises:
        RunError: if the done mark of the last save is damaged, or if a ledger lacks rows before those in this mark.
    """

    def __init__(
        self, seeds: Sequence[SeedRecord], save_seconds: float = 0.0, delete_old: Callable[[], None] | None = None
    ):
        self.seeds, self._save_seconds, self._delete_old = list(seeds), save_seconds, delete_old
        self._run = self.seeds[0].shared
        self._marks = set(self._run.marks())
        """The done marks that may be deleted later."""
        self._saved: SaveStep = max(map(_step_of, self._marks), default=(0, "train"))
        """The step after which the learner was saved last; stage 0 if it was never saved."""
        self._stage_before = self._saved[0]
        """The stage of the last save after a training; at first, of the last save."""
        self._last = self._of_learner = (0, "train")
        """The last step that `step` was called for, and the step after which the learner has its present state."""
        self._learner: SavedLearner | None = None
        self._unsaved: list[Spent] | None = None
        """The cost of the last step, if the learner has not been saved since."""
        self._saved_at = time.monotonic()
        self._restore()
        ledgers = [{row.stage: row for row in rows if row.updated or row.t == 0} for rows in self.rows()]
        is_finished = all(len(rows) > one.num_mega_batches for rows, one in zip(self.rows(), self.seeds, strict=True))
        self._known = {
            stage: [ledger[stage] for ledger in ledgers]
            for stage in ledgers[0]
            if all(stage in one for one in ledgers)
            and (is_finished or not self._marks or (stage, "train") <= self._saved)
        }
        """For each stage whose results are in all ledgers, the row of each seed.

        If a newer save was removed by hand, the ledgers may have rows after the last save. These stages are trained
        again, unless the ledgers are complete."""

    def _restore(self) -> None:
        """Add the rows and decisions in the done mark of the last save that the files lack."""
        mark = self._run.mark(*self._saved)
        for record in self.seeds:
            compressed = record.ledger.path.with_name(f"{record.ledger.path.name}.gz")
            if compressed.exists() and not record.ledger.path.exists():
                raise RunError(f"{compressed} is compressed, so the run cannot be continued: decompress it with gunzip")
        logs = _read_mark(mark, len(self.seeds))["log"] if mark.exists() else []
        for record, log in zip(self.seeds, logs, strict=False):
            record.restore(log)
        for record in self.seeds:
            record.write()

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k, which may not exist. All seeds share it; k = 0 is the untrained learner."""
        return self._run.stage(k)

    def do_unless_done(
        self, k: int, name: StepName, learner: SavedLearner, do: Callable[[], list[Spent]]
    ) -> list[Spent]:
        """Grow or train the learner in stage k, for all seeds together, or return the cost if this is finished.

        The learner is saved before the done mark. So if the done mark exists, the saved learner is complete.

        Raises:
            ValueError: if the step does not return one result per seed.
            RunError: if a done mark is damaged, or if a ledger lacks a row.
        """
        self._learner = learner
        if (costs := self._recorded(k, name)) is not None:
            self._last = (k, name)
            return costs
        self._load()
        began = time.monotonic()
        costs = self._of_all_seeds(do(), f"step {name!r} of stage {k}")
        growth = self._unsaved if self._last == (k, "grow") else None
        self._unsaved = [a + b for a, b in zip(growth, costs, strict=True)] if growth else costs
        self._last = self._of_learner = (k, name)
        is_slow_growth = name == "grow" and time.monotonic() - began >= self._save_seconds
        if is_slow_growth or (name == "train" and (self._is_due() or self._saved == (k, "grow"))):
            self._save()
        return costs

    def scores(self, t: int, do: Callable[[], list[Scores]]) -> list[Scores]:
        """Return the scores in the rows of arrival t. Call `do` to measure them, if a ledger has no such row yet."""
        known = [record.scores(t) for record in self.seeds]
        if None not in known:
            return cast(list[Scores], known)
        self._load()
        return self._of_all_seeds(do(), f"the evaluation at arrival {t}")

    def _of_all_seeds(self, results: Any, what: str) -> list[Any]:
        """Return the results of a step, after a check that there is one for each seed."""
        if not isinstance(results, list) or len(results) != len(self.seeds):
            count = len(results) if isinstance(results, list) else f"{type(results).__name__}, not a list of"
            raise ValueError(f"{what} returned {count} results for {len(self.seeds)} seeds")
        return results

    def _recorded(self, k: int, name: StepName) -> list[Spent] | None:
        """Return the cost of a step if it is finished, otherwise None."""
        if rows := self._known.get(k):
            # A row has the cost of the whole stage. So all of it is returned for the training, and nothing for growth.
            return [row.spent if name == "train" else Spent() for row in rows]
        if k <= self._saved[0] and self._run.mark(k, name).exists():
            return [Spent(**cost) for cost in _read_mark(self._run.mark(k, name), len(self.seeds))["result"]]
        # The done mark of the training includes the cost of growth, unless growth has a done mark.
        return [Spent() for _ in self.seeds] if (k, name) == (self._saved[0], "grow") else None

    def _load(self) -> None:
        """Load the learner, if it does not have the state after the last step. Raise RunError if no save has it."""
        if self._last >= self._saved and self._of_learner == self._last:
            return
        if self._learner is None or self._last != self._saved:
            raise RunError(
                f"the networks in {self._run.stages} are those of stage {self._saved[0]}, but {self._run.path} "
                f"does not contain exactly the results up to this stage: restore ledger.jsonl, "
                f"decisions.jsonl and the folder {self._run.stages.name} from a backup, or choose another out="
            )
        k, name = self._saved
        self._learner.load(self.stage_folder(k) / name)
        self._of_learner = self._saved

    def _is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= self._save_seconds

    def _save(self) -> None:
        """Save the learner, and then write the rows and decisions that are only in memory."""
        assert self._learner is not None and self._unsaved is not None
        k, name = self._last
        mark = self._run.mark(k, name)
        self._learner.save(self.stage_folder(k) / name)
        sync_unsynced()  # the mark vouches for all files that were written until now
        log = [record.unwritten() for record in self.seeds]
        write_json(mark, {"result": [asdict(cost) for cost in self._unsaved], "log": log})
        self._saved, self._unsaved = (k, name), None
        self._write()
        self._marks.add(mark)
        if (
            name == "train" and self._delete_old is not None
        ):  # after growth, predictor.json still names the files of the stage before
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
            if any(record.has_unwritten for record in self.seeds):
                sync_unsynced(but=_OF_RECORDS)
            for record in self.seeds:
                record.write()

    def prequential(self, t: int, do: Callable[[], Sequence[Prequential | None]]) -> list[Prequential | None]:
        """Return the prequential score of each seed at arrival t: that of the predictor from before this arrival.

        Call `do`, if a seed has no decision for t yet. Then it is measured for all seeds, and `decision` stores it.
        Those whose score a killed process has stored keep it; it is equal.
        """
        measured: list[Prequential | None] = []

        def of_seed(number: int) -> Prequential | None:
            # Measure the scores of all seeds together, and only if they are needed.
            if not measured:
                self._load()
                measured.extend(do())
            return measured[number]

        return [record.prequential(t, partial(of_seed, number)) for number, record in enumerate(self.seeds)]

    def is_skipped(self, t: int, wanted: bool) -> bool:
        """Return whether no stage trains on mega-batch t: as stored, or as `wanted` if no decision for t is stored.

        Raise RunError if it shall be skipped, but the stored decision says that it was used.
        """
        return self.seeds[0].is_skipped(t, wanted)

    def decision(self, t: int, decision: Decision) -> Decision:
        """Store whether a stage starts at arrival t, with the reason if there is one, for all seeds, and return it.

        If a decision for t is stored already, return that instead. So a continued run starts its stages at the same
        arrivals as before, even if mega-batches were added to the stream. Exception: if t is the last arrival, a stored
        decision to wait is replaced by a decision to train. So the user can say later that the last mega-batches shall
        not wait.

        A killed process may have stored the decision only for the first seeds. Then store it for the others.
        """
        for record in self.seeds:
            decision = record.decision(t, decision)
        self._write()
        return decision

    def arrival(
        self,
        t: int,
        stage: int,
        updated: bool,
        scores: list[Scores],
        spent: Sequence[list[Spent]],
        prequential: list[Prequential | None] | None = None,
    ) -> None:
        """Add the row of arrival t to the ledger of each seed.

        If the learner has changed since the last save, the row is written with the next one.

        Args:
            t: index of the arrival; 0 for the untrained learner.
            stage: index of the last finished stage; 0 if there is none.
            updated: whether a stage was trained at this arrival.
            scores: the latest scores of the learner.
            spent: costs of the steps at this arrival.
            prequential: prequential scores at this arrival; None if they are not measured.
        """
        for number, record in enumerate(self.seeds):
            total = sum((costs[number] for costs in spent), Spent())
            record.arrival(t, stage, updated, scores[number], total, prequential[number] if prequential else None)
        if self._unsaved is not None and (self._is_due() or t == self.seeds[0].num_mega_batches):
            self._save()
        self._write()

    def rows(self) -> list[list[LedgerRow]]:
        """Return one list per seed, with the rows that the ledger of this seed has so far."""
        return [record.rows() for record in self.seeds]


def _step_of(mark: Path) -> SaveStep:
    return index_of_stage(mark.parent), mark.name.partition(".")[0]


class _LogOfSeed(TypedDict):
    rows: list[dict[str, Any]]
    """Lines of ledger.jsonl."""
    decisions: list[dict[str, Any]]
    """Lines of decisions.jsonl."""


class _Mark(TypedDict):
    """The content of a done mark: for each seed, the cost of the step, and the lines that are not written yet."""

    result: list[dict[str, Any]]
    log: list[_LogOfSeed]


def _read_mark(path: Path, num_seeds: int) -> _Mark:
    """Return the content of a done mark. Raise RunError if it is damaged."""
    try:
        mark = read_json(path, _Mark)
        if {len(mark["result"]), len(mark["log"])} != {num_seeds}:
            raise ValueError(f"it does not have the results of {num_seeds} seeds")
        for cost in mark["result"]:
            value_of(cost, Spent)
            if unknown := cost.keys() - {one.name for one in fields(Spent)}:
                raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        for seed in mark["log"]:
            [*map(LedgerRow.from_json, seed["rows"]), *map(decision_of, seed["decisions"])]
    except (ValueError, RunError) as error:
        raise RunError(
            f"{path} is not a valid done mark (result of a finished step) of this version of ALMA ({error}): "
            f"restore the file from a backup, or start a new run. If you delete the file, the run continues from the "
            f"save before"
        ) from error
    return mark
