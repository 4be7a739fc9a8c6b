"""Leases. A lease locks a folder, so that only one process writes to it.

A lease is the file lease.json in the folder. The file names the process that holds the lease. While this process runs,
it rewrites the file regularly. Leases are used instead of file locks, because file locks do not work on many shared
file systems.
"""

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
"""Time in seconds between two renewals of a lease. A renewal rewrites the lease file."""
STALE_SECONDS = 120.0
"""Time in seconds. If a process on another machine has not renewed its lease for this time, another process may take
over the lease."""
HALF_WRITTEN_SECONDS = 2.0
"""Time in seconds. If a lease file is older than this and still empty or incomplete, the process that was writing the
file must have died."""
CLAIM_SECONDS = 10.0
"""Time in seconds. If the folder .lease.claim is older than this, the process that created the folder must have died.

A process creates this folder before it removes the lease of an ended process, so that no other process removes a lease
at the same time. It deletes the folder after a few milliseconds."""


class Lease:
    """Context manager that locks a folder for this process. A background thread keeps the lock (lease) valid.

    If another process has locked the folder, this process takes over the lease in one of these cases:

    - The other process ran on this machine and has ended.
    - The other process runs on another machine and has not renewed the lease for `stale_seconds`.
    - The other process ran on another machine, in the same Slurm job as this process, and Slurm has restarted the job.

    In the same way, another process can take over the lease of this process, if this process is suspended for a long
    time. When this process wakes up again, it stops itself, as if the user had pressed Ctrl-C.

    Args:
        folder: the folder to lock. It is created if it does not exist.
        stale_seconds: time in seconds after which the lease of a process on another machine is taken over.

    Raises:
        RunError: if another process has locked the folder, or if the folder is not writable.
    """

    def __init__(self, folder: str | Path, stale_seconds: float = STALE_SECONDS):
        self.path = Path(folder) / "lease.json"
        self._stale_seconds = stale_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, daemon=True)
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
                f"{self.path.parent} is not writable ({error.strerror}): make it writable, or choose another out="
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if _read(self.path) == self._me:
            self.path.unlink(missing_ok=True)

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            holder = _read(self.path)
            if holder == self._me:
                # Ignore an error such as a full disk, because the run does not depend on a single renewal.
                with suppress(OSError):
                    write_json(self.path, self._me)
            elif holder is not None:
                # Another process took over the lease while this process was suspended. Stop, because only the other
                # process may write to the folder now.
                who = f"process {holder['pid']} on {holder['host']}"
                print(
                    f"{self.path.parent} was taken over by {who}, because this process did not renew its lease "
                    f"in time: this process stops, and the other process continues the run",
                    file=sys.stderr,
                    flush=True,
                )
                # Stop this process with SIGINT, the signal of Ctrl-C. If it ignores SIGINT, as background jobs of a
                # shell script do, stop it with SIGTERM.
                ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
                return

    def _create(self) -> bool:
        """Create the lease file. Return True if this process has the lease now, False if another process has it."""
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
        # Read the file again, because another process may have already replaced the new lease by its own lease.
        return _read(self.path) == self._me

    def _is_left_behind(self) -> bool:
        """Return True if the lease may be removed, because its process has ended or has not renewed it in time.

        Return False if the lease was just released, or if the lease file is still being written.

        Raises:
            RunError: if the lease is valid. The message names the process that holds the lease.
        """
        holder = _read(self.path)
        try:
            silent_seconds = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return False
        if holder is None:
            # The lease file is empty or incomplete. If the file is new, a process may still be writing it. If the
            # file is older, the process that was writing it must have died, so the file may be removed.
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
        """Return True if the process that holds the lease was ended by a restart of its Slurm job.

        In this case, `holder` has the same Slurm job id as this process, but a different number of restarts of the job.

        Args:
            holder: content of the lease file, which describes the process that holds the lease.
        """
        job_id, restarts = self._me["job_id"], self._me["job_restarts"]
        return job_id is not None and holder.get("job_id") == job_id and holder.get("job_restarts", "0") != restarts

    def _remove_left_behind(self) -> None:
        # Check the lease again before removing it. Since the first check, another process may have taken over the
        # folder, and the new lease of this other process must not be removed. Only one process at a time may check and
        # remove the lease. To ensure this, a process must first create the folder `claim`. If several processes try to
        # create it, only one succeeds, even on network file systems.
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
    """Return True if a process holds a valid lease of `folder`. The lease file is not changed.

    The lease of a process on this machine is valid if the process is running. The lease of a process on another machine
    is valid if it was renewed in the last STALE_SECONDS.
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
    """Return the start time of process `pid` on this machine; None if the process has ended.

    The start time distinguishes the process from a later process with the same id. Without /proc, for example on
    macOS, the start time is not known, and the function returns "alive" for every running process.
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
    try:  # without /proc, test only whether a process with this id exists
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return "alive"
