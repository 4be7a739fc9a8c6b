"""Read run folders into Run objects, and put the Run objects into groups.

Any file in a run folder can be incomplete or damaged. A process may be writing the file at this moment, or a killed
process or a full disk may have damaged it. Another release of ALMA may also have written it in another format. A run
that cannot be read is skipped, and the report contains an error message with the file and, if possible, the line.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.error_matrix import TRANSFER_METRICS
from fairseq_alma.core.errors import RunError, message_of
from fairseq_alma.core.lease import holder_of_run
from fairseq_alma.core.ledger import Ledger, LedgerRow, Scores, Spent
from fairseq_alma.core.metrics import check_summary, period_losses, read_summary, summarize
from fairseq_alma.core.provenance import read_provenance
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import find_runs
from fairseq_alma.report.grouping import (
    first_charged_arrival,
    group_runs,
    runs_to_shorten,
    with_numbered_test_sets,
    without_beginnings,
)
from fairseq_alma.report.runs import Array, ReportData, Run

PARALLEL_FROM = 200
"""Minimum number of run folders that are read by several processes in parallel. For fewer, one process is faster."""
MAX_PROCESSES = 16
"""Maximum number of processes that read run folders in parallel."""

SCORE_COLUMNS = ("num_params", "forward_flops", "num_members", "num_experts", "overflow")
"""Names of the `Run` attributes that are read from `LedgerRow.scores`, where they have the same names.

`Run.quality` and `Run.validation` are missing here, because they have other names in the ledger. There, `Run.quality`
is called error_rate or perplexity, and `Run.validation` is called validation_error_rate or validation_perplexity.
"""
SPENT_COLUMNS = ("train_flops", "num_updates", "train_seconds")
"""Names of the `Run` attributes that are read from `LedgerRow.spent`, where they have the same names."""
OPTIONAL_COLUMNS = ("validation", "num_members", "num_experts", "overflow")
"""Attributes of `Run` that may be missing in a row of the ledger."""


def read_runs(folders: Iterable[str | Path]) -> ReportData:
    """Read all runs in `folders`, put them into groups, and put groups on the same stream into a Comparison.

    Args:
        folders: run folders, or folders that contain run folders at any depth.

    Returns:
        The comparisons, and messages about the folders and runs that were left out.

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
    for path, run in zip(paths, _read_all(list(paths)), strict=True):
        if isinstance(run, str):
            data.errors.append(run)
        elif run.last_t < 0:
            data.notes.append(f"{path} has no arrival yet")
        else:
            runs.append(run)
            data.notes += run.notes
    runs, beginnings = _with_shared_arrivals(with_numbered_test_sets(runs))
    data.notes += beginnings
    if not runs:
        reasons = "".join(f"\n  {message}" for message in [*data.errors, *data.notes])
        raise RunError(f"no run can be reported, because no readable run has recorded an arrival:{reasons}")
    data.comparisons = group_runs(runs)
    return data


def is_any_run_held(folders: Iterable[str | Path]) -> bool:
    """Return True if a process is working on a run in `folders`, at any depth.

    A process that works on a run holds the lease (the lock) of the run folder or of its parent folder.
    """
    return any(holder_of_run(path.resolve()) for folder in folders for path in find_runs(Path(folder)))


