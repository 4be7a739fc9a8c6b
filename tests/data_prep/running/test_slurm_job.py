"""The program of a job, without a cluster: what it records of a task that fails."""

import errno
import subprocess
import sys

import pytest

from data_prep.errors import PrepError
from data_prep.running import slurm
from data_prep.running.slurm import TASKS, read_failure
from data_prep.running.tasks import Step
from data_prep.running.work_folder import full_disk_reported
from data_prep.settings.cluster import Cluster
from tests.data_prep.running.slurm_tasks import Misbehave


@pytest.mark.parametrize(
    ("what", "message", "is_final"),
    [
        ("refuse", "this text cannot be used", True),
        ("wait", "the server is busy", False),
        ("fail", "ValueError: the weather is bad", False),
        ("fill", "8 requested and 4 written", True),
    ],
)
def test_a_job_records_whether_its_task_would_fail_again(tmp_path, monkeypatch, what, message, is_final):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    step = Step(tmp_path / "step", [Misbehave(0, str(tmp_path / "starts"), what, times=1)])
    (step.folder / "jobs").mkdir(parents=True)
    (step.folder / "jobs" / TASKS).write_text(f"0 {step.tasks[0].description()}\n")
    program = [sys.executable, "-m", "data_prep.running.slurm", step.folder, step.folder / "jobs", "5"]
    assert subprocess.run(program, capture_output=True).returncode == 1
    failure = read_failure(step.folder / "jobs", 0)
    assert (failure["message"], failure["is_final"], failure["place"]) == (message, is_final, "input_0.txt")
    assert failure["errno"] == (errno.ENOSPC if what == "fill" else None)
    if what == "fill":
        followed = slurm._StepWork(step, 60.0, lambda number: None)
        with pytest.raises(PrepError, match="no space left on the disk of"), full_disk_reported(tmp_path):
            followed.finish(slurm._Array("1", step.folder / "jobs", [0]))
    assert step.mark(0) is None
    assert subprocess.run(program, capture_output=True).returncode == 0
    assert step.mark(0)["result"] == {"number": 0}


@pytest.mark.parametrize(("memory", "expected"), [("4G", ["--mem-per-cpu=4G"]), (None, [])])
def test_without_a_memory_the_default_of_the_cluster_counts(tmp_path, monkeypatch, memory, expected):
    submitted = []
    monkeypatch.setattr(slurm, "submit", lambda command, settings, options, comment: submitted.append(settings) or "1")
    (tmp_path / "step").mkdir()
    executor = slurm.Slurm(Cluster(memory=memory), 2, 60.0, tmp_path)
    executor._submit(Step(tmp_path / "step", [Misbehave(0, str(tmp_path / "starts"))]), [0], 1)
    assert [option for option in submitted[0].sbatch() if option.startswith("--mem")] == expected


def test_each_step_tries_large_arrays_again(tmp_path, monkeypatch):
    sizes, refusals = [], ["QOSMaxSubmitJobPerUserLimit"]

    def submit(executor, step, batch, num_cores):
        if refusals:
            raise slurm.SlurmError(refusals.pop())
        sizes.append(len(batch))
        return batch

    monkeypatch.setattr(slurm.Slurm, "_submit", submit)
    monkeypatch.setattr(slurm.Slurm, "_cancel_jobs", lambda executor: 0)
    monkeypatch.setattr(slurm._StepWork, "finish", lambda work, array: [])
    executor = slurm.Slurm(Cluster(), 2, 60.0, tmp_path)
    for _ in range(2):
        executor.run(Step(tmp_path, []), range(4), 1, lambda number: None)
    assert sizes == [2, 2, 4]
