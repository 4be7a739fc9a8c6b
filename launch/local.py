"""Run processes on this machine, line by line, and never outlive or be outlived by them."""

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
"""Between asking processes to end and killing them."""

# OpenMP threads that spin while they wait take the processor from whoever has work: with one busy neighbour
# on two cores a stage ran at a tenth of its speed. Short spins cost a free machine little.
SPIN = {"GOMP_SPINCOUNT": "10000"}


@dataclass(frozen=True)
class Job:
    """A process to run."""

    command: Sequence[str]
    log: Path
    """All it prints, stdout and stderr, is appended here as it comes."""
    on_line: Callable[[str], None] = lambda line: None
    """Is handed each line of it."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Beside that of this process; None takes a variable away."""


def run_process(
    command: Sequence[str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str | None] | None = None,
) -> int:
    """Run one process to its end; return its exit status (negative: the signal that ended it). See run_processes."""
    (status,) = run_processes([Job(command, log, on_line, environment or {})])
    assert status is not None
    return status


def run_processes(jobs: Sequence[Job], slots: Sequence[Mapping[str, str]] = ({},)) -> list[int | None]:
    """Run jobs to their end, as many side by side as there are slots; return their exit statuses.

    An exception here (Ctrl-C among them) ends all processes before it goes on. When a job fails those that run
    are left to their end, for their work is worth keeping; those that wait are not started and have status None.
    On Linux a process is killed with its parent, so that a killed run leaves nobody writing into its folder.

    Args:
        jobs: in the order in which they start.
        slots: the environment of each place, such as the GPUs that belong to it.
    """
    if not slots:
        raise ValueError("no slot to run a job in")
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
    """Slots for `num_jobs` equal jobs: GPUs shared out evenly, or processor cores where there is no GPU.

    Args:
        num_gpus: that this process sees.
        at_once: how many run side by side; by default as many as there are GPUs, or cores.
        environment: of this process: a CUDA_VISIBLE_DEVICES or OMP_NUM_THREADS in it is kept to.
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
    """A process that runs, and what it has printed so far."""

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
                preexec_fn=_dying_with(os.getpid()) if sys.platform == "linux" else None,
            )
        except BaseException:
            self._log.close()
            raise
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def read(self) -> bool:
        """Pass on what has been printed. False at the end of all output."""
        piece = os.read(self.output.fileno(), 1 << 16)
        self._log.write(piece)
        self._log.flush()
        *lines, self._line = (self._line + piece).split(b"\n")
        if not piece and self._line:
            lines, self._line = [self._line], b""
        for line in lines:
            self._on_line(codecs.decode(line, "utf-8", errors="replace"))
        return bool(piece)

    def end(self) -> int:
        status = self.process.wait()
        self.close()
        return status

    def close(self) -> None:
        self.output.close()
        self._log.close()


def _stop(running: Sequence[_Running]) -> None:
    for one in running:
        one.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for one in running:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C does not leave them behind either
        for one in running:
            one.process.kill()
            one.process.wait()
            one.close()


def _dying_with(parent: int) -> Callable[[], None]:
    """What a child of process `parent` does first: ask to be killed when that ends."""
    libc = ctypes.CDLL(None)  # before the fork: after it, with other threads about, loading might wait for ever

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The background of a shell script ignores SIGINT, and hands that on; but it is what torch has the ranks of a
        # process on several GPUs end by when that process is gone.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.getppid() != parent:  # it died between fork and prctl. (1 is no sign: in a container we may be 1.)
            os._exit(1)

    return ask
