"""After -m: the runs of the sweep, best by validation first."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from fairseq_alma.app.tables import wide_console
from fairseq_alma.core.run_record import find_runs


class BestByValidation(Callback):
    """Prints the table and writes it to SWEEP/sweep.json. The test set has no part in the order."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        runs, unfinished, seeds_of = [], [], {}
        for path in find_runs(folder):
            run = path.parent if re.fullmatch(r"seed_\d+", path.name) else path
            seeds_of.setdefault(run, []).append(path)
        for run, seeds in seeds_of.items():
            name = str(run.relative_to(folder))
            if all(_is_finished(seed) for seed in seeds):
                summary = json.loads((run / "summary.json").read_text())
                runs.append({"run": name, **summary.get("mean", summary)})
            else:
                unfinished.append(name)
        # What failed before it wrote its settings: Hydra has made the folder.
        known = {parent for run in seeds_of for parent in (run, *run.parents)}
        unfinished += [path.name for path in sorted(folder.iterdir()) if path.is_dir() and path not in known]
        runs.sort(key=lambda run: run["final_validation"])
        if unfinished:
            wide_console(sys.stderr).print(f"not finished, so not compared: {'; '.join(unfinished)}")
        if not runs:
            return
        (folder / "sweep.json").write_text(json.dumps(runs, indent=2) + "\n")
        is_vision = "cer" in runs[0]
        quality = "error rate" if is_vision else "perplexity"
        table = Table(title=f"by final validation {quality}, best first", title_justify="left")
        for name in ("run", "validation", "test", *(["CER"] if is_vision else []), "TFLOP"):
            table.add_column(name, justify="left" if name == "run" else "right")
        common = set.intersection(*(set(run["run"].split(",")) for run in runs)) if len(runs) > 1 else set()
        for run in runs:
            name = ",".join(part for part in run["run"].split(",") if part not in common)
            table.add_row(
                name,
                *(f"{run[key]:.{4 if is_vision else 3}f}" for key in ("final_validation", "final")),
                *([f"{run['cer']:.2f}"] if is_vision else []),
                f"{run['comp'] / 1e12:.3g}",
            )
        wide_console().print(table)


def _is_finished(run: Path) -> bool:
    """Whether every mega-batch of its stream has arrived: a run that died early would look best on what it saw."""
    try:
        arrivals = json.loads((run / "arrivals.json").read_text())
        summary = json.loads((run / "summary.json").read_text())
    except FileNotFoundError:
        return False
    return summary["num_arrivals"] == len(arrivals["digests"])
