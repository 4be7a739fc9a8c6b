"""Run processes on this machine, read their output line by line, and end them whenever this process ends."""

import codecs
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

PR_SET_PDEATHSIG = 1

GRACE_SECONDS = 10.0
"""Time between the request to end (SIGTERM) and the kill (SIGKILL)."""

# OpenMP threads that spin while they wait take processor time from threads that have work: with one other busy process
# on two cores, a stage ran at a tenth of its speed. Short spins cost little on a free machine.
SPIN = {"GOMP_SPINCOUNT": "10000"}


@dataclass(frozen=True)
class Job:
    """A process to run."""

    command: Sequence[str]
    """Program and arguments."""
    log: Path
    """File to which its stdout and stderr are appended while it runs. Its folder is created if it is missing."""
    on_line: Callable[[str], None] = lambda line: None
    """Called with each line of its output, after the line has been written to the log."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables in addition to those of this process; None removes a variable."""


def run_process(
    command: Sequence[str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str | None] | None = None,
) -> int:
    """Run one process to its end; return its exit status, negative for a signal. See run_processes."""
    (status,) = run_processes([Job(command, log, on_line, environment or {})])
    assert status is not None
    return status


def run_processes(jobs: Sequence[Job], slots: Sequence[Mapping[str, str]] = ({},)) -> list[int | None]:
    """Run jobs to their end, as many at the same time as there are slots, and return their exit statuses.

    If an exception is raised here, Ctrl-C included, all processes are ended before it propagates. If a job fails, the
    jobs that run continue to their end, because their results are worth keeping; the jobs that wait are not started.
    On Linux, a process is killed together with its parent, so that no process writes into the folder of a killed run.

    Args:
        jobs: the jobs, in the order in which they start.
        slots: environment variables of each slot, for example the GPUs that belong to it.

    Returns:
        The exit status of each job, negative for a signal; None for a job that was not started.

    Raises:
        ValueError: there is no slot.
        OSError: a program cannot be started.
    """
    if not slots:
        raise ValueError("there is no slot to run a job in")
    statuses: list[int | None] = [None] * len(jobs)
    waiting, free = list(range(len(jobs))), list(slots)
    running: dict[int, _Running] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and free and not any(statuses):
                    number = waiting.pop(0)
                    running[number] = _Running(jobs[number], free.pop(0))
                    selector.register(running[number].output, selectors.EVENT_READ, number)
                if not running:
                    break
                for key, _ in selector.select():
                    process = running[key.data]
                    if process.read():
                        continue
                    selector.unregister(process.output)
                    statuses[key.data] = process.end()
                    free.append(process.slot)
                    del running[key.data]
        except BaseException:
            _stop(list(running.values()))
            raise
    return statuses


def share_of_machine(
    num_jobs: int, num_gpus: int, at_once: int | None = None, environment: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Return slots for equal jobs, among which the GPUs are divided evenly, or the cores if there is no GPU.

    Args:
        num_jobs: number of jobs.
        num_gpus: number of GPUs that this process sees.
        at_once: number of jobs that run at the same time; by default the number of GPUs, or of cores without a GPU.
        environment: environment of this process. Its CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS are respected.

    Returns:
        The environment variables of each slot, at most one slot for each job.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = max(1, min(num_jobs, at_once or num_gpus or cores))
    if at_once == 1:
        return [{}]
    if num_gpus:
        visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").strip(", ").split(",")]
        names = visible if len(visible) == num_gpus and all(visible) else [str(gpu) for gpu in range(num_gpus)]
        each = max(1, num_gpus // at_once)
        shares = [[names[(slot * each + i) % num_gpus] for i in range(each)] for slot in range(at_once)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
    if "OMP_NUM_THREADS" in environment:
        return [{}] * at_once
    return [{"OMP_NUM_THREADS": str(max(1, cores // at_once))}] * at_once


class _Running:
    """A running process, its log, and the unfinished last line of its output."""

    def __init__(self, job: Job, slot: Mapping[str, str]):
        self.slot = slot
        self._on_line = job.on_line
        self._line = b""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**SPIN, **os.environ, **slot, **job.environment}
        self._log: BinaryIO = open(job.log, "ab")  # noqa: SIM115 (closed in close())
        try:
            self.process = subprocess.Popen(
                list(job.command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={name: value for name, value in environment.items() if value is not None},
                preexec_fn=_killed_with(os.getpid()) if sys.platform == "linux" else None,
            )
        except BaseException:
            self._log.close()
            raise
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def read(self) -> bool:
        """Write new output to the log and call `on_line` for each line. Return False at the end of the output."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        self._log.write(chunk)
        self._log.flush()
        *lines, self._line = (self._line + chunk).split(b"\n")
        if not chunk and self._line:
            lines, self._line = [self._line], b""
        for line in lines:
            self._on_line(codecs.decode(line, "utf-8", errors="replace"))
        return bool(chunk)

    def end(self) -> int:
        """Wait until the process has ended, close its files and return its exit status."""
        status = self.process.wait()
        self.close()
        return status

    def close(self) -> None:
        """Close the log and the pipe."""
        self.output.close()
        self._log.close()


def _stop(running: Sequence[_Running]) -> None:
    """End processes: ask them to end, wait up to GRACE_SECONDS, then kill them."""
    for job in running:
        job.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for job in running:
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:  # also after a second Ctrl-C
        for job in running:
            job.process.kill()
            job.process.wait()
            job.close()


def _killed_with(parent: int) -> Callable[[], None]:
    """Return a function for a new child of process `parent`: it lets the kernel kill the child when the parent ends."""
    libc = ctypes.CDLL(None)  # before the fork: after it, loading could wait forever for a lock of another thread

    def request_kill() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # In the background of a shell script, SIGINT is ignored, and child processes inherit that. But torch ends the
        # ranks of a process on several GPUs by SIGINT when that process is gone.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if (
            os.getppid() != parent
        ):  # the parent died between fork and prctl. (A parent id of 1 proves nothing: in a container we may be 1.)
            os._exit(1)

    return request_kill
