"""Grids of alma-vision runs whose ledgers are committed: what the studies of a dataset share.

Every run is one command, printed before it starts and kept in its settings.json. A run that is finished is passed over,
a killed one goes on. Figures and tables are made of them by results/rebuild.py.
"""

import argparse
import gzip
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    name: str
    settings: list[str]
    """Of alma-vision, without dataset, data_root, seeds and out."""
    seeds: int = 3


@dataclass(frozen=True)
class Study:
    """A grid and where its results lie: `folder`/ledgers/NAME, run folders without their checkpoints."""

    folder: Path
    dataset: str
    jobs: Sequence[Job]

    def main(self, description: str) -> None:
        """The command line of a study: run what is missing."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("what", choices=["run"])
        parser.add_argument("--data-root", default="data")
        parser.add_argument("--side-by-side", type=int, default=2)
        parser.add_argument("--hours", type=float, default=3.0, help="after them no further run is started")
        parser.add_argument("--only", default="", help="runs whose name begins so")
        arguments = parser.parse_args()
        until = time.monotonic() + 3600 * arguments.hours
        missing = [job for job in self.jobs if job.name.startswith(arguments.only) and not self._is_done(job)]
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(lambda job: self._run(job, arguments.data_root, until), missing))

    def _is_done(self, job: Job) -> bool:
        return (self.folder / "ledgers" / job.name / "summary.json").exists()

    def _run(self, job: Job, data_root: str, until: float) -> None:
        if time.monotonic() > until:
            return
        out = ROOT / "runs" / self.dataset / job.name
        program = Path(sysconfig.get_path("scripts")) / "alma-vision"
        settings = [f"dataset={self.dataset}", *job.settings, f"seeds={job.seeds}", f"data_root={data_root}"]
        command = [str(program), *settings, f"out={out}", "routing_examples=0"]
        began = time.monotonic()
        print(f"$ {shlex.join(['alma-vision', *command[1:]])}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{job.name} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
            return
        keep(out, self.folder / "ledgers" / job.name)
        summary = json.loads((out / "summary.json").read_text())
        cer = summary.get("mean", summary)["cer"]
        print(f"{job.name}: CER {cer:.2f}, {time.monotonic() - began:.0f} s", flush=True)


def keep(run: Path, target: Path) -> None:
    """Copy of a run what a report reads; the ledger gzipped, as between stages its rows repeat."""
    for settings in sorted(run.rglob("settings.json")):
        folder = target / settings.parent.relative_to(run)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("settings.json", "provenance.json", "summary.json"):
            shutil.copyfile(settings.parent / name, folder / name)
        # Without a name and a time inside: the same ledger is the same file.
        ledger = gzip.compress((settings.parent / "ledger.jsonl").read_bytes(), mtime=0)
        (folder / "ledger.jsonl.gz").write_bytes(ledger)
    if not (target / "summary.json").exists():  # last: by it a run is known to be done
        shutil.copyfile(run / "summary.json", target / "summary.json")
