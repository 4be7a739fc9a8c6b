"""Reads and writes the files of a run with one seed: settings, decisions, ledger and summary."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_alma.core.arrivals import Arrivals, Decision, read_arrivals
from fairseq_alma.core.error_matrix import read_errors, transfer_metrics
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import remove, write_json
from fairseq_alma.core.lease import holder_of
from fairseq_alma.core.ledger import Ledger, LedgerRow, Prequential, Scores, Spent
from fairseq_alma.core.metrics import check_summary, read_summary, summarize
from fairseq_alma.core.provenance import write_provenance
from fairseq_alma.core.recorded_settings import differing_settings, other_settings_message, read_settings
from fairseq_alma.core.run_folder import RunFolder


class SeedRecord:
    """Reads and writes the files of a run with one seed. `RunRecord` combines those of all seeds of a run.

    New rows and decisions stay in memory until `write` is called.

    Args:
        folder: the run folder. It is created if it does not exist.
        settings: setting name -> value, for all settings. The values must be JSON values.
        digests: digest (hash of the content) of each mega-batch of the stream.
        free: names of settings that may differ when a run is continued, for example file locations.
        shared: the run folder with the stages, if several seeds are trained together. They share the stages.
        durable: if True, the disk must have stored each row before the next step begins. Use False if a stage takes
            only milliseconds. Then the disk must have stored the rows when the next done mark is written, and
            summary.json is written at most once a second.
        cer_from: first arrival whose error rate is added to the metric CER, 0 or 1.
        forkable: names of settings that may be changed by a fork.
        fork: if True, and only settings in `forkable` differ from those of the run, the run is forked: it gets the new
            settings from its first unfinished stage on. What that stage has trained so far is deleted. The ledger row
            of that stage records the change, and so does the key "forks" in settings.json.
        on_rows: function that is called with all rows so far whenever rows are written to the ledger, and at first with
            those of a continued run.

    Raises:
        RunError: if the folder contains a run with other settings or another stream. The message lists the differences,
            and nothing is written.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Mapping[str, Any],
        digests: Sequence[str],
        free: Sequence[str] = (),
        shared: Path | None = None,
        durable: bool = True,
        cer_from: int = 1,
        forkable: Sequence[str] = (),
        fork: bool = False,
        on_rows: Callable[[Sequence[LedgerRow]], None] | None = None,
    ):
        self.paths = RunFolder(Path(folder))
        self.folder = self.paths.path
        self.ledger = Ledger(self.paths.ledger, durable)
        self.durable = durable
        self.shared = RunFolder(shared) if shared else self.paths
        self._cer_from, self._on_rows = cer_from, on_rows
        self._started = self._summary_written = time.monotonic()
        settings_file = self.paths.settings
        # Stage -> name of each setting that was changed at the fork -> old value, new value.
        self._forks: dict[str, dict[str, list[Any]]] = (
            read_settings(self.folder).get("forks", {}) if settings_file.exists() else {}
        )
        self._rows = self.ledger.rows()
        self._unwritten: list[LedgerRow] = []
        """The last rows of `_rows`, if they are only in memory."""
        self.num_mega_batches = len(digests)
        fork_at = self._check_same_settings(settings, [*free, "forks"], forkable, fork)
        self._arrivals = Arrivals(self.folder, durable)
        known = self._arrivals.digests
        if known != list(digests[: len(known)]) and not self._has_finished_step:
            remove(self.shared.stages)  # as in `_check_same_settings`
        elif known != list(digests[: len(known)]):
            t = next(t for t, d in enumerate(known, start=1) if [d] != list(digests[t - 1 : t]))
            k = max((row.stage for row in self._rows if row.updated and row.t < t), default=0)
            back = f"`alma-lm rollback {shlex.quote(str(self.folder))} --to-stage {k}`"
            back = (
                f". If alma-prep --drop-last has taken mega-batches back, first run {back}"
                if "stream" in settings
                else ""
            )
            if t > len(digests):
                raise RunError(
                    f"the run in {self.folder} has {len(known)} mega-batches, but here are only {len(digests)}: give "
                    f"the complete stream, no smaller mega_batches= or arrivals= than before, or another out={back}"
                )
            raise RunError(
                f"the run in {self.folder} used another stream: mega-batch {t} differs. "
                f"Use the original stream, or choose another out={back}"
            )
        if fork_at is not None:
            self._fork(*fork_at)
        if on_rows and 1 < len(self._rows) <= len(digests):
            # The run is continued. Report the rows of earlier processes too, so that the reported progress is complete.
            on_rows(self._rows)
        before = self._read_summary()
        self._seconds_before = float(before.get("wall_seconds") or 0.0)
        self._num_summarized = before.get("num_arrivals", 0)
        check_summary(self.ledger.path, self._rows, before, self._cer_from)
        self._arrivals.use(digests)
        self._measured: dict[int, Prequential | None] = {}
        """Prequential scores that `decision` will store."""
        write_json(settings_file, {**settings, "forks": self._forks} if self._forks else settings)
        write_provenance(self.paths.provenance, settings)

    @property
    def _has_finished_step(self) -> bool:
        return bool(self._rows) or any(self.shared.marks())

    def prequential(self, t: int, do: Callable[[], Prequential | None]) -> Prequential | None:
        """Return the prequential score at arrival t. Call `do` to measure it, if no decision for t is stored yet."""
        if decision := self._arrivals.decision(t):
            return decision.prequential
        self._measured[t] = do()
        return self._measured[t]

    def is_skipped(self, t: int, wanted: bool) -> bool:
        """Return whether no stage trains on mega-batch t. See `RunRecord`."""
        decision = self._arrivals.decision(t)
        if decision is None:
            return wanted
        if wanted and not decision.is_skipped:
            k = max((row.stage for row in self._rows if row.updated and row.t < t), default=0)
            raise RunError(
                f"mega-batch {t} cannot be skipped, because the run in {self.folder} has used it or has gathered it: "
                f"first run `alma-lm rollback {shlex.quote(str(self.folder))} --to-stage {k}`"
            )
        return decision.is_skipped

    def decision(self, t: int, decision: Decision) -> Decision:
        """Store whether a stage starts at arrival t, with the prequential score, and return it. See `RunRecord`.

        If a decision to wait is replaced, the row of this arrival is removed from the ledger.
        """
        stored = self._arrivals.decision(t)
        is_replaced = stored and decision.due and not stored.due and t == len(self._arrivals.digests)
        # There may be a row of the earlier decision, also if it was replaced by a process that was then killed.
        if stored and (is_replaced or stored.due) and len(self._rows) == t + 1 and not self._rows[t].updated:
            if t > 1:
                self._write_summary(self._rows[:-1])
            else:  # there is no summary of the untrained learner
                remove(self.paths.summary)
                self._num_summarized = 0
            self.ledger.remove_from(t)
            del self._rows[-1], self._unwritten[-1:]
        if stored and is_replaced:  # last: if this process is killed before that, the next one repeats these steps
            stored = replace(stored, due=True, reason=decision.reason)
            self._arrivals.add(t, stored)
        if stored is None:
            stored = replace(decision, prequential=self._measured.pop(t, None))
            self._arrivals.add(t, stored)
        return stored

    def scores(self, t: int) -> Scores | None:
        """Return the scores in the ledger row of arrival t, or None if the ledger does not have this row yet."""
        return self._rows[t].scores if t < len(self._rows) else None

    def arrival(
        self, t: int, stage: int, updated: bool, scores: Scores, spent: Spent, prequential: Prequential | None = None
    ) -> None:
        """Add the row of arrival t to the ledger, unless it has the row already.

        It may have it in a continued run, which starts at t = 0 again. Raise RunError if it has a different row.
        """
        changed = self._forks.get(str(stage)) if updated else None
        decision = self._arrivals.decision(t)
        is_skipped = decision is not None and decision.is_skipped
        row = LedgerRow(t, stage, updated, scores, spent, changed, prequential, is_skipped)
        if row.t == len(self._rows):
            self._rows.append(row)
            self._unwritten.append(row)
        known = self._rows[row.t]
        # A stage that was not saved is trained again, in another time.
        row = replace(row, spent=replace(row.spent, train_seconds=known.spent.train_seconds))
        if known != row:
            raise RunError(
                f"{self.ledger.path}, arrival t={row.t} does not match the results in {self.shared.stages}: "
                f"one of these files was changed by hand; restore it or start a new run"
            )

    def rows(self) -> list[LedgerRow]:
        """Return all ledger rows so far."""
        return list(self._rows)

    def write(self) -> None:
        """Write the rows and decisions that are only in memory, and update summary.json."""
        self._arrivals.write()
        if self._unwritten:
            self.ledger.append(*self._unwritten)
            self._unwritten = []
            if self._on_rows:
                self._on_rows(self._rows)
        last, now = self._rows[-1].t if self._rows else 0, time.monotonic()
        is_finished = last == len(self._arrivals.digests)
        if last > self._num_summarized and (self.durable or is_finished or now - self._summary_written > 1):
            self._write_summary(self._rows)

    @property
    def has_unwritten(self) -> bool:
        """True if rows or decisions are only in memory."""
        return bool(self._unwritten or self._arrivals.unwritten)

    def unwritten(self) -> dict[str, Any]:
        """Return the rows and decisions that are only in memory, for `restore`."""
        return {"rows": [row.to_json() for row in self._unwritten], "decisions": self._arrivals.unwritten}

    def restore(self, unwritten: Mapping[str, Any]) -> None:
        """Add the rows and decisions that `unwritten` returned in an earlier process, unless the files have them.

        Raise RunError if the ledger lacks rows before them.
        """
        for row in map(LedgerRow.from_json, unwritten["rows"]):
            if row.t > len(self._rows):
                raise RunError(f"{self.ledger.path} lacks the rows from t={len(self._rows)} on: restore the file")
            if row.t == len(self._rows):
                self._rows.append(row)
                self._unwritten.append(row)
        self._arrivals.restore(unwritten["decisions"])

    def _write_summary(self, rows: Sequence[LedgerRow]) -> None:
        """Write summary.json, with the metrics of these rows."""
        self._summary_written = time.monotonic()
        seconds = self._seconds_before + self._summary_written - self._started
        summary = summarize(rows, self._cer_from)
        # The metrics compare the last arrival with earlier ones, so they exist only when the run is finished.
        is_finished = rows[-1].t == len(self._arrivals.digests)
        errors = read_errors(self.folder, [one.stage for one in rows]) if is_finished else None
        if errors is not None:
            summary |= transfer_metrics(errors)
        write_json(self.paths.summary, {**summary, "wall_seconds": round(seconds, 3)}, self.durable)
        self._num_summarized = rows[-1].t

    def _check_same_settings(
        self,
        settings: Mapping[str, Any],
        free: Sequence[str],
        forkable: Sequence[str],
        fork: bool,
    ) -> tuple[int, dict[str, list[Any]]] | None:
        """Compare the settings with those in settings.json.

        If they differ and no step is finished, delete the files of unfinished steps and accept the new settings. If a
        step is finished, return the arguments of `_fork`, or raise RunError if the run cannot be forked.
        """
        # A folder of stages alone may belong to a run of several seeds, whose ledgers are in seed_*.
        found = "a ledger" if self.ledger.path.exists() else "stages" if any(self.folder.glob("stages/*")) else None
        if found and not self.paths.settings.exists():
            raise RunError(
                f"{self.folder} has {found} but no settings.json, so the run cannot be continued: choose another out="
            )
        differing = differing_settings(self.folder, settings, free)
        if differing and not self._has_finished_step:
            # No step was finished with the old settings, so accept the new settings. The user may have corrected a
            # setting that caused an error. Delete the files of unfinished steps, because they used the old settings.
            remove(self.shared.stages)
        elif differing:
            return changes_at_fork(
                self.paths, differing, settings, forkable, fork, self._rows, self.num_mega_batches, self.shared
            )
        return None

    def _fork(self, k: int, changed: dict[str, list[Any]]) -> None:
        """Use other settings from stage k on, which is not finished. Delete what stage k has trained so far.

        `changed` has their old and new values. Raise RunError if a member of the stage is in training.
        """
        folder = self.paths.stage(k)
        unfinished = [path for path in folder.glob("*") if path.name not in ("grow", "grow.done.json")]
        for path in unfinished:
            if (holder := holder_of(path)) is not None:
                raise RunError(f"{path} is in use by {holder}: stop it before you change the settings of the run")
        for path in unfinished:
            remove(path)
        if k > 1:  # otherwise, no stage was trained with the old settings
            earlier = self._forks.get(str(k), {})
            changes = {name: [earlier.get(name, values)[0], values[1]] for name, values in changed.items()}
            # Drop settings that were changed back to their old values.
            changes = {name: values for name, values in {**earlier, **changes}.items() if values[0] != values[1]}
            self._forks.pop(str(k), None)
            if changes:
                self._forks[str(k)] = changes

    def _read_summary(self) -> dict[str, Any]:
        # A power failure may leave a file without content. No done mark vouches for it, and it is computed again.
        path = self.paths.summary
        is_cut = not path.exists() or not path.read_bytes().strip(b"\0")
        return {} if is_cut else read_summary(self.folder)


