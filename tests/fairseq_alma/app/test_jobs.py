"""What a command does in a Slurm job. The job is simulated by its variables, its signals and the client of Slurm."""

import os
import signal
import time

import pytest

from fairseq_alma.app import jobs as module
from fairseq_alma.app.jobs import JOB, HandedOver, JobRecord, RunJobs, in_job
from fairseq_alma.core.errors import StageError
from vision.cli import COMMAND


@pytest.fixture
def requeued(tmp_path, monkeypatch):
    """The jobs that were put back into the queue. This process is job 7, which was submitted to continue a run."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(JOB, "run")
    requeued: list[str] = []
    monkeypatch.setattr(module, "requeue", requeued.append)
    monkeypatch.setattr(module, "is_preempted", lambda job: False)
    RunJobs(tmp_path).write(JobRecord("7", "run", "the log"))
    return requeued


def record(folder):
    (found,) = RunJobs(folder).records()
    return found


def stop(folder, *signals):
    """Do the work of a job, which is stopped by signals."""
    with pytest.raises((KeyboardInterrupt, SystemExit)) as error, in_job(folder, signals):
        raise KeyboardInterrupt
    return str(error.value)


def test_the_record_of_a_job_says_how_it_ended(tmp_path, requeued, capsys):
    with in_job(tmp_path, []):
        assert record(tmp_path).state == "running"
    assert (record(tmp_path).state, record(tmp_path).log) == ("done", "the log")
    with in_job(tmp_path, []):
        raise HandedOver("job 8 continues the run")
    assert record(tmp_path) == JobRecord("7", "run", "the log", "done", "job 8 continues the run")
    with pytest.raises(StageError), in_job(tmp_path, []):
        raise StageError("no memory")
    assert (record(tmp_path).state, record(tmp_path).reason) == ("failed", "no memory")
    stop(tmp_path, signal.SIGTERM)
    assert (record(tmp_path).state, record(tmp_path).reason) == ("stopped", "by SIGTERM; it can be continued")
    assert requeued == []


@pytest.mark.parametrize("name", ["stages/stage_001/train.done.json", "stages/stage_001/member_1/checkpoint_last.pt"])
def test_at_its_time_limit_a_job_that_has_saved_something_is_requeued(tmp_path, requeued, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    stop(tmp_path, signal.SIGUSR1)
    assert (requeued, record(tmp_path).state) == (["7"], "requeued")
    os.utime(path, (time.time() - 1e4, time.time() - 1e4))  # by an earlier start of the job
    assert "without a new checkpoint or a finished step: give it more time" in stop(tmp_path, signal.SIGUSR1)
    assert (requeued, record(tmp_path).state) == (["7"], "failed")


def test_a_preempted_job_with_a_grace_time_is_requeued(tmp_path, requeued, monkeypatch):
    monkeypatch.setattr(module, "is_preempted", lambda job: job == "7")
    stop(tmp_path, signal.SIGTERM)
    assert (requeued, record(tmp_path).reason) == (["7"], "it was preempted")


def test_a_job_of_an_array_is_requeued_alone(tmp_path, requeued, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    (tmp_path / "checkpoint_last.pt").touch()
    stop(tmp_path, signal.SIGUSR1)
    assert requeued == ["5_2"]


def test_a_job_that_was_not_submitted_by_us_is_requeued_too_and_leaves_no_record(tmp_path, requeued, monkeypatch):
    monkeypatch.delenv(JOB)
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint_last.pt").touch()
    stop(run, signal.SIGUSR1)
    assert requeued == ["7"]
    assert not (run / "launch").exists()
    monkeypatch.delenv("SLURM_JOB_ID")
    stop(run, signal.SIGUSR1)
    assert requeued == ["7"]


def test_a_sweep_that_is_warned_between_two_of_its_jobs_is_requeued(tmp_path, requeued, monkeypatch):
    monkeypatch.delenv(JOB)
    (tmp_path / "checkpoint_last.pt").touch()

    def between() -> None:
        COMMAND._folder = tmp_path
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(10)

    monkeypatch.setattr("sys.argv", ["alma-vision", "-m", "dataset=digits", f"out={tmp_path}"])
    with pytest.raises(SystemExit):
        COMMAND.main(between)
    assert requeued == ["7"]
