"""After `alma-lm -m`: the runs of the sweep, best validation perplexity first."""

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from fairseq_alma.display import wide_console


class BestByValidation(Callback):
    """Prints the table and writes it to SWEEP/sweep.json. The test set has no part in the order."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        runs = []
        for path in sorted(folder.glob("*/summary.json")):
            summary = json.loads(path.read_text())
            summary = summary.get("mean", summary)  # several seeds
            runs.append({"run": path.parent.name, **summary})
        runs.sort(key=lambda run: run["final_validation"])
        if not runs:
            return
        (folder / "sweep.json").write_text(json.dumps(runs, indent=2) + "\n")
        table = Table(title="by final validation perplexity, best first", title_justify="left")
        for name in ("run", "validation", "test", "TFLOP"):
            table.add_column(name, justify="left" if name == "run" else "right")
        common = set.intersection(*(set(run["run"].split(",")) for run in runs)) if len(runs) > 1 else set()
        for run in runs:
            name = ",".join(part for part in run["run"].split(",") if part not in common)
            table.add_row(name, f"{run['final_validation']:.3f}", f"{run['final']:.3f}", f"{run['comp'] / 1e12:.2f}")
        wide_console().print(table)
