"""Jobs are submitted, found and cancelled on a real Slurm, which the fixture `slurm` starts; else these are skipped."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_alma.core.holder import Holder
from launch import slurm as slurm_commands
from launch.slurm import SlurmSettings, cancel, queue, submit
from tests.slurm import NODES

HELD = ("--hold", "--wrap=true")


@pytest.fixture
def job(slurm, tmp_path) -> Iterator[str]:
    """A job that is held in the queue."""
    job = slurm.submit(*HELD, "--comment=ours", folder=tmp_path)
    yield job
    cancel([job])


@pytest.mark.parametrize("comment", ["two\nlines", "1|2|3\n4|5|6", "a\x0cform feed\u2028"])
def test_other_jobs_of_the_user_may_have_any_comment(slurm, job, tmp_path, comment):
    other = slurm.submit(*HELD, f"--comment={comment}", folder=tmp_path)
    assert [one.comment for one in queue() if one.id == job] == ["ours"]
    assert {job, other} <= {one.id for one in queue()}
    slurm.run("scancel", other)


def test_variables_with_which_a_user_filters_the_queue_hide_no_jobs(job, monkeypatch):
    for name, value in {
        "SQUEUE_STATES": "RUNNING",
        "SQUEUE_PARTITION": "high",
        "SQUEUE_FORMAT": "%i",
        "SCANCEL_INTERACTIVE": "true",
        "SCANCEL_PARTITION": "high",
    }.items():
        monkeypatch.setenv(name, value)
    assert job in {one.id for one in queue()}
    cancel([job])
    assert job not in {one.id for one in queue()}


def test_a_signal_to_a_job_that_has_ended_is_no_error(job):
    cancel([job])
    cancel([job], 15, to="script")
    assert job not in {one.id for one in queue()}


def test_the_set_up_may_change_the_folder(slurm, tmp_path):
    options = [f"--chdir={tmp_path}", f"--output={tmp_path}/log"]
    job = submit(["sh", "-c", "pwd; echo $FOUND"], SlurmSettings(setup="cd /\nexport FOUND=yes"), options, "")
    slurm.wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED")
    assert (tmp_path / "log").read_text().split() == [str(tmp_path), "yes"]


def holder(job: str) -> Holder:
    """Return the holder of a lease in a job, on another machine."""
    return replace(Holder.this_process(), pid_namespace="pid:[1]", job_id=job, job_restarts="0", cluster="alma_test")


def test_the_end_of_a_job_of_an_array_says_nothing_of_the_others(slurm, tmp_path):
    log = tmp_path / "log-%a"
    program = (
        "from fairseq_alma.core.holder import Holder; import time; print(Holder.this_process().job_id, flush=True)"
    )
    wrapped = f'--wrap=exec {sys.executable} -c "{program}; time.sleep(600)"'
    array = slurm.submit("--array=0-1", f"--output={log}", f"--nodelist={NODES[0]}", wrapped, folder=Path.cwd())

    def named(index: int) -> str:
        path = tmp_path / f"log-{index}"
        return path.read_text().strip() if path.exists() else ""

    slurm.wait_for(lambda: named(0) and named(1))
    assert (named(0), named(1)) == (f"{array}_0", f"{array}_1")
    slurm.run("scancel", f"{array}_0")
    slurm.wait_for(lambda: holder(f"{array}_0").state() == "ended")
    assert holder(f"{array}_1").state() == "unknown"  # its heartbeat decides
    slurm.run("scancel", array)
    slurm.wait_for(lambda: holder(f"{array}_1").state() == "ended")


def test_a_job_that_slurm_does_not_show_may_be_running(slurm, job, monkeypatch):
    """For example that of another user, on a cluster with PrivateData=jobs."""
    assert holder("999999").state() == "unknown"
    monkeypatch.setenv("SQUEUE_PARTITION", "high")
    assert holder(job).state() == "ended"  # it is pending, so the process that held the lease has ended


@pytest.mark.parametrize(("restarts", "status", "said"), [("0", 1, "requeue 7"), ("3", 2, "time limit of the job")])
def test_a_set_up_that_is_longer_than_the_time_limit_is_started_again_only_some_times(
    monkeypatch, restarts, status, said
):
    """The script of the job is run here, with the signal that warns of the time limit."""
    scripts: list[str] = []
    monkeypatch.setattr(slurm_commands, "queue", list)
    monkeypatch.setattr(slurm_commands, "_run_once", lambda command, text="", *_: scripts.append(text) or "7")
    submit(["echo", "trained"], SlurmSettings(setup="kill -USR1 $$\nsleep 0.1"), [], "")
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
    script = scripts[0].replace("scontrol", "echo")
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == status and said in done.stdout + done.stderr and "trained" not in done.stdout
