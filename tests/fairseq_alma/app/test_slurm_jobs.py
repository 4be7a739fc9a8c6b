"""What a command does in a Slurm job. The job is simulated by its variables, its signals and the client of Slurm."""

import os
import signal
import time

import pytest

from fairseq_alma.app import run_commands
from fairseq_alma.app import slurm_jobs as module
from fairseq_alma.app.run_commands import cancel_runs, print_jobs, status
from fairseq_alma.app.slurm_jobs import JOB, HandedOver, JobRecord, RunJobs, in_job, submit_run
from fairseq_alma.core.errors import RunError, StageError
from fairseq_alma.core.lease import Lease
from launch.slurm import QueuedJob, SlurmSettings
from tests.vision.tiny_runs import as_arguments, small_run
from vision.cli import COMMAND
from vision.cli import main as vision_main


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


def test_a_damaged_record_of_another_job_stops_no_job(tmp_path, requeued):
    (tmp_path / "launch/job_6.json").write_text("")
    with in_job(tmp_path, []):
        pass
    assert RunJobs(tmp_path).record("7").state == "done"


@pytest.fixture
def submitted(monkeypatch):
    """The comments of the jobs that were submitted to a Slurm in which nothing runs."""
    submitted: list[str] = []
    monkeypatch.setattr(module, "queue", lambda: [QueuedJob("9", "PENDING", "Priority", "", one) for one in submitted])
    monkeypatch.setattr(module, "submit", lambda command, slurm, options, comment: submitted.append(comment) or "9")
    return submitted


def alma_vision(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["alma-vision", *words])
    vision_main()


def test_a_run_of_two_seeds_is_submitted_until_both_are_finished(tmp_path, submitted, monkeypatch, capsys):
    """Firefly trains one seed after the other, and a job may end between them."""
    given = {"learner": "ff", "candidates": 5, "mega_batches": 2, "epochs": 1, "width": 2}
    words = (*as_arguments(**given, seeds=2), f"out={tmp_path}", "launch=slurm")
    small_run(tmp_path / "seed_0", **given)
    alma_vision(monkeypatch, *words)
    assert len(submitted) == 1 and "submitted job 9" in capsys.readouterr().out
    small_run(tmp_path / "seed_1", **given, seed=1)
    ledger = tmp_path / "seed_1/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / "seed_1/summary.json").unlink()
    assert status(tmp_path) == 0
    assert "1 of 2 mega-batches are left; the queued jobs continue the run" in capsys.readouterr().out


def test_other_settings_are_refused_before_a_job_is_submitted(tmp_path, submitted, monkeypatch, capsys):
    small_run(tmp_path, mega_batches=2, epochs=1)
    with pytest.raises(SystemExit):
        alma_vision(monkeypatch, *as_arguments(mega_batches=2, epochs=1, lr=0.5), f"out={tmp_path}", "launch=slurm")
    assert "contains a run with other settings" in capsys.readouterr().err
    assert not submitted


def test_the_jobs_of_a_run_are_found_by_any_path_of_its_folder(tmp_path, submitted, monkeypatch, capsys):
    (tmp_path / "link").symlink_to(tmp_path)
    for out in ("run", "other/../run", "link/run"):
        (tmp_path / "other").mkdir(exist_ok=True)
        alma_vision(monkeypatch, *as_arguments(mega_batches=2), f"out={tmp_path}/{out}", "launch=slurm")
    assert len(submitted) == 1
    assert [job.id for job in RunJobs(tmp_path / "link/run").queued()] == ["9"]


def test_a_run_that_another_command_submits_meanwhile_is_not_submitted_twice(tmp_path, submitted, monkeypatch, capsys):
    words = ["dataset=digits"]

    class LateLease(Lease):
        """While this process waits for the lease, the other command submits the run."""

        def __enter__(self):
            RunJobs(tmp_path).submit("vision.cli", words, SlurmSettings())
            return super().__enter__()

    monkeypatch.setattr(module, "Lease", LateLease)
    submit_run(tmp_path, "vision.cli", words, SlurmSettings(), 2)
    assert len(submitted) == 1 and "has jobs already: 9 (pending, Priority)" in capsys.readouterr().out
    submitted.clear()
    with pytest.raises(RunError, match="with other settings"):
        submit_run(tmp_path, "vision.cli", [*words, "lr=1"], SlurmSettings(), 2)


def test_status_asks_to_fix_only_the_cause_of_the_last_failure(tmp_path, submitted, capsys):
    jobs = RunJobs(tmp_path)
    jobs.submit("vision.cli", [], SlurmSettings())
    submitted.clear()
    jobs.write(JobRecord("9_1", "stage 2, member 1", "", "failed"))
    jobs.write(JobRecord("9_2", "stage 2, member 2", "", "done"))
    jobs.write(JobRecord("10", "run", "", "submitted"))  # Slurm has cancelled it, because member 1 has failed
    assert "a job has failed: fix the cause" in print_jobs(jobs)
    jobs.write(JobRecord("11", "run", "", "stopped"))
    assert print_jobs(jobs) == ""


def test_a_run_that_cannot_be_cancelled_leaves_no_other_running(tmp_path, submitted, monkeypatch, capsys):
    for name in ("a", "b"):
        RunJobs(tmp_path / name).submit("vision.cli", [], SlurmSettings())
    submitted.clear()
    asked = []

    def cancel(jobs):
        asked.append(jobs.run.name)
        if jobs.run.name == "a":
            raise RunError("a is in use by process 1 on elsewhere")
        return True

    monkeypatch.setattr(run_commands, "_cancel", cancel)
    with pytest.raises(RunError, match="a is in use"):
        cancel_runs(tmp_path)
    assert asked == ["a", "b"] and f"cancelled: {tmp_path / 'b'}" in capsys.readouterr().out
