"""Submit Slurm jobs, list them, requeue them and cancel them, with the commands of Slurm.

alma-prep, alma-lm and alma-vision submit all of their jobs with `submit`, and find them again in Slurm's queue by their
comment, with `queue`. All functions raise `SlurmError` if a command of Slurm is missing or fails, and `NoAnswerError`
if Slurm does not answer for about a minute.

sacct is not used, because many clusters have no accounting: how a job ended is known from what it has written. The
library submitit is not used: its jobs call a pickled function once, and cannot submit the jobs that continue them or be
found again by a later command.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, Settings
from fairseq_alma.core.slurm_job import without_own_defaults

WARNING_SECONDS = 120
"""Time in seconds between the signal that warns a job of its time limit, and the time limit."""
_SECONDS = 60.0
"""Time limit in seconds for a command of Slurm. A busy cluster may need some seconds to answer."""
_RETRIES = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Times in seconds after which a command is tried again, if Slurm did not answer."""
_SETUP_RESTARTS = 3
"""How often a job is started again that reaches its time limit during the set-up."""
_NO_ANSWER = ("timed out", "unable to contact", "connection", "communication", "temporarily", "zero bytes", "standby")
"""Found in the messages of Slurm's commands if Slurm does not answer."""


class SlurmError(Exception):
    """A command of Slurm is missing, or refuses what was asked."""


class NoAnswerError(SlurmError):
    """Slurm did not answer, for example because its controller is being restarted."""


