"""A sweep of alma-vision in jobs of a real Slurm, which the fixture `slurm` starts; skipped where it cannot start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.fairseq_alma.killing import rows_without_seconds

SWEEP = ("-m", "dataset=digits", "learner=sm,ens", "wait=5,10,0", "epochs=2", "width=4", "mega_batches=10")
"""Six runs. Those with wait=0 fail."""
SLURM = ("launch=slurm", "launch.partition=main", "launch.cpus=1", "launch.time=30")


def command(*arguments: object) -> subprocess.CompletedProcess:
    words = [str(Path(sys.executable).parent / "alma-vision"), *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=300)


def ledgers(out: Path) -> dict[str, list[dict]]:
    return {path.parent.name: rows_without_seconds(path.parent) for path in out.glob("*/ledger.jsonl")}


@pytest.mark.slow
def test_six_runs_are_jobs_and_failed_ones_cost_no_other(slurm, tmp_path):
    out = tmp_path / "sweep"
    held = [*SWEEP, f"out={out}", *SLURM, "launch.options=--hold"]
    submitted = command(*held)
    assert (submitted.returncode, submitted.stdout.count("submitted job")) == (1, 4)  # two settings are invalid
    assert command(*held).stdout.count("has jobs already") == 4
    assert "the queued jobs continue the run" in " ".join(command("status", out).stdout.split())
    for job in slurm.run("squeue", "-h", "-o", "%i").split():
        slurm.run("scontrol", "release", job)
    assert command("logs", out).returncode == 0  # when all jobs have ended
    table = command(*SWEEP, f"out={out}", *SLURM)
    assert table.stdout.count("is finished") == 4
    assert "sorted by prequential validation error rate" in " ".join(table.stdout.split())
    assert command("status", out).stdout.count("finished") >= 4
    assert command(*SWEEP, f"out={tmp_path / 'local'}").returncode == 1
    assert ledgers(out) == ledgers(tmp_path / "local")
    assert len(ledgers(out)) == 4
    assert [run["run"] for run in json.loads((out / "sweep.json").read_text())] == [
        run["run"] for run in json.loads((tmp_path / "local/sweep.json").read_text())
    ]
    provenance = json.loads(next(out.glob("*/provenance.json")).read_text())
    assert provenance["command"][0] == "alma-vision"
    assert "dataset=digits" in provenance["command"]
    report = subprocess.run(
        [str(Path(sys.executable).parent / "alma-report"), str(out), "--out", str(tmp_path / "report")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr


@pytest.mark.slow
def test_a_run_of_several_seeds_is_one_job_that_can_be_cancelled(slurm, tmp_path):
    out = tmp_path / "run"
    words = [
        "dataset=digits",
        "learner=ens",
        "wait=1",
        "epochs=300",
        "mega_batches=10",
        "seeds=2",
        f"out={out}",
        *SLURM,
    ]
    assert command(*words).returncode == 0
    slurm.wait_for(lambda: list(out.rglob("*.done.json")), 120)
    result = command("cancel", out)
    assert (result.returncode, f"cancelled: {out}" in result.stdout) == (0, True), result.stderr
    assert not slurm.run("squeue", "-h")
    shown = command("status", out).stdout
    assert "cancelled" in shown
    assert "run the training command again to continue" in shown
