"""Run child processes on this machine and read their output line by line.

When this process ends, its child processes are ended, too.
"""

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
from typing import BinaryIO, Protocol

PR_SET_PDEATHSIG = 1
"""Option of the Linux system call prctl. It sets the signal that a process gets when its parent process ends."""

GRACE_SECONDS = 10.0
"""Time in seconds that a process has to end after SIGTERM. After this time, it is killed with SIGKILL."""

# An OpenMP thread that waits for work first runs a busy loop and then sleeps. The loop takes processor time from other
# threads that have work, so GOMP_SPINCOUNT makes the loop shorter. In a test on two cores, while another process was
# busy, the training of a stage was ten times slower without GOMP_SPINCOUNT. If no other process is busy, GOMP_SPINCOUNT
# has little effect.
SPIN = {"GOMP_SPINCOUNT": "10000"}


class Process(Protocol):
    """A running process. It has the methods of `subprocess.Popen` that this module uses."""

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], int, Mapping[str, str], int], Process]
"""Type of a function that starts a command. For its arguments and its result, see `start_process`."""


def start_process(command: Sequence[str], output: int, environment: Mapping[str, str], errors: int) -> Process:
    """Start a command with `subprocess.Popen`, and return its process.

    Args:
        command: program and arguments.
        output: file descriptor for stdout of the process.
        environment: environment variables of the process.
        errors: file descriptor for stderr of the process.
    """
    return subprocess.Popen(
        list(command),
        stdout=output,
        stderr=errors,
        env=environment,
        preexec_fn=killed_with(os.getpid()) if sys.platform == "linux" else None,
    )


@dataclass(frozen=True)
class Job:
    """A process to run, with its log file and environment."""

    command: Sequence[str]
    """Program and arguments."""
    log: Path
    """File to which stdout and stderr of the process are appended. Its parent folder is created if it is missing."""
    on_line: Callable[[str], None] = lambda line: None
    """Function that is called with each output line, after the line was written to the log."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables to add to the environment of this process. The value None removes a variable."""
    start: Start = start_process
    """Function that starts the command, such as that of `launch.warm.warm_start`, which is faster."""
    grace_seconds: float | None = None
    """Time in seconds that the process has to end after SIGTERM, for example to write a checkpoint; None:
    GRACE_SECONDS."""


def run_processes(jobs: Sequence[Job], slots: Sequence[Mapping[str, str]] = ({},)) -> list[int | None]:
    """Run jobs in parallel, wait until they end and return their exit statuses.

    The jobs run in slots. Each slot runs one job at a time. When a job ends, its slot is free for the next job.

    If a job fails, no further jobs are started. The running jobs continue, because their results are useful. If an
    exception is raised, for example by Ctrl-C, all processes are ended before the exception leaves this function: they
    get SIGTERM, and SIGKILL if they have not ended in time, or at once if Ctrl-C is pressed again. On
    Linux, if this process is killed, its child processes are killed too, so that they do not continue to write files.

    Args:
        jobs: the jobs, in the order in which they are started.
        slots: for each slot, the environment variables of its jobs, for example CUDA_VISIBLE_DEVICES. The number of
            slots is the maximum number of jobs that run at the same time.

    Returns:
        The exit status of each job. It is negative if a signal ended the job, and None if the job was not started.

    Raises:
        ValueError: if `slots` is empty.
        OSError: if a program cannot be started.
    """
    if not slots:
        raise ValueError("slots is empty, so no job can run: pass at least one mapping, e.g. slots=[{}]")
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
                    job = running[key.data]
                    if job.read():
                        continue
                    selector.unregister(job.output)
                    statuses[key.data] = job.process.wait()
                    job.close()
                    free.append(job.slot)
                    del running[key.data]
        except BaseException:
            _stop(list(running.values()))
            raise
    return statuses


