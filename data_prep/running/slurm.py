"""Run tasks as jobs on a Slurm cluster.

The command `alma-prep` submits the jobs and keeps running until the stream is complete. Run it on a login node, in a
terminal that stays open, or as a Slurm job with a long time limit. Every node needs access to the stream folder, the
sources, and this Python environment.

The tasks of a step are submitted as a job array, with one task per job. When no job of the array is left, the tasks
that are not done are submitted as the next array, until all are done:

- Slurm itself starts a job again that was preempted, requeued, or whose node has failed. This is not counted.
- A task that raises an exception, reaches its time limit, runs out of memory or hangs is started MAX_ERRORS times.
- A task whose job ends in any other way, for example because its process was killed, is started MAX_STARTS times.
- A PrepError or a full disk ends the run at once: it would come again. Only Passing counts as other exceptions do.

A task is done when its done mark exists (see `tasks`). Slurm's commands fail sometimes, and a network file system shows
files late. So a job counts as lost only if Slurm has said for some time that it has ended, or does not know it.

This module is also the program of the jobs:

    python -m data_prep.running.slurm STEP_FOLDER ARRAY_FOLDER HEARTBEAT_SECONDS

ARRAY_FOLDER contains tasks.txt, with the number and the description of each task of the array in a line, and for each
job with index I (the variable SLURM_ARRAY_TASK_ID) its output `I.log` and, if its task has raised an exception,
`I.failed`, which says why.
"""

import collections
import errno
import hashlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TypedDict

from data_prep.errors import Passing, PrepError, is_full_disk
from data_prep.running.heartbeat import StallWatch
from data_prep.running.progress import interrupts_delayed, note
from data_prep.running.tasks import Executor, Step, remove_leftovers, run_task, worker_of
from data_prep.running.workers import Local
from data_prep.settings import STALL_SECONDS, PrepSettings
from data_prep.settings.cluster import Cluster
from fairseq_alma.core.errors import RunError, message_of
from fairseq_alma.core.files import read_json, write_json, write_whole
from fairseq_alma.core.slurm_job import ENDED_STATES
from launch.slurm import NoAnswerError, QueuedJob, SlurmError, cancel, queue, submit

MAX_CORES = 8
"""Maximum number of cores of the job that trains the tokenizer. All other jobs use one core."""
MAX_ARRAY = 1000
"""Maximum number of tasks in a job array. If Slurm refuses so many, the arrays become smaller for a while."""
MAX_ERRORS = 3
MAX_STARTS = 8
_HEARTBEAT_SECONDS = 15.0
"""Longest time between two heartbeats of a job that makes progress. On a cluster, hundreds of jobs write heartbeats to
one file system."""
_MAX_POLL_SECONDS = 30.0
_MIN_ASK_SECONDS, _MAX_ASK_SECONDS = 4.0, 60.0
"""Shortest and longest time between two questions to Slurm. All users of a cluster share its controller."""
_ABSENT_SECONDS, _COMPLETED_SECONDS, _ENDED_SECONDS = 180.0, 90.0, 10.0
"""Seconds to wait for the done mark of a job that Slurm does not know, that has ended without an error (NFS may show
new files a minute late), and that was killed or has failed (it could have been done just before)."""
_SILENT_SECONDS = 3600.0
"""Seconds without any answer from Slurm after which the run ends."""
_MAX_NOTES = 20
"""Number of failed attempts of a step that are reported. All are in the logs."""
_ERRORS = {
    "OUT_OF_MEMORY": "ran out of memory (give more with --slurm-memory)",
    "TIMEOUT": "reached the time limit of its job (give more with --slurm-time)",
    "DEADLINE": "reached the deadline of its job",
}
"""States of jobs that the task itself has probably caused, and what to say of them."""
TASKS, FAILED = "tasks.txt", ".failed"


def open_executor(settings: PrepSettings) -> AbstractContextManager[Executor]:
    """Return the context manager that runs tasks: `Slurm` if `settings.executor` is "slurm", otherwise `Local`."""
    if settings.executor == "slurm":
        return Slurm(settings.cluster, settings.workers, STALL_SECONDS["slurm"], settings.out)
    return Local(settings.workers, STALL_SECONDS["local"])


class _Array:
    """A Slurm job array. Its job with index i does the task `numbers[i]` of the step."""

    def __init__(self, id: str, folder: Path, numbers: list[int]):
        self.id, self.folder, self.numbers = id, folder, numbers
        self.left = {number: index for index, number in enumerate(numbers)}
        """The tasks that are neither done nor have failed, and the indices of their jobs."""
        self.failed: list[int] = []
        """The tasks that must be tried again."""
        self.gone_since: dict[int, float] = {}
        """By task: when Slurm first said that its job has ended, or did not know it, in all answers since then."""

    def log(self, number: int) -> Path:
        """Return the log of the job of a task."""
        return self.folder / f"{self.left[number]}.log"


