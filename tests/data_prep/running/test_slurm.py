"""Tasks as jobs of a real Slurm, which the fixture `slurm` starts. Skipped where it cannot be started."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from data_prep.errors import PrepError
from data_prep.running import slurm as executor
from data_prep.running.tasks import Step
from data_prep.settings.cluster import Cluster
from launch.slurm import NoAnswerError, SlurmError, queue
from tests.data_prep.running.slurm_tasks import Misbehave

pytestmark = pytest.mark.usefixtures("slurm")


def command(out, books, *more):
    argv = [sys.executable, "-m", "data_prep", str(out), "--source", f"books:{books}", "--mega-batches", "3"]
    return [*argv, "--vocab-size", "400", "--seed", "0", "--workers", "2", *more]


def jobs(*states: str) -> list[str]:
    """The ids of the jobs in the queue that have one of these states; without states, of all."""
    found = subprocess.run(
        ["squeue", "-h", "--array", *([f"--states={','.join(states)}"] if states else []), "-o", "%i"],
        capture_output=True,
        text=True,
    )
    return found.stdout.split()


def process_of(job: str) -> int | None:
    """The process that does the task of a job; None if it has not started or has ended."""
    array, _, index = job.partition("_")
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            is_of_job = {f"SLURM_ARRAY_JOB_ID={array}".encode(), f"SLURM_ARRAY_TASK_ID={index}".encode()} <= {
                *variables
            }
            if is_of_job and b"data_prep.running.slurm" in (path.parent / "cmdline").read_bytes():
                return int(path.parent.name)
    return None


def wait_until(condition, seconds: float = 60):
    """Wait until a condition holds, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def run_tasks(tmp_path, tasks, workers=4, stall_seconds=60.0):
    """Run a step of these tasks. Return how often each task was started."""
    step = Step(tmp_path / "work" / "step", tasks)
    try:
        with executor.Slurm(Cluster(), workers, stall_seconds, tmp_path) as slurm:
            assert step.run(slurm) == [{"number": number} for number in range(len(tasks))]
    finally:
        wait_until(lambda: not jobs())  # nothing is left in the queue
    assert not list(step.folder.glob("*.part"))  # of jobs that were killed
    starts = (tmp_path / "starts").read_text().split()
    return [starts.count(str(number)) for number in range(len(tasks))]


