"""Run tasks as jobs on a Slurm cluster.

The command `alma-prep` submits the jobs and keeps running until the stream is complete. Run it on a login node, in a
terminal that stays open, or as a Slurm job with a long time limit. Every node needs access to the stream folder, the
sources, and this Python environment.

A step is submitted as job arrays, with one task per job. `slurm_job` is the program of a job. `slurm_arrays` follows
the arrays until all tasks are done. datatrove's Slurm executor is not used: if a step needs several arrays, it starts
one after the other and reports only the last, and it waits for ever for a command of Slurm that does not answer.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from data_prep.errors import PrepError
from data_prep.running.progress import interrupts_delayed, note
from data_prep.running.slurm_arrays import JobArray, StepJobs
from data_prep.running.slurm_job import NUMBERS
from data_prep.running.tasks import Step
from data_prep.settings.cluster import Cluster
from fairseq_alma.core.files import write_json
from launch.slurm import SlurmError, cancel, max_array_size, queue, submit

MAX_CORES = 8
"""Maximum number of cores of the job that trains the tokenizer. All other jobs use one core."""
MAX_ARRAY = 1000
"""Maximum number of tasks in a job array, also on clusters whose setting MaxArraySize allows more."""
_TOO_MANY_CORES = re.compile(r"CPU count|node configuration is not available", re.IGNORECASE)
"""sbatch's messages if no node has as many cores as a job asks for."""
_HEARTBEAT_SECONDS = 15.0
"""Longest time between two heartbeats of a job that makes progress. On a cluster, hundreds of jobs write heartbeats to
one file system."""


class Slurm:
    """An executor that runs tasks as Slurm job arrays.

    The executor is also a context manager. At the start of the `with` statement, it cancels jobs that an earlier call
    of alma-prep for the same stream folder has left in the queue because it was killed.

    Args:
        cluster: settings of the jobs.
        workers: number of jobs that run at the same time.
        stall_seconds: seconds without progress after which a worker counts as hung.
        out: the stream folder.

    Raises:
        PrepError: if Slurm's commands are missing.
    """

    def __init__(self, cluster: Cluster, workers: int, stall_seconds: float, out: Path):
        self._cluster, self._workers, self._stall_seconds = cluster, workers, stall_seconds
        # The comment of each job begins with this text, so that the jobs of a stream folder can be found again.
        self._owner = f"alma-prep#{hashlib.sha256(os.fsencode(os.path.realpath(out))).hexdigest()[:16]}#"
        self._array_size = MAX_ARRAY
        for program in ("sbatch", "squeue", "scancel", "scontrol"):
            if shutil.which(program) is None:
                raise PrepError(
                    f"--executor slurm needs the program {program}, which this machine does not have: run the command "
                    "on a login node of the cluster."
                )

    def __enter__(self) -> Self:
        try:
            num_cancelled = self._cancel_jobs()
            # Leave one, because clusters differ in whether the largest index or the number of tasks is limited.
            self._array_size = max(1, min(MAX_ARRAY, (max_array_size() or MAX_ARRAY + 1) - 1))
        except SlurmError as error:
            raise PrepError(
                f"Slurm does not answer ({error}). Check it with sinfo, and run the command again."
            ) from error
        if num_cancelled:
            note(f"cancelled {num_cancelled} Slurm jobs that an earlier alma-prep in the same folder has left")
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing. `run` leaves no jobs in the queue."""

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step as Slurm jobs. See `tasks.Executor` for the arguments.

        A task whose job fails is tried again, see `slurm_arrays`. Whatever error ends this method, the jobs are
        cancelled.
        """

        def submit_array(numbers: Sequence[int], limit: int) -> JobArray:
            num_cores = min(threads, MAX_CORES)
            while True:
                try:
                    return self._submit(step, numbers, num_cores, limit)
                except SlurmError as error:
                    if num_cores == 1 or not _TOO_MANY_CORES.search(str(error)):
                        raise
                num_cores //= 2

        jobs = StepJobs(step, numbers, self._workers, self._stall_seconds, self._array_size, submit_array, on_done)
        is_tidy = False
        try:
            jobs.finish()
            is_tidy = jobs.is_tidy
        finally:
            if not is_tidy:
                with interrupts_delayed():
                    try:
                        self._cancel_jobs()
                    except SlurmError as error:
                        note(f"warning: the jobs {' '.join(jobs.array_ids)} could not be cancelled: {error}")

    def _submit(self, step: Step, numbers: Sequence[int], num_cores: int, limit: int) -> JobArray:
        """Submit tasks as one job array.

        Args:
            step: the step to which the tasks belong.
            numbers: numbers of the tasks.
            num_cores: number of CPU cores of each job.
            limit: number of jobs that run at the same time.

        Raises:
            SlurmError: if Slurm refuses the jobs, or does not answer.
        """
        name = f"jobs_{time.time_ns()}"
        folder = step.folder / name
        folder.mkdir()
        write_json(folder / NUMBERS, list(numbers), durable=False)
        root = shlex.quote(str(Path(__file__).resolve().parents[2]))
        heartbeat_seconds = min(_HEARTBEAT_SECONDS, self._stall_seconds / 4)
        program = [sys.executable, "-P", "-m", "data_prep.running.slurm_job"]
        words = [*program, str(step.folder.absolute()), str(folder.absolute())]
        script = (
            "#!/bin/bash\n"
            f'export PYTHONPATH={root}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONUNBUFFERED=1\n'
            f'exec {shlex.join(words)} "$SLURM_ARRAY_TASK_ID" {heartbeat_seconds:g}\n'
        )
        options = [
            *([f"--partition={self._cluster.partition}"] if self._cluster.partition else []),
            f"--time={self._cluster.time}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={num_cores}",
            f"--mem-per-cpu={self._cluster.memory_gb}G",
            f"--job-name=alma-prep-{step.folder.name}",
            # Slurm itself starts a job again that was preempted or whose node has failed.
            "--requeue",
            "--open-mode=append",
            f"--output={str(folder.absolute()).replace('%', '%%')}/%a.log",
            *shlex.split(self._cluster.options),
            f"--array=0-{len(numbers) - 1}%{limit}",
        ]
        array = submit(script, options, f"{self._owner}{step.folder.name}#{name}")
        return JobArray(array, folder, list(numbers), limit)

    def _cancel_jobs(self) -> int:
        """Cancel all jobs for this stream folder that are in the queue, and return their number.

        Raises:
            SlurmError: if Slurm does not answer.
        """
        left = [job.id for job in queue() if job.comment.startswith(self._owner)]
        cancel(sorted({job.partition("_")[0] for job in left}))
        return len(left)
