"""Leases: which process holds a folder now. File locks do not work on many shared file systems."""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_json

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 120.0
"""A lease of a process on another machine is taken over if it has not been renewed for this long."""
HALF_WRITTEN_SECONDS = 2.0
"""A lease file that is still empty or incomplete after this long belongs to a process that died while writing it."""
CLAIM_SECONDS = 10.0
"""Removing a stale lease takes milliseconds. A process that needs longer than this has died while doing it."""


class Lease:
    """A context manager that holds a folder, so that no other process writes to it. A thread renews the lease.

    The lease of a process on this machine that has ended is taken over at once, that of a process on another machine
    when it has not been renewed for STALE_SECONDS. A process whose own lease was taken over (because it was suspended
    for longer than that) interrupts itself, as Ctrl-C does.

    Args:
        folder: the folder; created if it does not exist.
        stale_seconds: see STALE_SECONDS.

    Raises:
        RunError: another process holds the folder, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, stale_seconds: float = STALE_SECONDS):
        self.path = Path(folder) / "lease.json"
        self._stale_seconds = stale_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": _process_start(os.getpid()),
            "job_id": os.environ.get("SLURM_JOB_ID"),
            "job_restarts": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }

    def __enter__(self) -> "Lease":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create():
                if self._is_left_behind():
                    self._remove_left_behind()
                time.sleep(0.02)
        except OSError as error:
            raise RunError(
                f"{self.path.parent} cannot be written ({error.strerror}): make it writable, or choose another out="
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if _read(self.path) == self._me:
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            holder = _read(self.path)
            if holder == self._me:
                with suppress(OSError):  # a full disk must not end the run because of its lease
                    write_json(self.path, self._me)
            elif holder is not None:
                # Another process took over while this one was suspended. Only that one may continue to write.
                who = f"process {holder['pid']} on {holder['host']}"
                print(f"{self.path.parent} was taken over by {who}: this process stops", file=sys.stderr, flush=True)
                ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in the background of a shell script
                os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
                return

    def _create(self) -> bool:
        """Create the lease file. Return True if this process holds the lease now, False if a file exists already."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(self._me, file)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return _read(self.path) == self._me  # False if this process was suspended here and another took over

    def _is_left_behind(self) -> bool:
        """Return True if the holder of the lease has ended, False if the lease was just released or is being written.

        Raises:
            RunError: the holder is alive.
        """
        holder = _read(self.path)
        try:
            silent_seconds = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return False
        if holder is None:  # empty or half written
            return silent_seconds > HALF_WRITTEN_SECONDS
        if holder["host"] == self._me["host"]:
            gone = _process_start(holder["pid"]) != holder["process_start"]
        else:
            gone = silent_seconds > self._stale_seconds or self._is_restart_of(holder)
        if not gone:
            job = f", job {holder['job_id']}" if holder.get("job_id") else ""
            raise RunError(
                f"{self.path.parent} is in use by process {holder['pid']} on {holder['host']}{job} "
                f"(heartbeat {silent_seconds:.0f} s ago): wait for it, stop it, or choose another out="
            )
        return True

    def _is_restart_of(self, holder: dict) -> bool:
        """Return True if the holder is an earlier start of this Slurm job, before it was requeued."""
        job_id, restarts = self._me["job_id"], self._me["job_restarts"]
        return job_id is not None and holder.get("job_id") == job_id and holder.get("job_restarts", "0") != restarts

    def _remove_left_behind(self) -> None:
        # Only one process at a time may check again and remove: since the first check another process may have taken
        # over, and its new lease must stay. Only one process can create a folder, also on network file systems.
        claim = self.path.with_name(".lease.claim")
        try:
            claim.mkdir()
        except FileExistsError:
            with suppress(OSError):
                if time.time() - claim.stat().st_mtime > CLAIM_SECONDS:
                    claim.rmdir()
            return
        try:
            if self._is_left_behind():
                self.path.unlink(missing_ok=True)
        finally:
            with suppress(FileNotFoundError):
                claim.rmdir()


def is_held(folder: str | Path) -> bool:
    """Return True if a process seems to hold `folder` now. Nothing is changed.

    A process on this machine must be alive. A process on another machine must have renewed its lease within
    STALE_SECONDS.
    """
    path = Path(folder) / "lease.json"
    holder = _read(path)
    if holder is None:
        return False
    if holder["host"] == socket.gethostname():
        return _process_start(holder["pid"]) == holder["process_start"]
    try:
        return time.time() - path.stat().st_mtime <= STALE_SECONDS
    except OSError:
        return False


def _read(path: Path) -> dict | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and {"host", "pid", "process_start"} <= value.keys() else None


def _process_start(pid: int) -> str | None:
    """Return when a process of this machine started; None if it has ended.

    The start time distinguishes the process from a later one with the same number.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        return None
    else:
        state, *rest = stat.rpartition(")")[2].split()
        return None if state == "Z" else rest[18]
    try:  # without /proc (macOS), only the number is known
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return "alive"
