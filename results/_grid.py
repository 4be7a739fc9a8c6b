"""Run a grid of alma-vision settings, and copy the ledgers of the runs into results/, where they are committed.

The studies of images in results/ use this module. Every run is one command, which is printed before
the run starts and stored in provenance.json. A finished run is skipped, and a run that was killed is continued.
results/rebuild.py makes figures and tables from the ledgers.
"""

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fairseq_alma.core.files import write_json
from fairseq_alma.core.metrics import mean_and_standard_error

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    name: str
    """Name of the run folder."""
    settings: list[str]
    """Arguments of alma-vision, without dataset, data_root, seeds and out."""
    seeds: int = 3
    """Number of seeds."""


@dataclass(frozen=True)
class Study:
    """A grid of runs. The run NAME is stored without its checkpoints in `folder`/ledgers/NAME."""

    folder: Path
    """Folder of the study."""
    dataset: str
    """Dataset of every run."""
    jobs: Sequence[Job]
    """The runs, in the order in which they start."""
    actions: ClassVar[Mapping[str, str]] = {"run": "run the jobs that are missing"}
    """What the command line can ask for -> help text."""

    def main(self, description: str) -> None:
        """Read the command line and do what it asks for."""
        parser = argparse.ArgumentParser(description=description)
        help_text = "; ".join(f"{name}: {text}" for name, text in self.actions.items())
        parser.add_argument("what", choices=[*self.actions], help=help_text)
        parser.add_argument("--data-root", default="data", help="folder of the dataset's files (default: data)")
        parser.add_argument("--side-by-side", type=int, default=2, help="number of runs at a time (default: 2)")
        parser.add_argument("--hours", type=float, default=3.0, help="start no run after this many hours (default: 3)")
        parser.add_argument("--only", default="", help="run only jobs whose name starts with this")
        parser.add_argument(
            "--seed-by-seed",
            action="store_true",
            help="train each seed in a run of its own, which is copied as soon as it has finished, instead of all "
            "seeds of a job at once",
        )
        arguments = parser.parse_args()
        self.do(arguments, deadline=time.monotonic() + 3600 * arguments.hours)

    def do(self, arguments: argparse.Namespace, deadline: float) -> None:
        """Run every job that has no committed ledger. After the deadline, start no run."""
        run = self._run_seed_by_seed if arguments.seed_by_seed else self._run
        missing = [job for job in self.jobs if job.name.startswith(arguments.only) and not self._is_done(job)]
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(lambda job: run(job, arguments.data_root, deadline), missing))

    def _is_done(self, job: Job) -> bool:
        return (self.folder / "ledgers" / job.name / "summary.json").exists()

    def _run(self, job: Job, data_root: str, deadline: float) -> None:
        """Train all seeds of a job at once, unless the deadline has passed, and copy their ledgers."""
        if self._train(job, job.name, [f"seeds={job.seeds}"], data_root, deadline):
            copy_results(self._runs / job.name, self.folder / "ledgers" / job.name, data_root)

    def _run_seed_by_seed(self, job: Job, data_root: str, deadline: float) -> None:
        """Train the seeds of a job one after another and copy the ledger of each. A copied seed is skipped."""
        target = self.folder / "ledgers" / job.name
        names = [f"seed_{seed}" for seed in range(job.seeds)]
        for seed, name in enumerate(names):
            if not (target / name / "summary.json").exists():
                if not self._train(job, f"{job.name}/{name}", [f"seed={seed}"], data_root, deadline):
                    return
                copy_results(self._runs / job.name / name, target / name, data_root)
        per_seed = [json.loads((target / name / "summary.json").read_text()) for name in names]
        write_json(target / "summary.json", mean_and_standard_error(per_seed))

    @property
    def _runs(self) -> Path:
        return ROOT / "runs" / self.dataset

    def _train(self, job: Job, name: str, seeds: list[str], data_root: str, deadline: float) -> bool:
        """Train a job in the run folder `name`. Return False if the deadline has passed or the run has failed."""
        if time.monotonic() > deadline:
            return False
        out = self._runs / name
        program = Path(sysconfig.get_path("scripts")) / "alma-vision"
        settings = [f"dataset={self.dataset}", *job.settings, *seeds, f"data_root={data_root}"]
        command = [str(program), *settings, f"out={out}"]
        start = time.monotonic()
        print(f"$ {shlex.join(['alma-vision', *command[1:]])}", flush=True)
        # Plugins of rows are modules of the repository, such as results.rivals.er.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        result = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        if result.returncode:
            print(f"{name} failed:\n{result.stderr[-2000:]}", file=sys.stderr, flush=True)
            return False
        summary = json.loads((out / "summary.json").read_text())
        cer = summary.get("mean", summary)["cer"]
        print(f"{name}: CER {cer:.2f}, {time.monotonic() - start:.0f} s", flush=True)
        return True


def copy_results(run: Path, target: Path, data_root: str = "data", runs: Path | None = None) -> None:
    """Copy the files of a run that a report reads.

    Paths of the machine are left out: those in the repository become relative, the folder of the data becomes `data`,
    and that of the runs becomes runs/NAME. So a command in provenance.json can be given on another machine as it is.

    Ledgers are compressed, because many of their rows are nearly equal: the scores change only after a stage.

    Args:
        run: the run folder. With several seeds, it contains one run folder per seed.
        target: the folder to copy to.
        data_root: the folder of the dataset's files.
        runs: the folder of the runs, if it is not in the repository.
    """
    places = {Path(data_root): "data"} | ({} if runs is None else {runs: f"runs/{runs.name}"})
    for settings in sorted(run.rglob("settings.json")):
        folder = target / settings.parent.relative_to(run)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("settings.json", "provenance.json", "summary.json"):
            text = (settings.parent / name).read_text(encoding="utf-8").replace(f"{ROOT}/", "")
            for path, short in places.items():
                text = re.sub(rf"{re.escape(str(path.absolute()))}(?![\w.-])", short, text)
            (folder / name).write_text(text, encoding="utf-8")
        # Store no file name and no time in the compressed file, so that equal ledgers give equal files.
        ledger = gzip.compress((settings.parent / "ledger.jsonl").read_bytes(), mtime=0)
        (folder / "ledger.jsonl.gz").write_bytes(ledger)
    if not (target / "summary.json").exists():  # copied last, because _is_done takes it for the done mark
        shutil.copyfile(run / "summary.json", target / "summary.json")
