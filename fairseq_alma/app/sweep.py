"""Prints a table of the results at the end of a sweep (`-m`).

A sweep has one job for each combination of settings. A job trains this combination with one seed or several seeds. The
table has one line per job and is sorted by the measure by which alma-report compares the same runs: the prequential
validation score, or for images, if a job does not have it, the average validation error over all arrivals. If a job has
several seeds, the mean over the seeds is used.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from fairseq_alma.app.tables import flops_unit, wide_console
from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.files import write_json
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.metrics import (
    AVERAGE_VALIDATION_KEY,
    PREQUENTIAL_KEYS,
    average_validation_error,
    read_summary,
)
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, find_runs
from fairseq_alma.core.seed_record import is_finished

FINAL_KEY = "final_validation"
"""Key of the validation score after the last arrival in summary.json."""


class BestByValidation(Callback):
    """Hydra callback that compares the jobs of a sweep. It prints a table and writes SWEEP/sweep.json.

    The jobs are sorted by validation scores (see `score_key`). Test scores do not influence the order.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and write SWEEP/sweep.json. Hydra calls this method when all jobs of a sweep have ended."""
        folder = Path(config.hydra.sweep.dir)
        finished, unfinished = _runs_of(folder, of_images="stream" not in config)
        if unfinished:
            jobs = "; ".join(unfinished)
            wide_console(sys.stderr).print(f"these jobs are not in the table, because they are not finished: {jobs}")
        if finished:
            write_json(folder / "sweep.json", finished)
            wide_console().print(_table(finished))
            if len({_stream_of(folder / str(summary["run"])) for summary in finished}) > 1:
                wide_console(sys.stderr).print(
                    "these jobs differ in the stream or in the number of arrivals, so their scores cannot be compared: "
                    f"`alma-report {shlex.quote(str(folder))}` compares those that can"
                )


def _runs_of(folder: Path, of_images: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the summaries of the finished jobs of a sweep, best job first, and the names of the unfinished jobs.

    Finished runs of the other command are left out: `of_images` says whether the jobs are those of alma-vision.
    """
    seeds_of: dict[Path, list[Path]] = {}
    for path in find_runs(folder):
        run = path.parent if RunFolder(path).is_of_one_of_several_seeds else path
        seeds_of.setdefault(run, []).append(path)
    finished: list[dict[str, Any]] = []
    unfinished: list[str] = []
    folders_of: list[list[Path]] = []  # for each finished job, the run folder of each seed
    for run, seeds in seeds_of.items():
        name = str(run.relative_to(folder))
        if all(is_finished(seed) for seed in seeds):
            summary = read_summary(run)
            summary = summary.get("mean", summary)
            if ("cer" in summary) == of_images:
                finished.append({"run": name, **summary})
                folders_of.append(seeds)
        else:
            unfinished.append(name)
    # A job that failed early has a folder without settings.json, which `find_runs` does not find. So add all folders
    # that are not in `known` to the unfinished jobs.
    known = {parent for run in seeds_of for parent in (run, *run.parents)}
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    unfinished += [path.name for path in folders if path not in known]
    if finished:
        if score_key(finished) == FINAL_KEY:
            _add_average_validation(finished, folders_of)
        key = score_key(finished)
        finished.sort(key=lambda summary: value if isfinite(value := _number(summary.get(key))) else inf)
    return finished, unfinished


def _stream_of(run: Path) -> tuple:
    """Return what must be equal for two finished jobs, so that their scores can be compared."""
    seed = next(iter(find_runs(run)))
    settings, num_arrivals = read_settings(seed), len(read_arrivals(seed)["digests"])
    names = ("dataset", "order", "mega_batches", "cer_from", "test_digest", "evaluated_on")
    return num_arrivals, *(json.dumps(settings.get(name)) for name in names)


def _add_average_validation(summaries: Sequence[dict[str, Any]], folders_of: Sequence[list[Path]]) -> None:
    """Add the average validation error to the summaries of vision jobs, as alma-report computes it.

    `folders_of` has, for each job, the run folder of each seed.
    """
    ledgers = [[Ledger(folder / "ledger.jsonl").rows() for folder in folders] for folders in folders_of]
    untrained = [rows[0].scores.error_rate if rows else None for seeds in ledgers for rows in seeds]
    known = [value for value in untrained if value is not None]
    if not known or len(known) < len(untrained):  # language models
        return
    for summary, seeds in zip(summaries, ledgers, strict=True):
        values = [average_validation_error(rows, sum(known) / len(known)) for rows in seeds]
        if None not in values:
            summary[AVERAGE_VALIDATION_KEY] = sum(value for value in values if value is not None) / len(values)


def score_key(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return the key of the score by which runs are compared, as alma-report compares them. A lower score is better.

    For images, it is the prequential score if all summaries have it, except those of diverged runs. A run with only one
    arrival has no prequential score. Then it is the average validation error, if a summary has it, and otherwise the
    final validation error. With one arrival, the two are equal.

    For language models, it is the prequential score if a summary has it. Runs without the chosen score come last.

    Args:
        summaries: the content of summary.json of each run, or the mean over its seeds; for vision jobs of a sweep, with
            the average validation error.
    """
    scored = [summary for summary in summaries if isfinite(_number(summary.get(FINAL_KEY)))]
    of_images, of_text = PREQUENTIAL_KEYS
    if scored and all(summary.get(of_images) is not None for summary in scored):
        return of_images
    keys = (AVERAGE_VALIDATION_KEY, of_text)
    return next((key for key in keys if any(summary.get(key) is not None for summary in scored)), FINAL_KEY)


def _number(value: float | None) -> float:
    return nan if value is None else value


def _table(runs: list[dict[str, Any]]) -> Table:
    is_vision = "cer" in runs[0]
    quality, key = "error rate" if is_vision else "perplexity", score_key(runs)
    score = {FINAL_KEY: "final", AVERAGE_VALIDATION_KEY: "average"}.get(key, "prequential")
    title = f"sorted by {score} validation {quality}, best first"
    if score != "prequential":
        title += " (too low for small waits: the same data chose the epoch or checkpoint of each stage)"
    table = Table(title=title, title_justify="left")
    scores = [FINAL_KEY, "final"] if score == "final" else [key, FINAL_KEY, "final"]
    names = ["validation", "test"] if score == "final" else [score, "final validation", "test"]
    unit, flops_of_unit = flops_unit([run["comp"] for run in runs])
    for column in ("run", *names, *(["CER"] if is_vision else []), unit):
        table.add_column(column, justify="left" if column == "run" else "right")
    # The name of a job lists its settings. Leave out the settings that all jobs have in common, so that the table is
    # not too wide.
    common = set.intersection(*(set(run["run"].split(",")) for run in runs)) if len(runs) > 1 else set()
    for run in runs:
        table.add_row(
            ",".join(part for part in run["run"].split(",") if part not in common),
            *(f"{_number(run.get(key)):.{4 if is_vision else 3}f}" for key in scores),
            *([f"{run['cer']:.2f}"] if is_vision else []),
            f"{run['comp'] / flops_of_unit:.4g}",
        )
    return table
