"""Pieces as jobs of a Slurm cluster, by datatrove's executor; what is done is told by our marks, not by its own.

The command that submits goes on running, step after step, until the stream is whole: on a login node, in a terminal
that stays. Every node needs the stream folder's file system, the sources, and this Python environment.
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
from data_prep.pieces import Step, run_piece
from data_prep.settings import Cluster

POLL_SECONDS = 2.0
MAX_CORES = 8
"""Of the one job that trains the tokenizer."""
MAX_ARRAY = 1000
"""Tasks of a job array: Slurm's usual MaxArraySize."""
_LOST_SECONDS = 20.0
"""So long after a job has left the queue its last marks may still be on the way through a network file system."""
_FAILED = re.compile(r"^(?:\w+Error|PrepError|slurmstepd|srun|/bin/bash|.*: error:).*$", re.MULTILINE)


class Slurm:
    """Runs pieces as job arrays. A context manager: leaving it by an error cancels what is queued."""

    def __init__(self, cluster: Cluster, workers: int, stall_seconds: float):
        self._cluster, self._workers, self._stall_seconds = cluster, workers, stall_seconds
        self._jobs: list[str] = []
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise PrepError(
                    f"--executor slurm needs {program}, which is not on this machine: run it on a login node."
                )
        if "SLURM_JOB_ID" in os.environ:
            raise PrepError("--executor slurm submits jobs and may not run inside one: run it on a login node.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is not None and self._jobs:
            subprocess.run(["scancel", *self._jobs], capture_output=True)

    def run(self, step: Step, numbers: Sequence[int], threads: int, on_done: Callable[[int], None]) -> None:
        """See `pieces.Executor`."""
        logger.remove()  # it tells every line of a job's life to the terminal
        logs = step.folder / f"jobs_{time.time_ns()}"
        began = time.time()
        executor = _Executor(
            pipeline=[_Pieces(str(step.folder), list(numbers))],
            tasks=len(numbers),
            time=self._cluster.time,
            partition=self._cluster.partition or _default_partition(),
            cpus_per_task=min(threads, MAX_CORES),
            mem_per_cpu_gb=self._cluster.memory_gb,
            workers=self._workers,
            job_name=f"alma-prep-{step.folder.name}",
            qos="",  # not every site has its "normal"
            env_command=f'export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{_here()}:$PYTHONPATH"',
            logging_dir=str(logs),
            slurm_logs_folder=str(logs / "slurm"),
            max_array_size=MAX_ARRAY,
            mail_type="NONE",
            requeue_signals=None,
        )
        try:
            executor.run()
        except (subprocess.CalledProcessError, OSError) as error:
            told = (getattr(error, "stderr", None) or b"") if not isinstance(error, OSError) else str(error)
            raise PrepError(f"sbatch refused the job: {told.decode() if isinstance(told, bytes) else told}") from error
        self._jobs.append(str(executor.job_id))
        self._wait(step, numbers, logs, began, on_done)
        self._jobs.pop()

    def _wait(
        self, step: Step, numbers: Sequence[int], logs: Path, began: float, on_done: Callable[[int], None]
    ) -> None:
        """Until every piece has its mark. Raises PrepError when the job has left the queue without them."""
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
                raise PrepError(f"{hung}. The same command goes on where this one ended.")
            if self._is_queued():
                left_at = 0.0
            elif not left_at:
                left_at = time.monotonic()
            elif time.monotonic() - left_at > _LOST_SECONDS or _has_failed(logs):
                raise PrepError(
                    f"{len(missing)} of {len(numbers)} jobs of {step.folder.name} ended without their work: "
                    f"{_reason(logs)} The logs are in {logs}. The same command goes on where this one ended."
                )
            time.sleep(POLL_SECONDS)

    def _is_queued(self) -> bool:
        found = subprocess.run(["squeue", "-h", "-j", ",".join(self._jobs)], capture_output=True, text=True)
        return found.returncode == 0 and bool(found.stdout.strip())


class _Executor(SlurmPipelineExecutor):
    def launch_merge_stats(self) -> None:
        """Not: it is one more job, for statistics that nobody reads."""


class _Pieces:
    """A step of datatrove's pipeline: its rank is a place in the list of pieces to make."""

    def __init__(self, folder: str, numbers: list[int]):
        self._folder, self._numbers = folder, numbers

    def __call__(self, data, rank: int, world_size: int):
        run_piece(self._folder, self._numbers[rank])
        return ()


def _here() -> Path:
    return Path(__file__).resolve().parents[1]


def _default_partition() -> str:
    """The cluster's own default, which datatrove wants by name."""
    found = subprocess.run(["sinfo", "-h", "-o", "%P"], capture_output=True, text=True).stdout.split()
    for name in found:
        if name.endswith("*"):
            return name.removesuffix("*")
    raise PrepError(
        f"the cluster has no default partition: give --slurm-partition, one of {', '.join(found) or 'none'}."
    )


def _has_failed(logs: Path) -> bool:
    return bool(_FAILED.search(_tail(logs)))


def _tail(logs: Path) -> str:
    texts = []
    for path in sorted((logs / "slurm").glob("*.out"))[:20]:
        with suppress(OSError):
            texts.append(path.read_text(errors="replace")[-4000:])
    return "\n".join(texts)


def _reason(logs: Path) -> str:
    found = _FAILED.findall(_tail(logs))
    return f"{found[-1][:300]}." if found else "they left no reason."
