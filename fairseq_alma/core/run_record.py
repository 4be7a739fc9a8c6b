"""The run folder: the settings of a run, what is done, and therefore what is left.

RUN/settings.json       every setting, resolved       RUN/provenance.json  command, commit, versions, machine
RUN/ledger.jsonl        one row per arrival           RUN/summary.json     the scalars
RUN/arrivals.json       digests of the stream, decisions to train or wait
RUN/stages/stage_001/   logs, checkpoints, and the done marks {grow,train,evaluate}.done.json
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_json, write_whole
from fairseq_alma.core.ledger import Ledger, LedgerRow, Scores, Spent, summarize
from fairseq_alma.core.protocol import Cost, Stored, T

RESULT_OF_STEP = {"grow": Spent, "train": Spent, "evaluate": Scores}


class RunRecord:
    """The record of one run (one setting, one seed): its ledger, its done marks, and what is needed to continue it.

    Args:
        folder: the run folder; created if it does not exist.
        settings: every setting, resolved, as plain JSON values.
        digests: digest of each mega-batch of the stream.
        free: names of settings that may differ when a run is continued (where files are, not what is computed).
        defaults: values of settings that the run folder does not have because an earlier version wrote it.
        stages: folder of the stages, if several runs share it (see StackRecord). By default RUN/stages.
        durable: if True, every step reaches the disk before the next one begins. If False, a kill loses nothing,
            but a power cut may: for stages of milliseconds. Then summary.json is written at most once a second.
        cer_from: first arrival that counts for CER.
        on_rows: called with the whole ledger whenever it has a new row, to show the progress of a run.

    Raises:
        RunError: the folder holds a run with other settings or of another stream. The message names the differences,
            and nothing is written.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Mapping[str, Any],
        digests: Sequence[str],
        free: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        stages: Path | None = None,
        durable: bool = True,
        cer_from: int = 1,
        on_rows: Callable[[Sequence[LedgerRow]], None] | None = None,
    ):
        self.folder = Path(folder)
        self.ledger = Ledger(self.folder / "ledger.jsonl", durable)
        self.durable = durable
        self._stages = stages or self.folder / "stages"
        self._cer_from, self._on_rows = cer_from, on_rows
        self._started = self._summary_written = time.monotonic()
        self._refuse_other_settings(settings, free, defaults or {})
        arrivals = self._read_arrivals()
        known = arrivals["digests"]
        if known != list(digests[: len(known)]):
            t = next(t for t, d in enumerate(known, start=1) if [d] != list(digests[t - 1 : t]))
            how = "differs" if t <= len(digests) else f"is missing (it had {len(known)}, this one has {len(digests)})"
            raise RunError(
                f"{self.folder} was made from another stream: mega-batch {t} {how}. "
                f"Give the stream it was made from, or choose another out="
            )
        # A run continues on an extended stream: B is not part of its identity.
        self._arrivals = {"digests": list(digests), "decisions": arrivals["decisions"]}
        self._rows = self.ledger.rows()
        if on_rows and 1 < len(self._rows) <= len(digests):  # the run continues: first show the rows that exist
            on_rows(self._rows)
        before = self._read_summary()
        self._seconds_before = float(before.get("wall_seconds", 0.0))
        self._summed_up = int(before.get("num_arrivals", 0))
        self._write_arrivals()
        write_json(self.folder / "settings.json", settings)
        self._note_provenance(provenance(settings))

    def stage_folder(self, k: int) -> Path:
        """Return the folder of stage k, created if needed; k = 0 is the untrained learner."""
        folder = self._stages / f"stage_{k:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def step(self, k: int, name: str, learner: Stored, do: Callable[[], T]) -> T:
        """Do step `name` ("grow", "train", "evaluate") of stage k, or skip it if its done mark exists.

        After "grow" and "train" the learner is saved before the mark is written, and a skipped step loads what was
        saved. So a mark says that the step is done and its result is on disk.

        Raises:
            RunError: the mark is damaged.
        """
        folder = self.stage_folder(k)
        mark = folder / f"{name}.done.json"
        if mark.exists():
            if name != "evaluate":
                learner.load(folder / name)
            return _read_mark(mark, RESULT_OF_STEP[name])
        result = do()
        if name != "evaluate":
            learner.save(folder / name)
        parts: list[Any] = result if isinstance(result, list) else [result]
        values = [asdict(part) for part in parts]
        write_json(mark, values if isinstance(result, list) else values[0], self.durable)
        return result

    def decision(self, t: int, due: bool) -> bool:
        """Record whether a stage was due at arrival t. Return the recorded decision: a continued run repeats it."""
        decisions = self._arrivals["decisions"]
        if str(t) not in decisions:
            decisions[str(t)] = due
            self._write_arrivals()
        return decisions[str(t)]

    def arrival(self, t: int, stage: int, updated: bool, scores: Scores, spent: Sequence[Cost]) -> None:
        """Add the row of arrival t: the present scores, and the cost of the steps since the arrival before.

        Raises:
            RunError: see `append`.
            TypeError: a step returned the costs of several seeds, but this is the record of one seed.
        """
        total = Spent()
        for cost in spent:
            if isinstance(cost, list):
                raise TypeError("a learner of several seeds needs a StackRecord: its steps return lists")
            total += cost
        self.append(LedgerRow(t, stage, updated, scores, total))

    def rows(self) -> list[LedgerRow]:
        """Return the ledger so far."""
        return list(self._rows)

    def append(self, row: LedgerRow) -> None:
        """Add a row to the ledger, unless it is there already, and update summary.json.

        The row may be there already because an earlier process was killed between these two writes.

        Raises:
            RunError: the ledger has a row for this arrival that does not follow from the done marks.
        """
        if row.t < len(self._rows):
            if self._rows[row.t] != row:
                raise RunError(
                    f"{self.ledger.path}, arrival t={row.t} does not follow from the done marks under "
                    f"{self.folder / 'stages'}: one of them was changed by hand; restore it or start a new run"
                )
        else:
            self.ledger.append(row)
            self._rows.append(row)
            if self._on_rows:
                self._on_rows(self._rows)
        now, is_last = time.monotonic(), row.t == len(self._arrivals["digests"])
        if row.t < len(self._rows) - 1 or row.t <= self._summed_up:
            return
        if self.durable or is_last or now - self._summary_written > 1:
            self._summary_written = now
            seconds = self._seconds_before + time.monotonic() - self._started
            summary = summarize(self._rows, self._cer_from)
            write_json(self.folder / "summary.json", {**summary, "wall_seconds": round(seconds, 3)}, self.durable)
            self._summed_up = row.t

    def _note_provenance(self, now: dict[str, Any]) -> None:
        """Write provenance.json: that of the first process, and under "continued" every later one that differs."""
        path = self.folder / "provenance.json"
        if not path.exists():
            write_json(path, {**now, "continued": []})
            return
        before = read_json(path)
        first = {key: value for key, value in before.items() if key != "continued"}
        continued = before.get("continued", [])
        if now != first and now not in continued:
            write_json(path, {**first, "continued": [*continued, now]})

    def _refuse_other_settings(
        self, settings: Mapping[str, Any], free: Sequence[str], defaults: Mapping[str, Any]
    ) -> None:
        path = self.folder / "settings.json"
        if not path.exists():
            if self.ledger.path.exists():
                raise RunError(f"{self.folder} has a ledger but no settings.json: choose another out=")
            return
        before = _flat({**defaults, **read_json(path)})
        now = _flat(settings)
        differing = [
            f"{key}: was {before.get(key, 'not set')!r}, is {now.get(key, 'not set')!r}"
            for key in sorted(before.keys() | now.keys())
            if key.split(".")[0] not in free and before.get(key) != now.get(key)
        ]
        if differing and not any(self._stages.glob("*/*.done.json")):
            # The run failed before its first step was done, perhaps because of its settings. Nothing is lost.
            shutil.rmtree(self._stages, ignore_errors=True)
        elif differing:
            raise RunError(
                f"{self.folder} holds a run with other settings:\n  "
                + "\n  ".join(differing)
                + "\nGive the same settings to continue it, or another out= for a new run."
            )

    def _write_arrivals(self) -> None:
        write_whole(self.folder / "arrivals.json", json.dumps(self._arrivals) + "\n", self.durable)

    def _read_arrivals(self) -> dict[str, Any]:
        path = self.folder / "arrivals.json"
        return read_json(path) if path.exists() else {"digests": [], "decisions": {}}

    def _read_summary(self) -> dict[str, Any]:
        path = self.folder / "summary.json"
        return read_json(path) if path.exists() else {}


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at or below `folder`, at any depth, sorted.

    A sweep over preset=table2/gmoe_w1,... makes folders within folders.
    """
    found = []
    for path, folders, files in os.walk(folder):
        if "settings.json" in files:
            found.append(Path(path))
            folders.clear()  # below are stages and checkpoints: many files, perhaps on a slow file system
        elif "stages" in folders:  # stages that several seeds share
            folders.remove("stages")
    return sorted(found)


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the numbers of a run come from: command, commit, versions, machine and seed."""
    versions = {"python": platform.python_version()}
    for name in ("fairseq-alma", "torch", "fairseq-fixed", "numpy", "tokenizers", "sentencepiece"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "versions": versions,
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "job_id": os.environ.get("SLURM_JOB_ID"),
        },
        "seed": settings.get("seed"),
    }


def _read_mark(path: Path, kind: type) -> Any:
    """Return the result in a done mark: a `kind`, or a list of them.

    Raises:
        RunError: the mark is damaged, or another version wrote it.
    """
    try:
        value = read_json(path)
        return [kind(**part) for part in value] if isinstance(value, list) else kind(**value)
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} is not a done mark of this version ({error}): restore it or start a new run") from error


def _commit() -> str | None:
    """Return the commit of this source tree, with "-dirty" if it has changes; None outside a git repository."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
