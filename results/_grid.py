"""Grids of alma-vision runs whose ledgers are committed: what the studies of a dataset share.

Every run is one command, printed before it starts and kept in its settings.json. A run that is finished is passed over,
a killed one goes on. Ledgers are committed gzipped: they are many, and between stages repeat.
"""

import argparse
import gzip
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LABELS = {
    "sm": "SM", "ens": "Ens", "umix": "UMix", "gens": "gEns", "gmoe": "gMoE", "ff": "FF",
    "moe": "MoE", "gmoe_flat": "gMoE, flat gate", "ens_moe": "Ens of MoEs",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run of a grid."""

    name: str
    settings: list[str]
    """Of alma-vision, without dataset, data_root, seeds and out."""
    seeds: int = 3


@dataclass(frozen=True)
class Study:
    """A grid and where its results lie: `folder`/ledgers/NAME/seed_i.jsonl.gz and summary.json."""

    folder: Path
    dataset: str
    jobs: Sequence[Job]

    def main(self, description: str, report: Callable[[], None]) -> None:
        """The command line of a study: `run` what is missing, or `table`."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("what", choices=["run", "table"])
        parser.add_argument("--data-root", default="data")
        parser.add_argument("--side-by-side", type=int, default=2)
        parser.add_argument("--hours", type=float, default=3.0, help="after them no further run is started")
        parser.add_argument("--only", default="", help="runs whose name begins so")
        arguments = parser.parse_args()
        if arguments.what == "table":
            report()
            return
        until = time.monotonic() + 3600 * arguments.hours
        missing = [job for job in self.jobs if job.name.startswith(arguments.only) and not self.summary_of(job)]
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(lambda job: self._run(job, arguments.data_root, until), missing))

    def summary_of(self, job: Job) -> dict | None:
        """What a finished run came to."""
        path = self._ledgers(job) / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def rows_of(self, job: Job, seed: int) -> list[dict]:
        """The ledger of a run, t = 0..B."""
        content = gzip.decompress((self._ledgers(job) / f"seed_{seed}.jsonl.gz").read_bytes())
        return [json.loads(line) for line in content.splitlines()]

    def finished(self) -> list[Job]:
        return [job for job in self.jobs if self.summary_of(job)]

    def cells(self, job: Job) -> list[str]:
        """Of a table: CER, final error, parameters at the end, Mem, Comp."""
        summary = self.summary_of(job)
        assert summary is not None
        # Of a single seed the summary holds the numbers themselves.
        mean, stderr = summary.get("mean", summary), summary.get("stderr", {})
        cer, final = (_with_error(mean[key], stderr.get(key), scale) for key, scale in (("cer", 1), ("final", 100)))
        params = self.rows_of(job, 0)[-1]["num_params"]
        return [cer, final, f"{params:,}", f"{mean['mem']:.3g}", f"{mean['comp'] / 1e12:.3g}"]

    def _ledgers(self, job: Job) -> Path:
        return self.folder / "ledgers" / job.name

    def _run(self, job: Job, data_root: str, until: float) -> None:
        if time.monotonic() > until:
            return
        out = ROOT / "runs" / self.dataset / job.name
        program = Path(sysconfig.get_path("scripts")) / "alma-vision"
        told = ["alma-vision", f"dataset={self.dataset}", *job.settings, f"seeds={job.seeds}"]
        command = [str(program), *told[1:], f"data_root={data_root}", f"out={out}", "routing_examples=0"]
        began = time.monotonic()
        print(f"$ {shlex.join(['alma-vision', *command[1:]])}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{job.name} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
            return
        target = self._ledgers(job)
        target.mkdir(parents=True, exist_ok=True)
        folders = [out] if job.seeds == 1 else [out / f"seed_{seed}" for seed in range(job.seeds)]
        for seed, folder in enumerate(folders):
            content = (folder / "ledger.jsonl").read_bytes()
            # Without a name and a time inside: the same ledger is the same file.
            (target / f"seed_{seed}.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
        provenance = json.loads((folders[0] / "provenance.json").read_text())
        summary = json.loads((out / "summary.json").read_text())
        kept = {"command": told, "commit": provenance["commit"], **summary}
        (target / "summary.json").write_text(json.dumps(kept, indent=1) + "\n")
        cer = summary.get("mean", summary)["cer"]
        print(f"{job.name}: CER {cer:.2f}, {time.monotonic() - began:.0f} s", flush=True)


def _with_error(value: float, stderr: float | None, scale: float) -> str:
    return f"{scale * value:.2f}" + ("" if stderr is None else f" +- {scale * stderr:.2f}")
