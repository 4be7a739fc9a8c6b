"""Who holds a run folder now. A lease, not a file lock: run folders live on shared file systems."""

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
"""A lease of another machine whose heart has not beaten for so long is taken over."""
HALF_WRITTEN_SECONDS = 2.0
"""A lease file that is still empty after so long: its writer died in the middle."""
CLAIM_SECONDS = 10.0
"""Removing a stale lease takes milliseconds: who is at it for so long has died at it."""


class Lease:
    """Holds `folder` from `with` to its end; renewed by a thread.

    A lease left by a process of this machine that is gone is taken over at once, one of another
    machine when its heart has stopped for STALE_SECONDS. A process that finds its own lease taken
    over (it slept for longer than that) interrupts itself, as Ctrl-C does.

    Raises:
        RunError: another process holds the folder, and which one; or the folder cannot be written.
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
                f"{self.path.parent} cannot be used as a run folder ({error.strerror}): "
                f"make it writable, or choose another out="
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
                with suppress(OSError):  # a full disk must not end the run by way of its heartbeat
                    write_json(self.path, self._me)
            elif holder is not None:
                # Taken over while this machine was asleep. Two writers would spoil the run: the new one goes on.
                who = f"process {holder['pid']} on {holder['host']}"
                print(f"{self.path.parent} was taken over by {who}: this process stops", file=sys.stderr, flush=True)
                ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in the background of a shell script
                os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
                return

    def _create(self) -> bool:
        """Whether the lease is ours now; False where there is one already."""
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
        return _read(self.path) == self._me  # not so if we fell asleep here and were taken for dead

    def _is_left_behind(self) -> bool:
        """Whether the lease has no living holder. False where it has just been given back, or is being written.

        Raises:
            RunError: it has one.
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
        """Whether the holder is what this very job was before Slurm put it back into the queue."""
        job_id, restarts = self._me["job_id"], self._me["job_restarts"]
        return job_id is not None and holder.get("job_id") == job_id and holder.get("job_restarts", "0") != restarts

    def _remove_left_behind(self) -> None:
        # One process at a time looks again and removes: since the first look another may have taken over, and
        # its new lease must stay. Making a folder succeeds for one process only, on network file systems too.
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
    """Whether a living process seems to hold `folder` now. Nothing is changed.

    Of this machine the process is looked for; of another its heart must have beaten within STALE_SECONDS.
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
    """When a living process of this machine started, None for one that is gone: process numbers are used again."""
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
    try:  # no /proc (macOS): the number is all we have
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return "alive"
