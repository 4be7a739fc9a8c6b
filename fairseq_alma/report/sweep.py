"""Prints a table of the results at the end of a sweep (`-m`).

A sweep has one job for each combination of settings. A job trains this combination with one seed or several seeds. The
table has one line per job and is sorted by the measure by which alma-report compares the same runs: the prequential
validation score, or for images, if a job does not have it, the average validation error over all arrivals. If a job has
several seeds, the mean over the seeds is used.
"""

import re
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
from fairseq_alma.core.files import write_json
from fairseq_alma.core.metrics import FINAL_KEY, PREQUENTIAL_KEYS, read_summary
from fairseq_alma.core.run_folder import RunFolder, find_runs
from fairseq_alma.core.seed_record import is_finished
from fairseq_alma.report.grouping import group_runs
from fairseq_alma.report.objectives import DEFAULT, is_vision_run, rule_of, validation_score
from fairseq_alma.report.reading import read_run
from fairseq_alma.report.runs import Comparison, Run

_SETTING_ENDS = re.compile(r",(?![^\[]*\])")
"""The commas in the name of a job that are not between the values of a list."""
AVERAGE_VALIDATION_KEY = "average_validation_error_rate"
"""Name of the average validation error in sweep.json."""


class BestByValidation(Callback):
    """Hydra callback that compares the jobs of a sweep. It prints a table and writes SWEEP/sweep.json.

    The jobs are sorted by validation scores. Test scores do not influence the order.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and write SWEEP/sweep.json. Hydra calls this method when all jobs of a sweep have ended."""
        folder = Path(config.hydra.sweep.dir)
        jobs, unfinished = _jobs_in(folder, of_images="stream" not in config)
        if unfinished:
            names = "; ".join(unfinished)
            wide_console(sys.stderr).print(f"these jobs are not in the table, because they are not finished: {names}")
        if jobs:
            comparisons = group_runs([run for seeds in jobs.values() for run in seeds])
            summaries, key = _sorted_summaries(folder, jobs, comparisons)
            write_json(folder / "sweep.json", summaries)
            wide_console().print(_table(summaries, key))
            if len(comparisons) > 1:
                wide_console(sys.stderr).print(
                    "these jobs differ in the stream or in the number of arrivals, so their scores cannot be compared: "
                    f"`alma-report {shlex.quote(str(folder))}` compares those that can"
                )


def _jobs_in(folder: Path, of_images: bool) -> tuple[dict[str, list[Run]], list[str]]:
    """Return the run of each seed for each finished job of a sweep, by name, and the names of the unfinished jobs.

    Finished runs of the other command are left out: `of_images` says whether the jobs are those of alma-vision.
    """
    seeds_of: dict[Path, list[Path]] = {}
    for path in find_runs(folder):
        run = path.parent if RunFolder(path).is_of_one_of_several_seeds else path
        seeds_of.setdefault(run, []).append(path)
    finished: dict[str, list[Run]] = {}
    unfinished: list[str] = []
    for run, seeds in seeds_of.items():
        name = str(run.relative_to(folder))
        if not all(is_finished(seed) for seed in seeds):
            unfinished.append(name)
        elif is_vision_run((runs := [read_run(seed) for seed in seeds])[0]) == of_images:
            finished[name] = runs
    # A job that failed early has a folder without settings.json, which `find_runs` does not find. So add all folders
    # that are not in `known` to the unfinished jobs.
    known = {parent for run in seeds_of for parent in (run, *run.parents)}
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    unfinished += [path.name for path in folders if path not in known]
    return finished, unfinished


def _sorted_summaries(
    folder: Path, jobs: Mapping[str, Sequence[Run]], comparisons: Sequence[Comparison]
) -> tuple[list[dict[str, Any]], str]:
    """Return the summary of each finished job, the best job first, and the key of the score by which they are sorted.

    It is the score by which alma-report would compare the jobs. If no job has it, it is the final validation score.
    """
    summaries = {name: read_summary(folder / name) for name in jobs}
    found = [{"run": name, **summary.get("mean", summary)} for name, summary in summaries.items()]
    of_all = Comparison(comparisons[0].program, "", "", 0, tuple(group for one in comparisons for group in one.groups))
    rule, key = rule_of(of_all), PREQUENTIAL_KEYS[0 if of_all.is_vision else 1]
    if rule == "validation":
        key = AVERAGE_VALIDATION_KEY
        runs = [run for seeds in jobs.values() for run in seeds]
        untrained = sum(float(run.quality[0]) for run in runs) / len(runs)
        for summary, seeds in zip(found, jobs.values(), strict=True):
            scores = [validation_score(run, DEFAULT, rule, untrained) for run in seeds]
            if None not in scores:
                summary[key] = sum(score for score in scores if score is not None) / len(scores)
    if all(summary.get(key) is None for summary in found):
        key = FINAL_KEY
    return sorted(found, key=lambda one: value if isfinite(value := _number(one.get(key))) else inf), key


def _number(value: float | None) -> float:
    return nan if value is None else value


def _table(runs: list[dict[str, Any]], key: str) -> Table:
    is_vision = "cer" in runs[0]
    quality = "error rate" if is_vision else "perplexity"
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
    names_of = [_SETTING_ENDS.split(run["run"]) for run in runs]
    common = set.intersection(*map(set, names_of)) if len(runs) > 1 else set()
    for run, parts in zip(runs, names_of, strict=True):
        table.add_row(
            ",".join(part for part in parts if part not in common),
            *(f"{_number(run.get(key)):.{4 if is_vision else 3}f}" for key in scores),
            *([f"{run['cer']:.2f}"] if is_vision else []),
            f"{run['comp'] / flops_of_unit:.4g}",
        )
    return table
