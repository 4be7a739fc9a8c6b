"""Submit Slurm jobs, list them, requeue them and cancel them, with the commands of Slurm."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

_SECONDS = 60.0
"""Time limit in seconds for a command of Slurm. A busy cluster may need some seconds to answer."""


class SlurmError(Exception):
    """A command of Slurm is missing, or refuses what was asked."""


class NoAnswerError(SlurmError):
    """Slurm did not answer, for example because its controller is being restarted."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or a task of a job array, that is pending or running."""

    id: str
    """Job id, for example "123", or "123_2" for task 2 of the array 123."""
    state: str
    """State of the job in Slurm's words, for example "PENDING" or "RUNNING"."""
    reason: str
    """Why a pending job is not running, in Slurm's words, for example "Resources"; "None" for a running job."""
    nodes: str
    """The nodes on which the job runs; empty if it is pending."""
    comment: str
    """The comment that `submit` got."""


def submit(script: str, options: Sequence[str], comment: str) -> str:
    """Submit a job to Slurm, or a job array. Return the job id.

    This function can also be called in a Slurm job. The new job does not inherit any resources from that job.

    Args:
        script: shell script that the job runs. Its first line is "#!/bin/bash".
        options: options of sbatch.
        comment: text that `queue` returns with the job.

    Raises:
        SlurmError: if sbatch is missing or refuses the job.
    """
    # Slurm's commands read variables such as SLURM_MEM_PER_NODE as options. Without this line, a job that is submitted
    # in another job would have them.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
    outside.pop("CUDA_VISIBLE_DEVICES", None)
    if "SLURM_CONF" in os.environ:
        outside["SLURM_CONF"] = os.environ["SLURM_CONF"]
    # The comment is the last option, so that no other option replaces it.
    words = ["sbatch", "--parsable", *options, f"--comment={comment}"]
    before = {job.id for job in queue()}
    for seconds in [*_RETRIES, None]:
        try:
            return _run_once(words, script, outside).strip().partition(";")[0]
        except NoAnswerError:
            if seconds is None:
                raise
            time.sleep(seconds)
            # Slurm may have accepted the job, although it did not answer.
            for job in queue():
                if job.comment == comment and job.id not in before:
                    return job.id.partition("_")[0]
    raise AssertionError


def queue(with_ended: bool = False, is_patient: bool = True) -> list[QueuedJob]:
    """Return the pending and running jobs of this user.

    Args:
        with_ended: whether to return also jobs that have ended a short time ago (Slurm's setting MinJobAge, by default
            300 seconds).
        is_patient: whether to ask several times, for about a minute, if Slurm does not answer.

    Raises:
        SlurmError: if squeue is missing or fails. `NoAnswerError`: if Slurm does not answer.
    """
    states = ["--states=all"] if with_ended else []
    command = ["squeue", "--me", "--array", *states, "--noheader", "--format=%i|%T|%r|%N|%k"]
    lines = (_run(command) if is_patient else _run_once(command)).splitlines()
    return [QueuedJob(*line.split("|", 4)) for line in lines]


def max_array_size() -> int | None:
    """Return the largest number of tasks that a job array can have on this cluster; None if Slurm does not say it.

    Raises:
        SlurmError: if scontrol is missing or fails.
    """
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]), re.MULTILINE)
    # The largest index of a task is MaxArraySize - 1. Use indices from 0.
    return int(found[1]) or None if found else None


def limit_array(array: str, num_tasks: int) -> None:
    """Set how many tasks of a job array may run at the same time.

    Raises:
        SlurmError: if scontrol is missing or fails.
    """
    _run_once(["scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={num_tasks}"])


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs. Jobs that have ended already are ignored.

    Raises:
        SlurmError: if scancel is missing or fails.
    """
    if jobs:
        _run(["scancel", "--quiet", *jobs])


def requeue(job: str) -> None:
    """Put a running job back into the queue. Slurm ends its processes.

    Raises:
        SlurmError: if scontrol is missing or fails.
    """
    _run(["scontrol", "requeue", job])


def signal_steps(job: str, number: int) -> None:
    """Send a signal to all processes that srun has started in a job, but not to srun and the job's script.

    Raises:
        SlurmError: if scancel is missing or fails.
    """
    _run(["scancel", "--quiet", f"--signal={number}", job])


def signal_script(job: str, number: int) -> None:
    """Send a signal to the process that runs the script of a job.

    Raises:
        SlurmError: if scancel is missing or fails.
    """
    _run(["scancel", "--quiet", "--batch", f"--signal={number}", job])


def is_preempted(job: str) -> bool:
    """Return True if Slurm is preempting a job that still runs: it has a grace time to end.

    Raises:
        SlurmError: if scontrol is missing or fails.
    """
    words = dict(word.split("=", 1) for word in _run(["scontrol", "-o", "show", "job", job]).split() if "=" in word)
    return words.get("JobState") == "RUNNING" and words.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")


_NO_ANSWER = re.compile(
    r"timed out|unable to contact|connection (refused|reset)|communication|temporarily|zero bytes|standby", re.I
)
_RETRIES = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Times in seconds after which a command is tried again, if Slurm did not answer."""


def _run(command: Sequence[str]) -> str:
    """Run a command of Slurm, and return its output. If Slurm does not answer, the command is run again."""
    for seconds in _RETRIES:
        try:
            return _run_once(command)
        except NoAnswerError:
            time.sleep(seconds)
    return _run_once(command)


def _run_once(command: Sequence[str], text: str | None = None, environment: dict[str, str] | None = None) -> str:
    """Run a command of Slurm once, with `text` as input, and return its output."""
    if shutil.which(command[0]) is None:
        raise SlurmError(f"the program {command[0]} of Slurm is not installed on this machine")
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="surrogateescape", env=environment,
            timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{command[0]} did not answer within {_SECONDS:.0f} seconds") from error
    if done.returncode != 0:
        kind = NoAnswerError if _NO_ANSWER.search(done.stderr) else SlurmError
        raise kind(f"{command[0]}: {done.stderr.strip() or f'ended with status {done.returncode}'}")
    return done.stdout
