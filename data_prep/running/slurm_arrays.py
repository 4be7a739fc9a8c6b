"""Follow the Slurm jobs of a step until all of its tasks are done, whatever happens to the jobs.

A task is done when its done mark exists (see `tasks`). If a job ends without the done mark, the task is tried again, in
a new job array:

- Slurm itself starts a job again that was preempted, requeued, or whose node has failed. This is not counted.
- A task that raises an exception, reaches its time limit, runs out of memory or hangs is started MAX_ERRORS times.
- A task whose job ends in any other way, for example because its process was killed, is started MAX_STARTS times.
- A PrepError ends the run at once, because the task would raise it again. Only Passing counts as other exceptions do.

Slurm's commands fail sometimes, and a network file system shows files late. Therefore no single answer decides: a job
counts as lost only if Slurm says that it has ended and its done mark still does not appear, or if Slurm has not known
the job for several minutes.
"""

import collections
import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.running.heartbeat import StallWatch
from data_prep.running.progress import note
from data_prep.running.slurm_job import FAILED, Failure, read_failure
from data_prep.running.tasks import Step, worker_of
from launch.slurm import NoAnswerError, QueuedJob, SlurmError, cancel, limit_array, queue

MAX_ERRORS = 3
MAX_STARTS = 8
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 1.0, 30.0
_MIN_ASK_SECONDS, _MAX_ASK_SECONDS = 4.0, 60.0
"""Shortest and longest time between two questions to Slurm. All users of a cluster share its controller."""
_ABSENT_SECONDS = 180.0
"""Seconds for which Slurm must not know a job, in all of its answers, before the job counts as lost."""
_COMPLETED_SECONDS = 90.0
"""Seconds to wait for the done mark of a job that has ended without an error. NFS may show new files a minute late."""
_ENDED_SECONDS = 10.0
"""Seconds to wait for the done mark of a job that was killed or has failed. It could have been done just before."""
_SILENT_SECONDS = 3600.0
"""Seconds without any answer from Slurm after which the run ends."""
_MAX_NOTES = 20
"""Number of failed attempts of a step that are reported. All are in the logs."""

_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
_ERRORS = {
    "OUT_OF_MEMORY": "ran out of memory (give more with --slurm-memory-gb)",
    "TIMEOUT": "reached the time limit of its job (give more with --slurm-time)",
    "DEADLINE": "reached the deadline of its job",
}
"""States of jobs that the task itself has probably caused, and what to say of them."""
_TOO_MANY = re.compile(r"MaxSubmitJob|job submit limit|job array spec", re.IGNORECASE)
"""sbatch's messages if it refuses an array that is too large, or if the user has too many jobs."""
_STUCK = re.compile(r"\A(?=.*requeue).*h[eo]ld", re.IGNORECASE)
"""Why Slurm never starts a pending job again, for example "launch failed requeued held"."""
_ERROR_LINE = re.compile(r"^(?:\w+Error|PrepError|slurmstepd|srun|/bin/bash|.*: error:|.*\bKilled\b).*$", re.MULTILINE)


@dataclass
class JobArray:
    """A Slurm job array. Its job with index i does the task `numbers[i]` of the step."""

    id: str
    folder: Path
    """The folder with the list of the tasks, the logs and the failures, see `slurm_job`."""
    numbers: list[int]
    limit: int
    """Number of jobs of the array that run at the same time."""
    unfinished: set[int] = field(default_factory=set)
    """Indices of the jobs that have neither done their task nor failed."""
    gone_since: dict[int, float] = field(default_factory=dict)
    """By index: when Slurm first said that a job has ended, or did not know it, in all answers since then."""

    def __post_init__(self):
        self.unfinished = set(range(len(self.numbers)))


