"""Run tasks as jobs on a Slurm cluster.

datatrove's executor submits the jobs. When a job has finished its task, it writes a done mark, a file in the folder of
the step (see `tasks`).

The command `alma-prep` submits the jobs and keeps running until the stream is complete. Run it on a login node, in a
terminal that stays open. Every node needs access to the stream folder, the sources, and this Python environment.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger

from data_prep.errors import PrepError
from data_prep.settings import Cluster
from data_prep.tasks import Step, run_task

POLL_SECONDS = 2.0
MAX_CORES = 8
"""Maximum number of cores of the job that trains the tokenizer. All other jobs use one core."""
MAX_ARRAY = 1000
"""Maximum number of tasks in a Slurm job array, equal to the usual value of Slurm's setting MaxArraySize."""
_LOST_SECONDS = 20.0
"""Seconds to wait for missing done marks after all jobs have left the Slurm queue. On a network file system, a file
that a job has written may appear on this machine only after some seconds."""
# _FAILED matches a line of a job log that reports an error, so that the error can be shown to the user.
_FAILED = re.compile(r"^(?:\w+Error|PrepError|slurmstepd|srun|/bin/bash|.*: error:).*$", re.MULTILINE)


class Slurm:
    """An executor that runs tasks as Slurm job arrays.

    The executor is also a context manager: if the `with` statement ends with an error, the executor cancels the jobs
    that it has submitted.

    Args:
        cluster: settings of the jobs.
        workers: number of jobs that run at the same time.
        stall_seconds: seconds without progress after which a worker counts as hung.

    Raises:
        PrepError: if Slurm's commands are missing, or this process itself runs inside a Slurm job.
    """

    def __init__(self, cluster: Cluster, workers: int, stall_seconds: float):
        self._cluster, self._workers, self._stall_seconds = cluster, workers, stall_seconds
        self._jobs: list[str] = []
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise PrepError(
                    f"--executor slurm needs the program {program}, which this machine does not have: run the command "
                    "on a login node."
                )
        if "SLURM_JOB_ID" in os.environ:
            raise PrepError(
                "--executor slurm submits Slurm jobs, and must not be used inside a Slurm job: run the command on a "
                "login node."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is not None and self._jobs:
            subprocess.run(["scancel", *self._jobs], capture_output=True)

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """Run some tasks of a step as one Slurm job array. See `tasks.Executor` for the arguments."""
        # Remove all log handlers, because otherwise datatrove would print a message for every job event.
        logger.remove()
        logs = step.folder / f"jobs_{time.time_ns()}"
        began = time.time()
        executor = _Executor(
            pipeline=[_RunTasks(str(step.folder), list(numbers))],
            tasks=len(numbers),
            time=self._cluster.time,
            partition=self._cluster.partition or _default_partition(),
            cpus_per_task=min(threads, MAX_CORES),
            mem_per_cpu_gb=self._cluster.memory_gb,
            workers=self._workers,
            job_name=f"alma-prep-{step.folder.name}",
            # Do not use datatrove's default qos="normal", because this QOS does not exist on every cluster.
            qos="",
            env_command=f'export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{_root()}:$PYTHONPATH"',
            logging_dir=str(logs),
            slurm_logs_folder=str(logs / "slurm"),
            max_array_size=MAX_ARRAY,
            mail_type="NONE",
            requeue_signals=None,
        )
        try:
            executor.run()
        except (subprocess.CalledProcessError, OSError) as error:
            reason = str(error) if isinstance(error, OSError) else error.stderr or b""
            text = reason.decode() if isinstance(reason, bytes) else reason
            raise PrepError(
                f"sbatch refused the job. Check the --slurm options and run the same command again. The error: {text}"
            ) from error
        self._jobs.append(str(executor.job_id))
        self._wait(step, numbers, logs, began, on_done)
        self._jobs.pop()

    def _wait(
        self, step: Step, numbers: Sequence[int], logs: Path, began: float, on_done: Callable[[int], None]
    ) -> None:
        """Wait until every submitted task has a done mark.

        Args:
            step: the step to which the tasks belong.
            numbers: numbers of the submitted tasks.
            logs: the folder with the job logs.
            began: time at which the step began, in seconds since the epoch.
            on_done: called with the number of each task when the task is done.

        Raises:
            PrepError: if a worker hangs, or the jobs leave the queue before all tasks have a done mark.
        """
        # `left_at` is the time at which the Slurm queue first contained no submitted job; 0.0 while it contains one.
        missing, left_at = set(numbers), 0.0
        while missing:
            for number in sorted(missing):
                if step.mark(number) is not None:
                    missing.remove(number)
                    on_done(number)
            if not missing:
                return
            hung = step.stalled(began, self._stall_seconds)
            if hung:
                raise PrepError(f"{hung}. Run the same command again to continue.")
            if self._is_queued():
                left_at = 0.0
            elif not left_at:
                left_at = time.monotonic()
            elif time.monotonic() - left_at > _LOST_SECONDS or _has_failed(logs):
                raise PrepError(
                    f"{len(missing)} of {len(numbers)} jobs of step {step.folder.name} ended without finishing their "
                    f"work: {_reason(logs)} The logs are in {logs}. Run the same command again to continue."
                )
            time.sleep(POLL_SECONDS)

    def _is_queued(self) -> bool:
        """Return True if a submitted job is pending or running."""
        found = subprocess.run(["squeue", "-h", "-j", ",".join(self._jobs)], capture_output=True, text=True)
        return found.returncode == 0 and bool(found.stdout.strip())


class _Executor(SlurmPipelineExecutor):
    """datatrove's Slurm executor without the last job, which would merge statistics that alma-prep does not use."""

    def launch_merge_stats(self) -> None:
        """Do nothing. In datatrove, this method submits the job that merges statistics."""


class _RunTasks:
    """The only step of the datatrove pipeline that each Slurm job runs. It runs one task.

    datatrove gives each job an index, the rank. The job with rank r runs the task with the number `numbers[r]`.

    Args:
        folder: the folder of the `tasks.Step` to which the tasks belong.
        numbers: numbers of the submitted tasks.
    """

    def __init__(self, folder: str, numbers: list[int]):
        self._folder, self._numbers = folder, numbers

    def __call__(self, data, rank: int, world_size: int):
        run_task(self._folder, self._numbers[rank])
        return ()


def _root() -> Path:
    """Return the folder that contains the package `data_prep`."""
    return Path(__file__).resolve().parents[1]


def _default_partition() -> str:
    """Return the name of the cluster's default partition. datatrove requires a partition name.

    Raises:
        PrepError: if the cluster has no default partition.
    """
    found = subprocess.run(["sinfo", "-h", "-o", "%P"], capture_output=True, text=True).stdout.split()
    for name in found:
        if name.endswith("*"):
            return name.removesuffix("*")
    raise PrepError(
        f"the cluster has no default partition: give --slurm-partition (partitions: {', '.join(found) or 'not found'})."
    )


def _has_failed(logs: Path) -> bool:
    """Return True if a job log in the folder `logs` shows an error."""
    return bool(_FAILED.search(_tail(logs)))


def _tail(logs: Path) -> str:
    """Return the last 4000 characters of each of the first 20 job logs, joined into one text."""
    texts = []
    for path in sorted((logs / "slurm").glob("*.out"))[:20]:
        with suppress(OSError):
            texts.append(path.read_text(errors="replace")[-4000:])
    return "\n".join(texts)


def _reason(logs: Path) -> str:
    """Return the last line of the job logs that reports an error.

    If no line reports an error, return words that say so. The returned text ends an error message.
    """
    found = _FAILED.findall(_tail(logs))
    return f"{found[-1][:300]}." if found else "their logs show no error."