def changes_at_fork(
    run: RunFolder,
    differing: Sequence[str],
    settings: Mapping[str, Any],
    forkable: Sequence[str],
    fork: bool,
    rows: Sequence[LedgerRow],
    num_mega_batches: int,
    shared: RunFolder | None = None,
) -> tuple[int, dict[str, list[Any]]]:
    """Return the first stage that would use other settings, and each changed setting with its old and new value.

    Args:
        run: the run folder.
        differing: the return value of `differing_settings`.
        settings, forkable, fork, num_mega_batches: see `SeedRecord`.
        rows: the rows of the ledger.
        shared: the run folder with the stages. By default, it is `run`.

    Raises:
        RunError: if the run cannot be forked, or if `fork` is False.
    """
    k = 1 + len([mark for mark in (shared or run).marks() if mark.match("train.*")])
    before = read_settings(run.path)
    changed = {name: [before.get(name), settings.get(name)] for name in forkable}
    changed = {name: values for name, values in changed.items() if values[0] != values[1]}
    # A finished run has no stage that could use other settings, unless its last mega-batches still wait.
    is_trained = len(rows) > num_mega_batches and rows[-1].updated
    can_fork = len(changed) == len(differing) and not is_trained
    if not (fork and can_fork):
        raise RunError(other_settings_message(run.path, differing, k if can_fork else None))
    return k, changed


def refuse_other_settings(
    run: RunFolder,
    settings: Mapping[str, Any],
    free: Sequence[str],
    forkable: Sequence[str] = (),
    fork: bool = False,
    num_mega_batches: int = 0,
    shared: RunFolder | None = None,
) -> None:
    """Raise RunError if a run folder contains a run that a job with these settings could not continue.

    The job checks it again, with the keys of settings.json that are not in `settings`, because they are known only
    there, such as the digests of the data. For the arguments, see `SeedRecord` and `changes_at_fork`.
    """
    if not run.settings.exists() or not any((shared or run).marks()):
        return
    now = {**read_settings(run.path), **settings}
    if differing := differing_settings(run.path, now, free):
        changes_at_fork(run, differing, now, forkable, fork, Ledger(run.ledger).rows(), num_mega_batches, shared)


def is_finished(run: Path) -> bool:
    """Return True if all mega-batches of a run have arrived. Raise RunError if a file of the run is damaged."""
    try:
        read_settings(run)
        return read_summary(run).get("num_arrivals") == len(read_arrivals(run)["digests"])
    except FileNotFoundError:
        return False