@pytest.mark.slow
def test_a_cluster_makes_the_bytes_of_one_machine_also_when_jobs_and_the_command_are_killed(
    slurm, tmp_path, write_corpus, folder_bytes
):
    books = write_corpus(tmp_path / "books", num_files=40)
    subprocess.run(command(tmp_path / "here", books), check=True, capture_output=True)
    there = command(tmp_path / "there", books, "--executor", "slurm")
    process = subprocess.Popen(there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: jobs("RUNNING") or process.poll() is not None)
    process.kill()
    process.wait()
    left = jobs()
    process = subprocess.Popen(there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Slurm puts a job back into the queue, as if it were preempted. Another job is killed.
    requeued = wait_until(lambda: [job for job in jobs("RUNNING") if job not in left])[0]
    slurm.run("scontrol", "requeue", requeued)
    killed = wait_until(lambda: [job for job in map(process_of, jobs("RUNNING")) if job], 90)[0]
    os.kill(killed, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    # The jobs of the killed command are cancelled, unless they had finished their tasks by then.
    have_finished = re.search(r"read sources: [\d,]+ bytes in 0\.0 s", errors)
    assert have_finished or "Slurm jobs that an earlier alma-prep in the same folder has left" in errors
    assert "It is tried again" in errors
    assert folder_bytes(tmp_path / "there") == folder_bytes(tmp_path / "here")
    assert not (tmp_path / "there" / ".alma-prep").exists()


@pytest.mark.slow
def test_a_refused_job_ends_the_command_with_the_reason(tmp_path, write_corpus):
    books = write_corpus(tmp_path / "books", num_files=12)
    argv = command(tmp_path / "out", books, "--executor", "slurm", "--slurm-partition", "nowhere")
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sbatch refused the job" in done.stderr
    assert "nowhere" in done.stderr or "partition" in done.stderr


@pytest.mark.slow
def test_a_task_that_fails_is_tried_three_times_and_then_named_with_its_input_and_its_log(tmp_path):
    starts = str(tmp_path / "starts")
    tasks = [Misbehave(0, starts), Misbehave(1, starts, "fail", times=2), Misbehave(2, starts)]
    assert run_tasks(tmp_path, tasks) == [1, 3, 1]
    tasks[1] = Misbehave(1, starts, "fail", times=99)
    with pytest.raises(PrepError) as error:
        run_tasks(tmp_path, tasks)
    for words in ("task 1 of step step, at input_1.txt,", "ValueError: the weather is bad", "started 3 times"):
        assert words in str(error.value)
    log = Path(str(error.value).partition("The log of its last job is ")[2].partition(".log")[0] + ".log")
    assert "the weather is bad" in log.read_text()


@pytest.mark.slow
def test_an_error_that_would_come_again_ends_the_run_at_once(tmp_path):
    starts = str(tmp_path / "starts")
    with pytest.raises(PrepError, match=r"this text cannot be used \(step step, task 1, at input_1.txt; log: .*1.log"):
        run_tasks(tmp_path, [Misbehave(0, starts, seconds=60), Misbehave(1, starts, "refuse", times=99)])
    assert Path(starts).read_text().split().count("1") == 1


@pytest.mark.slow
def test_an_error_that_may_pass_does_not_end_the_run(tmp_path):
    starts = str(tmp_path / "starts")
    assert run_tasks(tmp_path, [Misbehave(0, starts), Misbehave(1, starts, "wait", times=2)]) == [1, 3]


@pytest.mark.slow
def test_a_job_that_hangs_is_cancelled_and_its_task_tried_again(tmp_path):
    starts = str(tmp_path / "starts")
    assert run_tasks(tmp_path, [Misbehave(0, starts, "hang", times=1), Misbehave(1, starts)], stall_seconds=6) == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_a_task_whose_process_dies_is_tried_again_also_if_slurm_has_forgotten_its_job(tmp_path, monkeypatch, is_known):
    """Slurm forgets jobs that have ended, at once on some clusters (MinJobAge)."""
    if not is_known:
        monkeypatch.setattr(executor, "queue", lambda with_ended=False, is_patient=True: queue(is_patient=is_patient))
        monkeypatch.setattr(executor, "_ABSENT_SECONDS", 8.0)
    starts = str(tmp_path / "starts")
    assert run_tasks(tmp_path, [Misbehave(0, starts), Misbehave(1, starts, "die", times=1)]) == [1, 2]


@pytest.mark.slow
def test_more_tasks_than_slurm_accepts_are_several_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "MAX_ARRAY", 5000)  # the cluster accepts arrays of 1,000 jobs
    numbers, submit = [], executor.Slurm._submit

    def submit_few(slurm, step, batch, num_cores):
        array = submit(slurm, step, [*batch, *[0] * (1001 if len(batch) > 4 else 0)], num_cores)
        numbers.append(len(batch))
        return array

    monkeypatch.setattr(executor.Slurm, "_submit", submit_few)
    starts = str(tmp_path / "starts")
    assert run_tasks(tmp_path, [Misbehave(number, starts) for number in range(8)], workers=2) == [1] * 8
    assert numbers == [4, 4]


@pytest.mark.slow
def test_ctrl_c_cancels_all_jobs(tmp_path, monkeypatch):
    def interrupt(*_):
        if jobs():
            raise KeyboardInterrupt

    monkeypatch.setattr(executor._StepWork, "_take_failures", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(
            tmp_path, [Misbehave(number, str(tmp_path / "starts"), seconds=100) for number in range(8)], workers=7
        )


@pytest.mark.slow
def test_the_command_itself_can_be_a_job(slurm, tmp_path, write_corpus, folder_bytes):
    books = write_corpus(tmp_path / "books", num_files=12)
    subprocess.run(command(tmp_path / "here", books), check=True, capture_output=True)
    argv = command(tmp_path / "there", books, "--executor", "slurm")
    log = tmp_path / "log"
    job = slurm.submit(f"--output={log}", f"--wrap={shlex.join(argv)}", folder=Path.cwd())
    slurm.wait_for(lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), seconds=180)
    assert slurm.job(job)["JobState"] == "COMPLETED", log.read_text()
    assert folder_bytes(tmp_path / "there") == folder_bytes(tmp_path / "here")


@pytest.mark.slow
def test_a_cancelled_job_of_the_command_leaves_no_jobs(slurm, tmp_path, write_corpus):
    books = write_corpus(tmp_path / "books", num_files=12)
    argv = command(tmp_path / "out", books, "--executor", "slurm")
    job = slurm.submit(f"--output={tmp_path}/log", f"--wrap=exec {shlex.join(argv)}", folder=Path.cwd())
    wait_until(lambda: [one for one in jobs() if one != job])
    slurm.run("scancel", job)
    wait_until(lambda: not jobs())
    assert "stopped; run the same command again to continue" in (tmp_path / "log").read_text()


def refuse_arrays(tmp_path, monkeypatch, errors):
    """The sizes of the arrays that are accepted after `errors`. Slurm itself is replaced, to refuse jobs at will."""
    sizes, errors = [], iter(errors)

    def submit(slurm, step, batch, num_cores):
        if (error := next(errors, None)) is not None:
            raise error
        sizes.append(len(batch))
        return batch

    monkeypatch.setattr(executor.Slurm, "_submit", submit)
    monkeypatch.setattr(executor.Slurm, "_cancel_jobs", lambda slurm: 0)
    monkeypatch.setattr(executor._StepWork, "finish", lambda work, batch: [])
    monkeypatch.setattr(executor.time, "sleep", lambda seconds: None)
    step = Step(tmp_path / "step", [Misbehave(number, "") for number in range(8)])
    executor.Slurm(Cluster(), 8, 60.0, tmp_path).run(step, range(8), 1, lambda number: None)
    return sizes


def test_arrays_grow_again_when_slurm_takes_more_jobs(tmp_path, monkeypatch):
    """The queue is full of other jobs of the user for a while."""
    full = SlurmError("sbatch: error: QOSMaxSubmitJobPerUserLimit\nBatch job submission failed: job submit limit")
    assert refuse_arrays(tmp_path, monkeypatch, [full] * 4) == [1, 2, 4, 1]


@pytest.mark.parametrize(("answers", "sizes"), [(False, [8]), (True, [2, 4, 2])])
def test_arrays_become_smaller_only_if_slurm_answers_other_questions(tmp_path, monkeypatch, answers, sizes):
    """When its controller starts again, it answers nothing. With too many jobs in the queue, it takes no others."""

    def ask(**_):
        if not answers:
            raise NoAnswerError("Unable to contact slurm controller")

    monkeypatch.setattr(executor, "queue", ask)
    silent = NoAnswerError("Slurm temporarily unable to accept job, sleeping and retrying")
    assert refuse_arrays(tmp_path, monkeypatch, [silent] * 2) == sizes