def _with_shared_arrivals(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Shorten runs on a stream that has grown to the arrivals that they share.

    Returns:
        The runs, and one message for each run that is left out, because another run continues it.
    """
    shortened = runs_to_shorten(runs)
    if not shortened:
        return runs, []
    lengths = {runs[index].folder: runs[index].num_arrivals for index in shortened}
    for index, (shared, longest) in shortened.items():
        runs[index] = replace(read_run(runs[index].folder, shared), longest=longest, test_set=runs[index].test_set)
    return without_beginnings(runs, lengths)


def read_run(folder: Path, until: int | None = None) -> Run:
    """Read one run folder, and return its settings and results as a Run.

    Args:
        folder: the run folder.
        until: number of arrivals to read, as if the stream ended there. By default, all arrivals are read.

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
    if until is not None:
        rows = rows[: until + 1]
    is_language_model = bool(rows) and rows[0].scores.error_rate is None
    columns = _columns(ledger.path, rows, "perplexity" if is_language_model else "error_rate")
    first = first_charged_arrival(settings)
    summary = dict(summarize(rows, first)) if len(rows) > 1 else {}
    # What summary.json adds is about the complete run.
    if len(rows) - 1 == last_t:
        if isinstance(count := written.get("num_arrivals"), int) and count > max(last_t, 0):
            raise RunError(
                f"{ledger.path} ends at t={last_t}, but summary.json beside it counts {count} arrivals: run the "
                f"training command again, or restore both from a backup"
            )
        check_summary(ledger.path, rows, written, first)
    else:
        written = {}
    for name in ("wall_seconds", *TRANSFER_METRICS):
        if (value := written.get(name)) is not None:
            summary[name] = value
    return Run(
        folder=folder,
        seed=settings.get("seed"),
        num_arrivals=_num_arrivals(folder, settings, last_t) if until is None else until,
        expert_load={row.t: row.scores.expert_load for row in rows if row.updated and row.scores.expert_load},
        period_losses={row.t: period_losses(row) for row in rows if row.t >= 1 and row.scores.period_perplexities},
        summary=summary,
        settings=settings,
        provenance=_read_optional(lambda: read_provenance(folder), notes),
        notes=tuple(notes),
        is_running=holder_of_run(folder) is not None,
        longest=0,
        test_set=0,
        **columns,
    )


def _read_all(folders: Sequence[Path]) -> list[Run | str]:
    """Read run folders, in parallel if there are many.

    Returns:
        One entry per folder: the Run, or an error message if the folder cannot be read.
    """
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(folders) < PARALLEL_FROM or num_processes < 2:
        return [_read_or_explain(folder) for folder in folders]
    # "spawn" starts new Python processes. The alternative "fork" copies this process, and a copy can hang if a library
    # that this process uses has started threads.
    with ProcessPoolExecutor(min(num_processes, MAX_PROCESSES), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_read_or_explain, folders, chunksize=16))


def _read_or_explain(folder: Path) -> Run | str:
    """Read a run folder. Return the Run, or an error message if the folder cannot be read."""
    try:
        return read_run(folder)
    except (RunError, OSError) as error:
        return message_of(error)
    except Exception as error:  # damaged files can cause any exception, which must not stop the report
        return f"{folder} cannot be read ({error!r}): restore its files"


def _read_optional(read: Callable[[], dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return what `read` returns; {} if the file that it reads is missing. Of a damaged file, add a note."""
    try:
        return read()
    except FileNotFoundError:
        return {}
    except (RunError, OSError) as error:
        notes.append(f"without this file: {error}")
        return {}


def _num_arrivals(folder: Path, settings: Mapping[str, Any], last_t: int) -> int:
    """Return the number of mega-batches that will have arrived when the run is finished.

    The number is read from arrivals.json. If this file is missing or damaged, the number is taken from the settings. If
    the settings do not contain it either, the result is `last_t`, the last arrival in the ledger.
    """
    path = folder / "arrivals.json"
    if path.exists():
        try:
            return max(len(read_arrivals(folder)["digests"]), last_t)
        except RunError:
            # arrivals.json is incomplete, or another release of ALMA wrote it. Ignore the error, and read the number
            # of arrivals from the settings below.
            pass
    for name in ("arrivals", "mega_batches"):
        if isinstance(value := settings.get(name), int) and value >= last_t:
            return value
    return last_t


def _columns(path: Path, rows: Sequence[LedgerRow], quality: str) -> dict[str, Array]:
    """Return the array attributes of `Run`, as a dictionary: name -> array with one entry per row of the ledger.

    Args:
        path: path of the ledger, for error messages.
        rows: the rows of the ledger.
        quality: name of the score that is stored in `Run.quality`: "error_rate" or "perplexity".

    Raises:
        RunError: if a value is missing.
    """
    scores, spent = [row.scores for row in rows], [row.spent for row in rows]
    sources: dict[str, tuple[Sequence[Scores | Spent], str]]
    sources = {"quality": (scores, quality), "validation": (scores, f"validation_{quality}")}
    sources |= {name: (scores, name) for name in SCORE_COLUMNS}
    sources |= {name: (spent, name) for name in SPENT_COLUMNS}
    columns = {"stage": np.array([row.stage for row in rows])}
    for column, (objects, name) in sources.items():
        columns[column] = _column(path, name, list(map(attrgetter(name), objects)), column in OPTIONAL_COLUMNS)
    ahead = [None if row.prequential is None else row.prequential.error_rate for row in rows]
    columns["prequential"] = _column(path, "prequential_error_rate", ahead, may_be_missing=True)
    return columns


def _column(path: Path, name: str, values: list[Any], may_be_missing: bool) -> Array:
    """Return the values of one ledger column as float64. If `may_be_missing`, each None is replaced by NaN.

    Raises:
        RunError: if a value is missing or too large for float64.
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
