"""The program of a job, without a cluster: what it records of a task that fails."""

import subprocess
import sys

import pytest

from data_prep.running.slurm import NUMBERS, read_failure
from data_prep.running.tasks import Step, write_tasks
from fairseq_alma.core.files import write_json
from tests.data_prep.running.slurm_tasks import Misbehave


@pytest.mark.parametrize(
    ("what", "message", "is_final"),
    [
        ("refuse", "this text cannot be used", True),
        ("wait", "the server is busy", False),
        ("fail", "ValueError: the weather is bad", False),
    ],
)
def test_a_job_records_whether_its_task_would_fail_again(tmp_path, monkeypatch, what, message, is_final):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    step = Step(tmp_path / "step", [Misbehave(0, str(tmp_path / "starts"), what, times=1)])
    (step.folder / "jobs").mkdir(parents=True)
    write_tasks(step.folder, [task.description() for task in step.tasks])
    write_json(step.folder / "jobs" / NUMBERS, [0])
    program = [sys.executable, "-m", "data_prep.running.slurm", step.folder, step.folder / "jobs", "5"]
    assert subprocess.run(program, capture_output=True).returncode == 1
    failure = read_failure(step.folder / "jobs", 0)
    assert (failure["message"], failure["is_final"], failure["place"]) == (message, is_final, "input_0.txt")
    assert step.mark(0) is None
    assert subprocess.run(program, capture_output=True).returncode == 0
    assert step.mark(0)["result"] == {"number": 0}
