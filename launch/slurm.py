"""Submit Slurm jobs, list them, requeue them and cancel them, with the commands of Slurm."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_SECONDS = 60.0
"""Time limit in seconds for a command of Slurm. A busy cluster may need some seconds to answer."""


class SlurmError(Exception):
    """A command of Slurm is missing, or refuses what was asked."""


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
    words = ["sbatch", "--parsable", f"--comment={comment}", *options]
    return _run(words, script, outside).strip().partition(";")[0]


def queue() -> list[QueuedJob]:
    """Return the pending and running jobs of this user.

    Raises:
        SlurmError: if squeue is missing or fails.
    """
    lines = _run(["squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r|%N|%k"]).splitlines()
    return [QueuedJob(*line.split("|", 4)) for line in lines]


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


def _run(command: Sequence[str], text: str | None = None, environment: dict[str, str] | None = None) -> str:
    """Run a command of Slurm with `text` as input, and return its output."""
    if shutil.which(command[0]) is None:
        raise SlurmError(f"the program {command[0]} of Slurm is not installed on this machine")
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} did not answer within {_SECONDS:.0f} seconds") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or f'ended with status {done.returncode}'}")
    return done.stdout