class StepJobs:
    """The Slurm jobs of a step.

    At most `workers` jobs run at the same time. The next array is submitted as soon as the jobs of the earlier arrays
    no longer use all `workers` places, and gets the free places.

    Args:
        step: the step.
        numbers: numbers of the tasks to do.
        workers: number of jobs that run at the same time.
        stall_seconds: seconds without progress after which a worker counts as hung.
        array_size: largest number of tasks in an array.
        submit: submits tasks as a job array. Its arguments are the numbers of the tasks, and how many jobs run at the
            same time. It raises SlurmError.
        on_done: called with the number of each task when the task is done.
    """

    def __init__(
        self, step: Step, numbers: Sequence[int], workers: int, stall_seconds: float, array_size: int,
        submit: Callable[[Sequence[int], int], JobArray], on_done: Callable[[int], None],
    ):  # fmt: skip
        self._step, self._workers, self._array_size = step, workers, array_size
        self._submit, self._on_done = submit, on_done
        self._waiting, self._missing = collections.deque(numbers), set(numbers)
        self._arrays: list[JobArray] = []
        self.array_ids: list[str] = []
        """Ids of all arrays that were submitted."""
        # The newest array, and the index in it, of each task that was submitted and is not done.
        self._places: dict[int, tuple[JobArray, int]] = {}
        self._starts: collections.Counter[int] = collections.Counter()
        self._errors: collections.Counter[int] = collections.Counter()
        # A command of Slurm may take a minute until it gives up.
        self._watch = StallWatch(stall_seconds, max_pause_seconds=_MAX_ASK_SECONDS + _MAX_POLL_SECONDS + 120)
        self._began = self._answered_at = self._ran_at = time.monotonic()
        self._asked_at = self._refused_at = -float("inf")
        self._num_notes, self._is_silent = 0, False
        self.is_tidy = True
        """False if jobs may be left in the queue after `finish`: jobs that were thought lost, or whose task another job
        has done, or that Slurm has accepted without an answer."""

    def finish(self) -> None:
        """Submit the tasks, and return when all of them are done.

        Raises:
            PrepError: if a task fails too often, if Slurm refuses the jobs, or if it does not answer for an hour.
            OSError: if the disk is full.
        """
        while True:
            start = time.monotonic()
            self._take_marks()
            if not self._missing:
                return
            self._take_failures()
            self._look_at_queue()
            self._submit_next()
            # Looking takes at most a tenth of the time, and waiting prolongs a step by at most a twentieth.
            seconds = max((start - self._began) / 20, 10 * (time.monotonic() - start))
            time.sleep(min(max(seconds, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS))

    def _take_marks(self) -> None:
        """Find the tasks that were done since the last look."""
        for number in self._step.done_among(self._places):
            array, index = self._places.pop(number)
            array.unfinished.discard(index)
            self._missing.discard(number)
            self._on_done(number)

    def _take_failures(self) -> None:
        """Find the tasks that have raised an exception since the last look."""
        for array in self._arrays:
            names: set[str] = set()
            with suppress(OSError):  # a network file system that does not answer; the next look tries again
                names = {path.name for path in array.folder.iterdir()}
            for index in sorted(array.unfinished):
                failure = read_failure(array.folder, index) if f"{index}{FAILED}" in names else None
                if failure is not None:
                    self._take_failure(array, index, failure)

    def _take_failure(self, array: JobArray, index: int, failure: Failure) -> None:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(failure.errno, os.strerror(failure.errno))
        if failure.is_final:
            raise PrepError(
                f"{failure.message} (step {self._step.folder.name}, task {array.numbers[index]}, at {failure.place}; "
                f"log: {array.folder}/{index}.log)"
            )
        how = f"failed on {failure.node} with {failure.message.removesuffix('.')}"
        self._failed(array, index, how, failure.place, is_error=True)

    def _look_at_queue(self) -> None:
        """Ask Slurm, from time to time, what has become of the jobs."""
        now = time.monotonic()
        if now - self._asked_at < min(max((now - self._began) / 10, _MIN_ASK_SECONDS), _MAX_ASK_SECONDS):
            return
        self._asked_at = now
        try:
            jobs = {job.id: job for job in queue(with_ended=True, is_patient=False)}
        except SlurmError as error:
            self._not_answered(error)
            return
        self._answered_at, self._is_silent = time.monotonic(), False
        for array in self._arrays:
            for index in sorted(array.unfinished):
                self._judge(array, index, jobs.get(f"{array.id}_{index}"))
        self._report_waiting([jobs.get(f"{array.id}_{index}") for array in self._arrays for index in array.unfinished])

    def _not_answered(self, error: SlurmError) -> None:
        """Take note that Slurm did not answer. It says nothing about the jobs."""
        for array in self._arrays:
            array.gone_since.clear()
        seconds = time.monotonic() - self._answered_at
        if seconds > _SILENT_SECONDS:
            raise PrepError(
                f"Slurm has not answered for {seconds / 60:.0f} minutes ({error}). Finished tasks were stored. When "
                "sinfo answers again, run the same command to continue."
            ) from error
        if not self._is_silent:
            self._is_silent = True
            note(f"Slurm does not answer ({error}). alma-prep waits, and asks again")

    def _judge(self, array: JobArray, index: int, job: QueuedJob | None) -> None:
        """Decide whether a job has failed. `job` is what Slurm says of it; None if Slurm does not know it."""
        path = self._step.alive_path(array.numbers[index])
        now = time.monotonic()
        if job is None or job.state in _ENDED:
            self._watch.forget(path)
            state = job.state if job else None
            wait_seconds = {None: _ABSENT_SECONDS, "COMPLETED": _COMPLETED_SECONDS}.get(state, _ENDED_SECONDS)
            if now - array.gone_since.setdefault(index, now) >= wait_seconds:
                how = _ERRORS.get(state or "", f"lost its job (Slurm's state: {state or 'unknown'})")
                self._failed(array, index, f"{how}{_last_error(array, index)}", None, is_error=state in _ERRORS)
            return
        array.gone_since.pop(index, None)
        if job.state != "RUNNING":
            self._watch.forget(path)
            if job.state == "PENDING" and _STUCK.search(job.reason):
                self._cancel(job.id)
                self._failed(array, index, f"could not be started (Slurm's reason: {job.reason})", None, is_error=False)
            return
        idle_seconds = self._watch.idle_seconds(path)
        if idle_seconds > self._watch.stall_seconds:
            self._cancel(job.id)
            self._watch.forget(path)
            how = f"made no progress for {idle_seconds:.0f} s on {job.nodes}, so its job {job.id} was cancelled"
            self._failed(array, index, how, None, is_error=True)

    def _failed(self, array: JobArray, index: int, how: str, place: str | None, is_error: bool) -> None:
        """Let a task be tried again, or end the run if this was its last attempt.

        Args:
            array: the array of the job that has failed.
            index: the index of the job in its array.
            how: what has happened, for the message.
            place: what the task was working on; None: what its heartbeat file says.
            is_error: whether the task itself has probably caused it.

        Raises:
            PrepError: if it was the last attempt.
        """
        self.is_tidy = False
        number = array.numbers[index]
        array.unfinished.discard(index)
        self._starts[number] += 1
        self._errors[number] += is_error
        place = place or worker_of(self._step.folder, number).get("at")
        what = f"task {number} of step {self._step.folder.name}{f', at {place},' if place else ''} {how}"
        log = f"{array.folder}/{index}.log"
        if self._errors[number] >= MAX_ERRORS or self._starts[number] >= MAX_STARTS:
            raise PrepError(
                f"{what}. It was started {self._starts[number]} times. The log of its last job is {log}. Finished "
                "tasks were stored. Remove the cause, and run the same command again to continue."
            )
        self._waiting.appendleft(number)
        self._num_notes += 1
        if self._num_notes <= _MAX_NOTES:
            last = "; further failures of this step are not reported" if self._num_notes == _MAX_NOTES else ""
            note(f"{what}. It is tried again (log: {log}){last}")

    def _submit_next(self) -> None:
        """Submit the next array if there are free places."""
        self._arrays = [array for array in self._arrays if array.unfinished]
        num_busy = sum(len(array.unfinished) for array in self._arrays)
        if not self._waiting or num_busy >= self._workers or time.monotonic() - self._refused_at < _MAX_ASK_SECONDS:
            self._raise_limit(num_busy)
            return
        numbers: list[int] = []
        while self._waiting and len(numbers) < self._array_size:
            number = self._waiting.popleft()
            # A job that was thought lost may have done the task in the meantime.
            if number in self._missing:
                numbers.append(number)
        if not numbers:
            return
        try:
            array = self._submit(numbers, self._workers - num_busy)
        except SlurmError as error:
            self._waiting.extendleft(reversed(numbers))
            self._refused(error, len(numbers), num_busy)
            return
        self._arrays.append(array)
        self.array_ids.append(array.id)
        self._places |= {number: (array, index) for index, number in enumerate(numbers)}

    def _refused(self, error: SlurmError, num_tasks: int, num_busy: int) -> None:
        """Decide what to do after Slurm has not accepted an array of `num_tasks` tasks."""
        if isinstance(error, NoAnswerError):
            self.is_tidy = False
            self._not_answered(error)
        elif _TOO_MANY.search(str(error)) and num_tasks > 1:
            self._array_size = num_tasks // 2
        elif _TOO_MANY.search(str(error)) and num_busy:
            self._refused_at = time.monotonic()
        else:
            raise PrepError(
                f"sbatch refused the job. Check the --slurm options and run the same command again. The error: {error}"
            ) from error

    def _raise_limit(self, num_busy: int) -> None:
        """Give places that became free in earlier arrays to the newest array."""
        if self._arrays:
            newest = self._arrays[-1]
            limit = self._workers - (num_busy - len(newest.unfinished))
            if newest.limit < min(limit, len(newest.unfinished)):
                with suppress(SlurmError):  # the next look tries again
                    limit_array(newest.id, limit)
                    newest.limit = limit

    def _report_waiting(self, jobs: Sequence[QueuedJob | None]) -> None:
        """Print a line if all jobs have been pending for ten minutes, with Slurm's reason."""
        pending = [job for job in jobs if job is not None and job.state == "PENDING"]
        now = time.monotonic()
        if not pending or len(pending) < len(jobs):
            self._ran_at = now
        elif now - self._ran_at > 600:
            note(f"{len(pending)} Slurm jobs are pending, and none is running. Slurm's reason: {pending[0].reason}")
            self._ran_at = now

    def _cancel(self, job: str) -> None:
        """Cancel a job. If Slurm does not answer, the job may continue, which does no harm."""
        with suppress(SlurmError):
            cancel([job])


def _last_error(array: JobArray, index: int) -> str:
    """Return the last line of a job's log that reports an error, to be appended to a message; "" if there is none."""
    try:
        text = (array.folder / f"{index}.log").read_text(errors="replace")[-4000:]
    except OSError:
        return ""
    found = _ERROR_LINE.findall(text)
    return f": {found[-1][:300]}" if found else ""