@dataclass(frozen=True)
class SlurmSettings(Settings):
    """What each Slurm job asks for. On the command line, names begin with `launch.`, or for alma-prep `--slurm-`."""

    prefix: ClassVar[str] = "launch."

    partition: str | None = None
    """Partition. By default the default partition of the cluster."""
    time: str | int = "1-00:00:00"
    """Time limit of a job, in minutes or as days-hours:minutes:seconds. 120 seconds before the limit, a job saves what
    it has, and is put back into the queue. So the limit must be much longer than 2 minutes."""
    nodes: Count = 1
    """Number of nodes. `alma-lm` trains each member on so many nodes."""
    gpus: str | int | None = None
    """GPUs of each node, for example `8` or `h100:8`. By default no GPUs."""
    cpus: Count | None = None
    """CPU cores of each node. By default the default of the cluster."""
    memory: str | int | None = None
    """Memory of each node, for example `64G`; 0: all memory of the node. By default the default of the cluster."""
    setup: str = ""
    """Shell commands that each job runs first, for example `module load cuda`."""
    options: str = ""
    """Further options of sbatch, written as on its command line, for example `--account=me --qos=long`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            shlex.split(self.options)
        except ValueError as error:
            raise SettingError(
                f"{self.prefix}options={self.options!r} cannot be split into options ({error}): check its quotation "
                f"marks"
            ) from error

    def sbatch(self) -> list[str]:
        """Return the options of sbatch for a job."""
        given = {
            "partition": self.partition, "time": self.time, "nodes": self.nodes, "gpus-per-node": self.gpus,
            "cpus-per-task": self.cpus, "mem": self.memory,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [*options, "--ntasks-per-node=1", "--requeue", "--open-mode=append", *shlex.split(self.options)]


LAUNCH: Mapping[str, Mapping[str, Any]] = {
    "local": {"name": "local"},  # the default: in processes on this machine
    "slurm": {"name": "slurm", **vars(SlurmSettings())},  # in Slurm jobs
}
"""The choices of the setting `launch` of alma-lm and alma-vision, and what each sets."""


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


def submit(command: Sequence[str], settings: SlurmSettings, options: Sequence[str], comment: str) -> str:
    """Submit a job to Slurm, or a job array. Return the job id.

    This function can also be called in a Slurm job. The new job does not inherit any resources from that job.

    Args:
        command: the program and its arguments.
        settings: what the job asks for.
        options: further options of sbatch.
        comment: text that `queue` returns with the job.
    """
    setup = ""
    if settings.setup:
        # If the warning of the time limit arrives during the set-up, Slurm starts the job again, but not without end.
        this = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        again = (
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {_SETUP_RESTARTS} ]; then scontrol requeue "{this}"; exit 1; fi'
        )
        failed = f"{settings.prefix}setup failed"
        setup = (
            f"trap '{again}; echo \"{failed}: the time limit of the job was reached\" >&2; exit 2' USR1\n"
            f"alma_folder=$PWD\n"
            f"{{\n{settings.setup}\n}} || {{ echo '{failed}' >&2; exit 2; }}\n"
            # Relative paths of the command must not depend on where the set-up has gone.
            f'cd -- "$alma_folder" || exit 2\n'
        )
    script = f"#!/bin/bash\n{setup}exec {shlex.join(command)}\n"
    # Slurm's commands read variables such as SLURM_MEM_PER_NODE as options. Without this line, a job that is submitted
    # in another job would have them.
    outside = {
        name: value for name, value in without_own_defaults().items() if not name.startswith(("SLURM_", "SRUN_"))
    }
    outside.pop("CUDA_VISIBLE_DEVICES", None)
    if "SLURM_CONF" in os.environ:
        outside["SLURM_CONF"] = os.environ["SLURM_CONF"]
    # The comment is the last option, so that no other option replaces it.
    sbatch = ["sbatch", "--parsable", *settings.sbatch(), *options, f"--comment={comment}"]
    before = {job.id for job in queue()}
    for seconds in _RETRIES:
        try:
            return _run_once(sbatch, script, outside).strip().partition(";")[0]
        except NoAnswerError:
            time.sleep(seconds)
            # Slurm may have accepted the job, although it did not answer.
            for job in queue():
                if job.comment == comment and job.id not in before:
                    return job.id.partition("_")[0]
    return _run_once(sbatch, script, outside).strip().partition(";")[0]


def queue(with_ended: bool = False, is_patient: bool = True) -> list[QueuedJob]:
    """Return the pending and running jobs of this user.

    Args:
        with_ended: whether to return also jobs that have ended a short time ago (Slurm's setting MinJobAge, by default
            300 seconds).
        is_patient: whether to ask several times, for about a minute, if Slurm does not answer.
    """
    states = ["--states=all"] if with_ended else []
    command = ["squeue", "--me", "--array", *states, "--noheader", "--format=%i|%T|%r|%N|%k"]
    # Other jobs of the user may have line breaks in their comments.
    lines = [line.split("|", 4) for line in (_run(command) if is_patient else _run_once(command)).split("\n")]
    return [QueuedJob(*words) for words in lines if len(words) == 5 and words[0][:1].isdecimal()]


def cancel(jobs: Sequence[str], signal: int | None = None, to: str = "") -> None:
    """Cancel jobs, or send them a signal. Jobs that have ended already are ignored.

    Args:
        jobs: ids of jobs.
        signal: number of the signal; None: end the jobs.
        to: "script": only the process that runs the script of a job gets the signal. Otherwise, all processes that
            srun has started get it, but not srun and the script.
    """
    if jobs:
        options = [*(["--batch"] if to == "script" else []), *([f"--signal={signal}"] if signal else [])]
        # Of a job that has ended already, scancel says nothing, but its status is 1.
        _run(["scancel", "--quiet", *options, *jobs], may_fail_silently=True)


def requeue(job: str) -> None:
    """Put a running job back into the queue. Slurm ends its processes."""
    _run(["scontrol", "requeue", job])


def is_preempted(job: str) -> bool:
    """Return True if Slurm is preempting a job that still runs: it has a grace time to end."""
    words = dict(word.split("=", 1) for word in _run(["scontrol", "-o", "show", "job", job]).split() if "=" in word)
    return words.get("JobState") == "RUNNING" and words.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")


def _run(command: Sequence[str], may_fail_silently: bool = False) -> str:
    """Run a command of Slurm, and return its output. If Slurm does not answer, the command is run again."""
    for seconds in _RETRIES:
        try:
            return _run_once(command, may_fail_silently=may_fail_silently)
        except NoAnswerError:
            time.sleep(seconds)
    return _run_once(command, may_fail_silently=may_fail_silently)


def _run_once(
    command: Sequence[str],
    text: str = "",
    environment: dict[str, str] | None = None,
    may_fail_silently: bool = False,
) -> str:
    """Run a command of Slurm once, with `text` as input, and return its output.

    If `may_fail_silently`, a command that fails without a message counts as successful.
    """
    if shutil.which(command[0]) is None:
        raise SlurmError(f"the program {command[0]} of Slurm is not installed on this machine")
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="surrogateescape",
            env=environment or without_own_defaults(), timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{command[0]} did not answer within {_SECONDS:.0f} seconds") from error
    if done.returncode != 0 and not (may_fail_silently and not done.stderr.strip()):
        is_silent = any(words in done.stderr.lower() for words in _NO_ANSWER)
        raise (NoAnswerError if is_silent else SlurmError)(
            f"{command[0]}: {done.stderr.strip() or f'ended with status {done.returncode}'}"
        )
    return done.stdout
