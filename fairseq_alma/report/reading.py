"""Read run folders into Run objects, and put the Run objects into groups.

Any file in a run folder can be incomplete or damaged. A process may be writing the file at this moment, or a killed
process or a full disk may have damaged it. Another release of ALMA may also have written it in another format. A run
that cannot be read is skipped, and the report contains an error message with the file and, if possible, the line.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.error_matrix import TRANSFER_METRICS
from fairseq_alma.core.errors import RunError, message_of
from fairseq_alma.core.lease import holder_of_run
from fairseq_alma.core.ledger import Ledger, LedgerRow
from fairseq_alma.core.metrics import check_summary, period_losses, read_summary, summarize
from fairseq_alma.core.provenance import read_provenance
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import find_runs
from fairseq_alma.core.task_scores import TaskScore, read_task_scores
from fairseq_alma.report.grouping import first_charged_arrival, group_runs
from fairseq_alma.report.runs import Array, ReportData, Run

OPTIONAL_COLUMNS = ("validation", "prequential", "bits_per_byte", "num_members", "num_experts", "overflow")
"""Attributes of `Run` that may be missing in a row of the ledger."""


def read_runs(folders: Iterable[str | Path]) -> ReportData:
    """Read all runs in `folders`, put them into groups, and put groups on the same stream into a Comparison.

    The folders are run folders, or contain them at any depth. The result also has messages about what was left out.

    Raises:
        RunError: if a folder does not exist, or no folder contains a run that has recorded an arrival.
    """
    data = ReportData()
    paths: dict[Path, None] = {}  # a dictionary keeps the order and drops duplicate folders
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder: give run folders (out= of a run), or folders that contain them")
        run_folders = find_runs(folder)
        if not run_folders:
            data.errors.append(f"{folder} contains no run: there is no settings.json in it or below it")
        paths.update(dict.fromkeys(path.resolve() for path in run_folders))
    data.is_any_running = any(holder_of_run(path) for path in paths)
    runs = []
    for path in paths:
        run = _read_or_explain(path)
        if isinstance(run, str):
            data.errors.append(run)
        elif run.last_t < 0:
            data.notes.append(f"{path} has no arrival yet")
        else:
            runs.append(run)
            data.notes += run.notes
    if not runs:
        reasons = "".join(f"\n  {message}" for message in [*data.errors, *data.notes])
        raise RunError(f"no run can be reported, because no readable run has recorded an arrival:{reasons}")
    data.comparisons = group_runs(runs)
    return data


def is_any_run_held(folders: Iterable[str | Path]) -> bool:
    """Return True if a process is working on a run in `folders`, at any depth."""
    return any(holder_of_run(path.resolve()) for folder in folders for path in find_runs(Path(folder)))


def read_run(folder: Path) -> Run:
    """Read one run folder, and return its settings and results as a Run.

    Raises:
        RunError: if the settings or the ledger are damaged. The message names the file and, for the ledger, the line.
    """
    if not (folder / "settings.json").exists():
        raise RunError(f"{folder} has a ledger, but no settings.json: restore the file from a backup")
    settings = read_settings(folder, required=("learner",) if (folder / "ledger.jsonl").exists() else ())
    path = folder / "ledger.jsonl"
    ledger = Ledger(path if path.exists() or not path.with_name("ledger.jsonl.gz").exists() else f"{path}.gz")
    notes: list[str] = []
    written = _read_optional(lambda: read_summary(folder), notes)
    rows = ledger.rows()
    last_t = len(rows) - 1
    is_language_model = bool(rows) and rows[0].scores.error_rate is None
    columns = _columns(ledger.path, rows, "perplexity" if is_language_model else "error_rate")
    first = first_charged_arrival(settings)
    summary = dict(summarize(rows, first)) if len(rows) > 1 else {}
    if isinstance(count := written.get("num_arrivals"), int) and count > max(last_t, 0):
        raise RunError(
            f"{ledger.path} ends at t={last_t}, but summary.json beside it counts {count} arrivals: run the training "
            f"command again, or restore both from a backup"
        )
    check_summary(ledger.path, rows, written, first)
    for name in ("wall_seconds", *TRANSFER_METRICS):
        if (value := written.get(name)) is not None:
            summary[name] = value
    digests = _digests(folder)
    return Run(
        folder=folder,
        seed=settings.get("seed"),
        num_arrivals=_num_arrivals(digests, settings, last_t),
        digests=digests,
        expert_load={row.t: row.scores.expert_load for row in rows if row.updated and row.scores.expert_load},
        period_losses={row.t: period_losses(row) for row in rows if row.t >= 1 and row.scores.period_perplexities},
        task_scores=_by_task(columns["stage"], _read_optional(lambda: read_task_scores(folder), notes) or []),
        summary=summary,
        settings=settings,
        provenance=_read_optional(lambda: read_provenance(folder), notes),
        notes=tuple(notes),
        rows=tuple(rows),
        is_running=holder_of_run(folder) is not None,
        **columns,
    )


def _read_or_explain(folder: Path) -> Run | str:
    """Read a run folder. Return the Run, or an error message if the folder cannot be read."""
    try:
        return read_run(folder)
    except (RunError, OSError) as error:
        return message_of(error)
    except Exception as error:  # damaged files can cause any exception, which must not stop the report
        return f"{folder} cannot be read ({error!r}): restore its files"


def _read_optional(read: Callable[[], Any], notes: list[str]) -> Any:
    """Return what `read` returns; {} if the file that it reads is missing. Of a damaged file, add a note."""
    try:
        return read()
    except FileNotFoundError:
        return {}
    except (RunError, OSError) as error:
        notes.append(f"without this file: {error}")
        return {}


def _by_task(stage: Array, scores: Sequence[TaskScore]) -> dict[str, Array]:
    """Return `Run.task_scores` from the results of the stages. `stage` is `Run.stage`."""
    found: dict[str, Array] = {}
    for score in scores:
        for metric, value in list(score["metrics"].items())[:1]:
            of_task = found.setdefault(f"{score['task']}: {metric}", np.full(len(stage), np.nan))
            of_task[stage == score["stage"]] = value
    return found


def _digests(folder: Path) -> tuple[str, ...]:
    """Return the digests in arrivals.json; () if it is missing, incomplete, or was written by another release."""
    with suppress(RunError, FileNotFoundError):
        return tuple(read_arrivals(folder)["digests"])
    return ()


def _num_arrivals(digests: Sequence[str], settings: Mapping[str, Any], last_t: int) -> int:
    """Return the number of mega-batches that will have arrived when the run is finished.

    It is that of the digests in arrivals.json; without them, that of the settings, or the last arrival so far.
    """
    if digests:
        return max(len(digests), last_t)
    for name in ("arrivals", "mega_batches"):
        if isinstance(value := settings.get(name), int) and value >= last_t:
            return value
    return last_t


def _columns(path: Path, rows: Sequence[LedgerRow], quality: str) -> dict[str, Array]:
    """Return the array attributes of `Run`: name -> array with one entry per row of the ledger `path`.

    `quality` is the name of the score in `Run.quality`: "error_rate" or "perplexity". Raise RunError if a value is
    missing.
    """
    scores, spent = [row.scores for row in rows], [row.spent for row in rows]
    sources: dict[str, tuple[Sequence[Any], str]] = {
        "quality": (scores, quality),
        "validation": (scores, f"validation_{quality}"),
        **{
            name: (scores, name)
            for name in ("num_params", "forward_flops", "bits_per_byte", "num_members", "num_experts", "overflow")
        },
        **{name: (spent, name) for name in ("train_flops", "train_seconds")},
    }
    values = {column: (name, list(map(attrgetter(name), objects))) for column, (objects, name) in sources.items()}
    values["prequential"] = "prequential_error_rate", [row.prequential and row.prequential.error_rate for row in rows]
    columns = {column: _column(path, *one, column in OPTIONAL_COLUMNS) for column, one in values.items()}
    return {**columns, "stage": np.array([row.stage for row in rows])}


def _column(path: Path, name: str, values: list[Any], may_be_missing: bool) -> Array:
    """Return the values of one ledger column as float64. If `may_be_missing`, each None is replaced by NaN.

    Raise RunError if a value is missing or too large for float64.
    """
    if None in values:
        if not may_be_missing:
            raise RunError(
                f"{path}, line {values.index(None) + 1}: {name} is None, expected a number: restore the file"
            )
        values = [float("nan") if value is None else value for value in values]
    try:
        return np.array(values, np.float64)
    except OverflowError as error:
        raise RunError(f"{path}: {name} contains a number that is too large for float64: restore the file") from error