class Slurm:
    """An executor that runs tasks as Slurm job arrays.

    The executor is also a context manager. At the start of the `with` statement, it cancels jobs that an earlier call
    of alma-prep for the same stream folder has left in the queue because it was killed.

    Args:
        cluster: settings of the jobs.
        workers: number of jobs that run at the same time.
        stall_seconds: seconds without progress after which a worker counts as hung.
        out: the stream folder.
    """

    def __init__(self, cluster: Cluster, workers: int, stall_seconds: float, out: Path):
        self._cluster, self._workers, self._stall_seconds = cluster, workers, stall_seconds
        # The comment of each job begins with this text, so that the jobs of a stream folder can be found again.
        self._owner = f"alma-prep#{hashlib.sha256(os.fsencode(os.path.realpath(out))).hexdigest()[:16]}#"

    def __enter__(self) -> Self:
        try:
            num_cancelled = self._cancel_jobs()
        except SlurmError as error:
            raise PrepError(
                f"--executor slurm cannot use Slurm ({error}): run the command on a login node of the cluster, and "
                "check Slurm with sinfo."
            ) from error
        if num_cancelled:
            note(f"cancelled {num_cancelled} Slurm jobs that an earlier alma-prep in the same folder has left")
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing. `run` leaves no jobs in the queue."""

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step as Slurm jobs. See `tasks.Executor` for the arguments.

        Whatever error ends this method, the jobs are cancelled.
        """
        work = _StepWork(step, self._stall_seconds, on_done)
        waiting, num_cores = list(numbers), min(threads, MAX_CORES)
        array_size = MAX_ARRAY
        try:
            while waiting:
                batch = waiting[:array_size]
                try:
                    array = self._submit(step, batch, num_cores)
                except NoAnswerError as error:
                    work.not_answered(error)
                    if _slurm_answers():  # then its queue has no place for so many jobs (MaxJobCount)
                        array_size = max(1, len(batch) // 2)
                    time.sleep(_MIN_ASK_SECONDS)
                except SlurmError as error:
                    text = str(error).lower()
                    if num_cores > 1 and ("cpu count" in text or "node configuration is not available" in text):
                        num_cores //= 2
                    elif any(words in text for words in ("maxsubmitjob", "job submit limit", "job array spec")):
                        if len(batch) == 1:  # other jobs of the user take all that is allowed
                            work.not_answered(error)
                            time.sleep(_MAX_POLL_SECONDS)
                        array_size = max(1, len(batch) // 2)
                    else:
                        raise PrepError(
                            f"sbatch refused the job. Check the --slurm options and run the same command again. The "
                            f"error: {error}"
                        ) from error
                else:
                    array_size = min(2 * array_size, MAX_ARRAY)
                    waiting = [*waiting[len(batch) :], *work.finish(array)]
        finally:
            with interrupts_delayed():
                try:
                    self._cancel_jobs()
                except SlurmError as error:
                    note(f"warning: jobs may be left in the queue, because they could not be cancelled: {error}")

    def _submit(self, step: Step, numbers: list[int], num_cores: int) -> _Array:
        """Submit tasks as one job array. Raise SlurmError if Slurm refuses the jobs, or does not answer."""
        folder = (step.folder / f"jobs_{time.time_ns()}").absolute()
        folder.mkdir()
        tasks = "".join(f"{number} {step.tasks[number].description()}\n" for number in numbers)
        write_whole(folder / TASKS, tasks, durable=False)
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [
            "env", f"PYTHONPATH={paths}", "PYTHONUNBUFFERED=1", sys.executable, "-P", "-m", "data_prep.running.slurm",
            str(step.folder.absolute()), str(folder), f"{min(_HEARTBEAT_SECONDS, self._stall_seconds / 4):g}",
        ]  # fmt: skip
        options = [
            f"--job-name=alma-prep-{step.folder.name}",
            f"--output={str(folder).replace('%', '%%')}/%a.log",
            f"--array=0-{len(numbers) - 1}%{self._workers}",
        ]
        # The memory is that of a core, and Slurm knows no other way to say so.
        memory = "" if self._cluster.memory is None else f"--mem-per-cpu={self._cluster.memory} "
        settings = replace(self._cluster, cpus=num_cores, memory=None, options=f"{memory}{self._cluster.options}")
        id = submit(command, settings, options, f"{self._owner}{folder.name}")
        return _Array(id, folder, numbers)

    def _cancel_jobs(self) -> int:
        """Cancel all jobs for this stream folder that are in the queue, and return their number."""
        left = [job.id for job in queue() if job.comment.startswith(self._owner)]
        cancel(sorted({job.partition("_")[0] for job in left}))
        return len(left)


class _StepWork:
    """The work of a step: follows its job arrays, and counts how often its tasks have failed."""

    def __init__(self, step: Step, stall_seconds: float, on_done: Callable[[int], None]):
        self._step, self._on_done = step, on_done
        self._starts: collections.Counter[int] = collections.Counter()
        self._errors: collections.Counter[int] = collections.Counter()
        # A command of Slurm may take a minute until it gives up.
        self._watch = StallWatch(stall_seconds, max_pause_seconds=_MAX_ASK_SECONDS + _MAX_POLL_SECONDS + 120)
        self._answered_at = self._ran_at = time.monotonic()
        self._num_notes, self._is_silent = 0, False

    def finish(self, array: _Array) -> list[int]:
        """Wait until no job of an array is left, and return the tasks that must be tried again.

        Raises:
            PrepError: if a task fails too often, or if Slurm does not answer for an hour.
            OSError: if a task has found a full disk.
        """
        began = asked_at = time.monotonic()
        while True:
            start = time.monotonic()
            # A job that was thought lost may also have done its task.
            for number in sorted({*array.left, *array.failed}):
                if self._step.mark(number) is not None:
                    array.left.pop(number, None)
                    array.failed = [other for other in array.failed if other != number]
                    self._on_done(number)
            self._take_failures(array)
            if not array.left:
                return array.failed
            if start - asked_at >= min(max((start - began) / 10, _MIN_ASK_SECONDS), _MAX_ASK_SECONDS):
                self._look_at_queue(array)
                asked_at = time.monotonic()
            # Looking takes at most a tenth of the time, and waiting prolongs a step by at most a twentieth.
            seconds = max((start - began) / 20, 10 * (time.monotonic() - start))
            time.sleep(min(max(seconds, 1.0), _MAX_POLL_SECONDS))

    def not_answered(self, error: SlurmError) -> None:
        """Take note that Slurm did not answer, or took no job. Raise PrepError after an hour."""
        seconds = time.monotonic() - self._answered_at
        if seconds > _SILENT_SECONDS:
            raise PrepError(
                f"Slurm has not answered, or has taken no job, for {seconds / 60:.0f} minutes ({error}). Finished "
                "tasks were stored. When Slurm works again, run the same command to continue."
            ) from error
        if not self._is_silent:
            self._is_silent = True
            note(f"Slurm does not answer, or takes no job ({error}). alma-prep waits, and asks again")

    def _take_failures(self, array: _Array) -> None:
        """Find the tasks that have raised an exception since the last look."""
        names: set[str] = set()
        with suppress(OSError):  # a network file system that does not answer; the next look tries again
            names = {path.name for path in array.folder.iterdir()}
        for number, index in [*array.left.items()]:
            failure = read_failure(array.folder, index) if f"{index}{FAILED}" in names else None
            if failure is None:
                continue
            if failure["errno"] is not None:
                raise OSError(failure["errno"], failure["message"])
            if failure["is_final"]:
                raise PrepError(
                    f"{failure['message']} (step {self._step.folder.name}, task {number}, at {failure['place']}; log: "
                    f"{array.log(number)})"
                )
            how = f"failed on {failure['node']} with {failure['message'].removesuffix('.')}"
            self._failed(array, number, how, failure["place"], is_error=True)

    def _look_at_queue(self, array: _Array) -> None:
        """Ask Slurm what has become of the jobs."""
        try:
            jobs = {job.id: job for job in queue(with_ended=True, is_patient=False)}
        except SlurmError as error:
            array.gone_since.clear()
            self.not_answered(error)
            return
        self._answered_at, self._is_silent = time.monotonic(), False
        found = {number: jobs.get(f"{array.id}_{index}") for number, index in array.left.items()}
        pending = [job for job in found.values() if job is not None and job.state == "PENDING"]
        if len(pending) < len(found):
            self._ran_at = time.monotonic()
        elif time.monotonic() - self._ran_at > 600:
            note(f"{len(pending)} Slurm jobs are pending, and none is running. Slurm's reason: {pending[0].reason}")
            self._ran_at = time.monotonic()
        for number, job in found.items():
            if (judged := self._judge(array, number, job)) is not None:
                how, is_error = judged
                place = worker_of(self._step.folder, number).get("at")
                self._failed(array, number, how, place, is_error)

    def _judge(self, array: _Array, number: int, job: QueuedJob | None) -> tuple[str, bool] | None:
        """Return how the job of a task has failed, and whether the task has probably caused it; None if it has not.

        `job` is what Slurm says of it; None if Slurm does not know it.
        """
        path, now = self._step.path(number, "alive"), time.monotonic()
        if job is None or job.state in ENDED_STATES:
            self._watch.forget(path)
            state = job.state if job else "unknown"
            wait_seconds = {"unknown": _ABSENT_SECONDS, "COMPLETED": _COMPLETED_SECONDS}.get(state, _ENDED_SECONDS)
            if now - array.gone_since.setdefault(number, now) < wait_seconds:
                return None
            return _ERRORS.get(state, f"lost its job (Slurm's state: {state})"), state in _ERRORS
        array.gone_since.pop(number, None)
        if job.state != "RUNNING":
            self._watch.forget(path)
            # For example "launch failed requeued held": Slurm never starts it again.
            if job.state == "PENDING" and "requeue" in job.reason.lower() and "held" in job.reason.lower():
                return f"could not be started (Slurm's reason: {job.reason})", False
            return None
        idle_seconds = self._watch.idle_seconds(path)
        if idle_seconds <= self._watch.stall_seconds:
            return None
        self._watch.forget(path)
        return f"made no progress for {idle_seconds:.0f} s on {job.nodes}, so its job {job.id} was cancelled", True

    def _failed(self, array: _Array, number: int, how: str, place: str | None, is_error: bool) -> None:
        """Let a task be tried again, or raise PrepError if this was its last attempt.

        `place` is what the task was working on; None if it is not known. See `_judge` for the others.
        """
        log = array.log(number)
        with suppress(SlurmError):  # without an answer the job may continue, which does no harm
            cancel([f"{array.id}_{array.left.pop(number)}"])
        array.failed.append(number)
        self._starts[number] += 1
        self._errors[number] += is_error
        what = f"task {number} of step {self._step.folder.name}{f', at {place},' if place else ''} {how}"
        if self._errors[number] >= MAX_ERRORS or self._starts[number] >= MAX_STARTS:
            raise PrepError(
                f"{what}. It was started {self._starts[number]} times. The log of its last job is {log}. Finished "
                "tasks were stored. Remove the cause, and run the same command again to continue."
            )
        self._num_notes += 1
        if self._num_notes <= _MAX_NOTES:
            last = "; further failures of this step are not reported" if self._num_notes == _MAX_NOTES else ""
            note(f"{what}. It is tried again (log: {log}){last}")


def _slurm_answers() -> bool:
    try:
        queue(is_patient=False)
    except SlurmError:
        return False
    return True


class Failure(TypedDict):
    """Why a task has failed, as its job has recorded it."""

    message: str
    is_final: bool
    """Whether the task would fail again in the same way. Exceptions other than a PrepError or a full disk may come from
    a node."""
    errno: int | None
    """Number of the error that says that the disk is full; None: it is another error."""
    place: str
    """What the task was working on, such as a file name."""
    node: str


def read_failure(folder: Path, index: int) -> Failure | None:
    """Return why the task of the job with this index has failed; None if there is no complete record."""
    try:
        return read_json(folder / f"{index}{FAILED}", Failure)
    except (OSError, RunError):
        return None


def main(argv: Sequence[str]) -> int:
    """Do the task of this job. Return its exit status."""
    step_folder, array_folder, heartbeat_seconds = Path(argv[0]), Path(argv[1]), float(argv[2])
    index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    # At SIGTERM (scancel, preemption, time limit), raise SystemExit, so that the task removes its temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The tokenizers library reads these variables when it is first used.
    threads = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    os.environ["RAYON_NUM_THREADS"] = threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads != "1" else "false"
    node = os.environ.get("SLURMD_NODENAME", "an unknown node")
    with open(array_folder / TASKS) as file:
        name, task = next(itertools.islice(file, index, None)).split(" ", 1)
    number = int(name)
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"task {number} on {node}, started again {restarts} times by Slurm", flush=True)
    # Slurm may have killed an earlier start of this job.
    remove_leftovers(step_folder, number)
    try:
        run_task(str(step_folder), number, task, heartbeat_seconds)
    except Exception as error:
        traceback.print_exc()
        is_full, is_ours = is_full_disk(error), isinstance(error, PrepError)
        record: Failure = {
            "message": message_of(error) if is_full or is_ours else f"{type(error).__name__}: {error}",
            "is_final": is_full or (is_ours and not isinstance(error, Passing)),
            "errno": (getattr(error, "errno", None) or errno.ENOSPC) if is_full else None,
            "place": worker_of(step_folder, number).get("at", "its start"),
            "node": node,
        }
        write_json(array_folder / f"{index}{FAILED}", record, durable=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
