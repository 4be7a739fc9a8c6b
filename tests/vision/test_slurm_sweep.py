"""A sweep of alma-vision in jobs of a real Slurm, which the fixture `slurm` starts; skipped where it cannot start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.fairseq_alma.killing import rows_without_seconds
from tests.slurm import NODES

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the package hydra-submitit-launcher")

SWEEP = ("-m", "dataset=digits", "learner=sm,ens", "wait=5,10,0", "epochs=2", "width=4", "mega_batches=10")
"""Six runs. Those with wait=0 fail."""
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=main", "hydra.launcher.cpus_per_task=1",
         "hydra.launcher.timeout_min=30", "hydra.launcher.array_parallelism=3")  # fmt: skip


def start(out: Path, *more: str) -> subprocess.Popen:
    program = Path(sys.executable).parent / "alma-vision"
    return subprocess.Popen(
        [str(program), *SWEEP, f"out={out}", *more], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ledgers(out: Path) -> dict[str, list[dict]]:
    return {path.parent.name: rows_without_seconds(path.parent) for path in out.glob("*/ledger.jsonl")}


@pytest.mark.slow
def test_six_runs_are_jobs_and_a_preempted_one_continues_and_failed_ones_cost_no_other(slurm, tmp_path):
    out = tmp_path / "sweep"
    process = start(out, *SLURM)
    slurm.wait_for(lambda: slurm.run("squeue", "-h", "-t", "RUNNING"), 120)
    # Whatever runs on the first node is put back into the queue.
    other = slurm.submit("--partition=high", f"--nodelist={NODES[0]}", "--exclusive", "--output=/dev/null",
                         "--wrap=sleep 1", folder=tmp_path)  # fmt: skip
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors[-3000:]  # because two jobs failed
    slurm.wait_for(lambda: slurm.job(other)["JobState"] == "COMPLETED")
    local = start(tmp_path / "local")
    local.communicate(timeout=300)
    assert local.returncode == 1
    assert ledgers(out) == ledgers(tmp_path / "local")
    assert len(ledgers(out)) == 4
    assert [run["run"] for run in json.loads((out / "sweep.json").read_text())] == [
        run["run"] for run in json.loads((tmp_path / "local/sweep.json").read_text())
    ]
    assert "sorted by prequential validation error rate" in " ".join(output.split())
    provenance = json.loads(next(out.glob("*/provenance.json")).read_text())
    assert provenance["command"][0] == "alma-vision"
    assert "dataset=digits" in provenance["command"]
    report = subprocess.run(
        [str(Path(sys.executable).parent / "alma-report"), str(out), "--out", str(tmp_path / "report")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
