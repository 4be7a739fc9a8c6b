"""The scripts in launch/, and leases, on a real Slurm, which the fixture `slurm` starts; else they are skipped."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from fairseq_alma.core import lease
from fairseq_alma.core.lease import Lease
from tests.commands import ROOT, RUN, run_command
from tests.fairseq_alma.killing import rows_without_seconds, same_rows
from tests.slurm import NODES
from tests.streams import make_stream

UPDATES = 100
SETTINGS = (
    *RUN[1:],
    "arch=switch_lm_tiny",
    f"updates={UPDATES}",
    "validations=1",
    "mega_batches=2",
    "checkpoint_minutes=1000",
)


@pytest.fixture
def repository(tmp_path, slurm) -> Path:
    """A folder from which rows are submitted: links to the parts of this repository that a job needs, and a stream."""
    if not (Path(sys.prefix) / "bin/activate").exists():
        pytest.skip("this interpreter is not that of a virtual environment")
    home = tmp_path / "repository"
    home.mkdir()
    for name in ("fairseq_alma", "launch"):
        (home / name).symlink_to(ROOT / name)
    (home / ".venv").symlink_to(sys.prefix)
    make_stream(home / "stream")
    return home


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[dict]:
    """The ledger of the same row, trained without Slurm."""
    folder = tmp_path_factory.mktemp("reference")
    make_stream(folder / "stream")
    result = run_command(
        "alma-lm", f"stream={folder / 'stream'}", f"out={folder / 'run'}", "preset=table2/gmoe_w1", *SETTINGS
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return rows_without_seconds(folder / "run")


def submit_row(slurm, repository: Path, *options: str, out: str = "run") -> str:
    return slurm.submit(
        *options, "--cpus-per-task=1", "--output=job-%j.log", "launch/table2_row.sbatch", "gmoe_w1", "stream", out,
        *SETTINGS, folder=repository,
    )  # fmt: skip


def log_of(repository: Path, job: str) -> str:
    path = repository / f"job-{job}.log"
    return path.read_text() if path.exists() else ""


def wait_for_updates(slurm, run: Path, stage: int = 1) -> Path:
    """Wait until the first updates of a stage are in its log. Return the log."""
    log = run / f"stages/stage_{stage:03d}/member_1/log.txt"
    slurm.wait_for(lambda: log.exists() and b'"num_updates"' in log.read_bytes(), seconds=120)
    return log


def wait_for_end(slurm, repository: Path, job: str, state: str = "COMPLETED") -> None:
    slurm.wait_for(lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), seconds=300)
    assert slurm.job(job)["JobState"] == state, log_of(repository, job)[-3000:]


def num_resumed(log: Path) -> int:
    """Return the number of updates in the checkpoint from which a stage was resumed; 0 if it was not."""
    found = [line for line in log.read_text().splitlines() if "checkpoint_last.pt" in line and "updates)" in line]
    return int(found[-1].partition("@ ")[2].partition(" updates")[0]) if found else 0


@pytest.mark.slow
def test_at_its_time_limit_a_row_saves_is_requeued_and_ends_like_one_without_slurm(slurm, repository, reference):
    job = submit_row(slurm, repository)
    log = wait_for_updates(slurm, repository / "run")
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does 120 seconds before the limit
    slurm.wait_for(lambda: slurm.job(job)["Restarts"] == "1")
    assert not (repository / "run/lease.json").exists()
    wait_for_end(slurm, repository, job)
    assert f"job {job}: requeued: the job reached its time limit" in log_of(repository, job)
    assert 0 < num_resumed(log) < UPDATES
    same_rows(rows_without_seconds(repository / "run"), reference)
    provenance = json.loads((repository / "run/provenance.json").read_text())
    assert provenance["machine"]["job_id"] == job


@pytest.mark.slow
def test_a_preempted_row_saves_is_requeued_and_continues(slurm, repository, reference):
    job = submit_row(slurm, repository, f"--nodelist={NODES[0]}", "--exclusive")
    log = wait_for_updates(slurm, repository / "run")
    other = slurm.submit(
        "--partition=high", f"--nodelist={NODES[0]}", "--exclusive", "--output=/dev/null", "--wrap=sleep 2",
        folder=repository,
    )  # fmt: skip
    slurm.wait_for(lambda: slurm.job(job)["Restarts"] == "1")
    wait_for_end(slurm, repository, other)
    wait_for_end(slurm, repository, job)
    assert 0 < num_resumed(log) < UPDATES
    same_rows(rows_without_seconds(repository / "run"), reference)


@pytest.mark.slow
def test_a_cancelled_row_leaves_no_lease_and_another_job_continues_it_on_the_other_node(slurm, repository, reference):
    job = submit_row(slurm, repository, f"--nodelist={NODES[0]}")
    log = wait_for_updates(slurm, repository / "run")
    slurm.run("scancel", job)
    slurm.wait_for(lambda: slurm.job(job)["JobState"] == "CANCELLED" and not slurm.run("squeue", "-h", "-j", job))
    slurm.wait_for(lambda: not (repository / "run/lease.json").exists(), seconds=30)
    again = submit_row(slurm, repository, f"--nodelist={NODES[1]}")
    wait_for_end(slurm, repository, again)
    assert 0 < num_resumed(log) < UPDATES
    same_rows(rows_without_seconds(repository / "run"), reference)


@pytest.mark.slow
def test_a_sweep_of_images_at_its_time_limit_is_requeued_and_ends(slurm, repository):
    words = ["dataset=digits", "learner=sm,ens", "wait=5,10", "epochs=20", "width=4", "mega_batches=10", "out=sweep"]
    job = slurm.submit("--cpus-per-task=1", "--output=job-%j.log", "launch/sweep_images.sbatch", *words,
                       folder=repository)  # fmt: skip
    slurm.wait_for(lambda: list((repository / "sweep").rglob("*.done.json")))
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for(
        lambda: slurm.job(job)["Restarts"] == "1" or slurm.job(job)["JobState"] not in ("RUNNING", "PENDING")
    )
    wait_for_end(slurm, repository, job)
    assert len(list((repository / "sweep").glob("*/summary.json"))) == 4
    assert "sorted by prequential validation error rate" in " ".join(log_of(repository, job).split())


@pytest.mark.slow
def test_a_corpus_is_prepared_by_jobs_of_a_job(slurm, repository):
    (repository / "data_prep").symlink_to(ROOT / "data_prep")
    (repository / "books").mkdir()
    for number in range(12):
        words = " ".join(f"word{number * word % 97}" for word in range(400))
        (repository / "books" / f"{number}.txt").write_text(f"{words}.\n")
    job = slurm.submit(
        "--output=job-%j.log", "launch/prepare_corpus.sbatch", "made", "books:books", "--mega-batches", "2",
        "--vocab-size", "300", "--workers", "2", "--slurm-memory", "1G", folder=repository,
    )  # fmt: skip
    wait_for_end(slurm, repository, job)
    assert (repository / "made/stream.json").exists()
    assert not slurm.run("squeue", "-h")


HOLD = """
import sys, time
from fairseq_alma.core.lease import Lease
with Lease("held"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lease_of_a_job_that_has_ended_is_taken_over_within_seconds_also_from_another_container(
    slurm, repository, monkeypatch, capsys
):
    """The jobs are in a PID namespace of their own, so this process cannot see whether theirs is running."""
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare")
    monkeypatch.setattr(lease, "ASK_SECONDS", 2.0)
    (repository / "hold.py").write_text(HOLD)
    wrapped = f"echo $$ >pid; exec unshare --pid --fork --kill-child --mount-proc {sys.executable} hold.py"

    def hold() -> str:
        shutil.rmtree(repository / "held", ignore_errors=True)
        job = slurm.submit("--output=hold-%j.log", "--requeue", f"--wrap={wrapped}", folder=repository)
        slurm.wait_for(lambda: "held" in (repository / f"hold-{job}.log").read_text()
                       if (repository / f"hold-{job}.log").exists() else False)  # fmt: skip
        return job

    job = hold()
    holder = json.loads((repository / "held/lease.json").read_text())
    assert (holder["job_id"], holder["cluster"]) == (job, "alma_test")
    os.kill(int((repository / "pid").read_text()), signal.SIGKILL)  # as if memory ran out
    start = time.monotonic()
    with Lease(repository / "held"):
        assert time.monotonic() - start < lease.STALE_SECONDS / 2
    # A job that was put back into the queue gets its lease back itself.
    job = hold()
    slurm.run("scontrol", "requeue", job)
    os.kill(int((repository / "pid").read_text()), signal.SIGKILL)
    path = repository / "held/lease.json"
    slurm.wait_for(lambda: path.exists() and '"job_restarts": "1"' in path.read_text())
    slurm.run("scancel", job)