def share_of_machine(num_jobs: int, num_gpus: int, at_once: int | None = None) -> list[dict[str, str]]:
    """Divide the GPUs equally among jobs that run in parallel. If there is no GPU, divide the CPU cores.

    If the environment has CUDA_VISIBLE_DEVICES, only the GPUs in it are used. If it has OMP_NUM_THREADS, it is not
    changed.

    Args:
        num_jobs: number of jobs.
        num_gpus: number of GPUs that this process sees.
        at_once: number of jobs that run at the same time. The default is the number of GPUs or, without GPUs, of cores.

    Returns:
        The argument `slots` of `run_processes`: for each slot, the environment variables that assign GPUs or cores to
        its jobs. There are no more slots than jobs.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = max(1, min(num_jobs, at_once or num_gpus or cores))
    if at_once == 1:
        return [{}]
    if num_gpus:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(", ").split(",")]
        # CUDA uses the names up to the first one that it does not know, and one slice of a GPU (MIG) at most.
        names = visible[:num_gpus]
        if len(names) < num_gpus or not all(names):
            names = [str(gpu) for gpu in range(num_gpus)]
        each = max(1, num_gpus // at_once)
        shares = [[names[(slot * each + i) % num_gpus] for i in range(each)] for slot in range(at_once)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
    if "OMP_NUM_THREADS" in os.environ:
        return [{}] * at_once
    return [{"OMP_NUM_THREADS": str(max(1, cores // at_once))}] * at_once


class _Running:
    """A running process with its log file."""

    def __init__(self, job: Job, slot: Mapping[str, str]):
        self.slot = slot
        self.grace_seconds = GRACE_SECONDS if job.grace_seconds is None else job.grace_seconds
        self._on_line = job.on_line
        self._line = b""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**SPIN, **os.environ, **slot, **job.environment}
        self._log: BinaryIO = open(job.log, "ab")  # noqa: SIM115 (closed in close())
        read_end, write_end = os.pipe()
        self.output = open(read_end, "rb", buffering=0)  # noqa: SIM115 (closed in close())
        try:
            given = {name: value for name, value in environment.items() if value is not None}
            self.process = job.start(job.command, write_end, given, write_end)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(write_end)

    def read(self) -> bool:
        """Write new output to the log and call `on_line` for each complete line. Return False at the end of output."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        self._log.write(chunk)
        self._log.flush()
        *lines, self._line = (self._line + chunk).split(b"\n")
        if not chunk and self._line:
            lines, self._line = [self._line], b""
        for line in lines:
            self._on_line(line.decode("utf-8", "replace"))
        return bool(chunk)

    def close(self) -> None:
        self.output.close()
        self._log.close()


def _stop(running: Sequence[_Running]) -> None:
    """Send SIGTERM to the processes and wait until they end. Kill those that are still running after their time."""
    for job in running:
        job.process.terminate()
    start = time.monotonic()
    try:
        for job in running:
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(timeout=max(0.0, start + job.grace_seconds - time.monotonic()))
    finally:
        # Kill the processes even if the user presses Ctrl-C again, which interrupts the wait above.
        for job in running:
            job.process.kill()
            job.process.wait()
            job.close()


def killed_with(parent: int) -> Callable[[], None]:
    """Return a function that tells the Linux kernel to kill this process when the process with the id `parent` ends.

    It runs in a new child process, as the argument `preexec_fn` of `subprocess.Popen`.
    """
    # Load the C library, which contains prctl, before the fork. If the child process loaded it, it could wait forever
    # for a lock that another thread of the parent held during the fork.
    libc = ctypes.CDLL(None)

    def request_kill() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # torch uses SIGINT to end the other processes of a training when the main process of the training has ended.
        # Background jobs of a shell script ignore SIGINT, and so would their child processes.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # If the parent died between fork and prctl, this process has a new parent, and the kernel will not kill it. The
        # id of the new parent need not be 1, and in a container the original parent may have the id 1.
        if os.getppid() != parent:
            os._exit(1)

    return request_kill
