"""Who holds a run folder now. A lease, not a file lock: run folders live on shared file systems."""

import json
import os
import socket
import threading
import time
from pathlib import Path

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_json

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 120.0
"""A lease of another machine whose heart has not beaten for so long is taken over."""


class Lease:
    """Holds `folder` from `with` to its end; renewed by a thread.

    A lease left by a process of this machine that is gone is taken over at once, one of another
    machine when its heart has stopped for STALE_SECONDS.

    Raises:
        RunError: another process holds the folder; says which one.
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
        }

    def __enter__(self) -> "Lease":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                self._take_over_or_refuse()
                continue
            with os.fdopen(descriptor, "w") as file:
                json.dump(self._me, file)
            break
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if self._is_mine():
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if not self._is_mine():
                return  # taken over while this machine was asleep: the new holder goes on
            try:
                write_json(self.path, self._me)
            except OSError:
                continue  # a full disk must not end the run by way of its heartbeat

    def _is_mine(self) -> bool:
        return _read(self.path) == self._me

    def _take_over_or_refuse(self) -> None:
        holder = _read(self.path)
        try:
            silent_seconds = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return  # it was given back in this moment
        if holder is None:  # empty or half written: its writer died, or is writing now
            if silent_seconds > 2.0:
                self._remove_stale()
            time.sleep(0.1)
            return
        if holder["host"] == self._me["host"]:
            gone = _process_start(holder["pid"]) != holder["process_start"]
        else:
            gone = silent_seconds > self._stale_seconds
        if not gone:
            job = f", job {holder['job_id']}" if holder.get("job_id") else ""
            raise RunError(
                f"{self.path.parent} is in use by process {holder['pid']} on {holder['host']}{job} "
                f"(heartbeat {silent_seconds:.0f} s ago): wait for it, stop it, or choose another out="
            )
        self._remove_stale()

    def _remove_stale(self) -> None:
        # Two processes may see the same stale lease: a rename succeeds for one of them only.
        grave = self.path.with_name(f".lease.{self._me['host']}.{self._me['pid']}.stale")
        try:
            os.rename(self.path, grave)
        except FileNotFoundError:
            return
        grave.unlink(missing_ok=True)


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
