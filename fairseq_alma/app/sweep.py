"""The table at the end of a sweep (`-m`): its runs, the best by validation first."""

import re
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from fairseq_alma.app.tables import wide_console
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.run_record import find_runs


class BestByValidation(Callback):
    """Prints the table and writes it to SWEEP/sweep.json. Test scores do not influence the order."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print and write the table. Hydra calls this when all jobs have ended."""
        folder = Path(config.hydra.sweep.dir)
        finished, unfinished = _runs_of(folder)
        if unfinished:
            wide_console(sys.stderr).print(f"not finished, so not compared: {'; '.join(unfinished)}")
        if finished:
            write_json(folder / "sweep.json", finished)
            wide_console().print(_table(finished))


def _runs_of(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the summaries of the finished runs, the best first, and the names of all other runs."""
    seeds_of: dict[Path, list[Path]] = {}
    for path in find_runs(folder):
        run = path.parent if re.fullmatch(r"seed_\d+", path.name) else path
        seeds_of.setdefault(run, []).append(path)
    finished, unfinished = [], []
    for run, seeds in seeds_of.items():
        name = str(run.relative_to(folder))
        if all(_is_finished(seed) for seed in seeds):
            summary = read_json(run / "summary.json")
            finished.append({"run": name, **summary.get("mean", summary)})
        else:
            unfinished.append(name)
    # Hydra makes the folder of a job before it runs: a job that fails early leaves a folder without settings.
    known = {parent for run in seeds_of for parent in (run, *run.parents)}
    unfinished += [path.name for path in sorted(folder.iterdir()) if path.is_dir() and path not in known]
    finished.sort(key=lambda summary: summary["final_validation"])
    return finished, unfinished


def _table(runs: list[dict[str, Any]]) -> Table:
    is_vision = "cer" in runs[0]
    quality = "error rate" if is_vision else "perplexity"
    table = Table(title=f"by final validation {quality}, best first", title_justify="left")
    for column in ("run", "validation", "test", *(["CER"] if is_vision else []), "TFLOP"):
        table.add_column(column, justify="left" if column == "run" else "right")
    # Settings that all runs have in common are left out of the names.
    common = set.intersection(*(set(run["run"].split(",")) for run in runs)) if len(runs) > 1 else set()
    for run in runs:
        table.add_row(
            ",".join(part for part in run["run"].split(",") if part not in common),
            *(f"{run[key]:.{4 if is_vision else 3}f}" for key in ("final_validation", "final")),
            *([f"{run['cer']:.2f}"] if is_vision else []),
            f"{run['comp'] / 1e12:.3g}",
        )
    return table


def _is_finished(run: Path) -> bool:
    """Return True if all mega-batches of the run have arrived. On fewer arrivals a run may look better than it is."""
    try:
        arrivals, summary = read_json(run / "arrivals.json"), read_json(run / "summary.json")
    except FileNotFoundError:
        return False
    return summary["num_arrivals"] == len(arrivals["digests"])
