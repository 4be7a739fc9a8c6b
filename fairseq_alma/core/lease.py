"""Leases. A lease locks a folder, so that only one process writes to it.

A lease is the file lease.json in the folder. It names the process that holds the lease. While this process runs, it
rewrites the file regularly. File locks are not used, because they do not work on many shared file systems. A process
that was stopped for so long that it lost its lease cannot write any more (see `core.fence`).
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.fence import Fence, hold, let_go, places_in
from fairseq_alma.core.files import sync_unsynced, write_json, written_aside
from fairseq_alma.core.holder import Holder
from fairseq_alma.core.run_folder import RunFolder

HEARTBEAT_SECONDS = 15.0
"""Time in seconds between two renewals of a lease. A renewal rewrites the lease file."""
STALE_SECONDS = 120.0
"""Time in seconds without a renewal after which another process may take over a lease, if it is not known whether its
holder is running.

It is longer than a heartbeat plus the time for which a network file system may show old modification times (60 seconds
by default in NFS)."""
POLL_SECONDS = 1.0
"""Time in seconds between two looks at the lease of a process of which it is not known whether it is running."""
ASK_SECONDS = 10.0
"""Time in seconds between two questions to Slurm about the job of the holder, while a process waits for a lease."""
HALF_WRITTEN_SECONDS = 2.0
"""If a lease file is older than this and still empty or incomplete, the process that was writing it must have died."""
_MAX_LEASE_CHARACTERS = 10_000
CLAIM_SECONDS = 10.0
"""If the folder .lease.claim is older than this, the process that created it must have died.

A process creates this folder before it removes the lease of an ended process, so that no other process removes a lease
at the same time. It deletes the folder after a few milliseconds."""


class Lease:
    """Context manager that locks a folder for this process. A background thread keeps the lock (lease) valid.

    If another process has locked the folder, this process takes over the lease if the other process is known to have
    ended (see `Holder.state`): at once on the same machine, or if Slurm says that its job has ended or was restarted.

    If it is not known whether the other process is running, for example because it is on another machine or in another
    container, this process waits. If the other process renews its lease, RunError is raised: this happens within
    HEARTBEAT_SECONDS. If the lease has not been renewed for STALE_SECONDS, it is taken over.

    In the same way, another process can take over the lease of this process, if this process is suspended for a long
    time. When this process wakes up again, what it writes fails (see `core.fence`), and it stops itself, as if the user
    had pressed Ctrl-C.

    At the end, the disk has stored all files that were written under the lease.

    The clocks of the machines may differ: the age of a lease is computed only from modification times of files on the
    file system that contains the folder.

    Args:
        folder: the folder to lock. It is created if it does not exist.
        guarded: the folder whose files only the holder may change. By default, it is `folder`.

    Raises:
        RunError: if another process has locked the folder, or if the folder is not writable.
    """

    def __init__(self, folder: str | Path, guarded: str | Path | None = None):
        self.path = Path(folder) / "lease.json"
        self._guarded = Path(guarded or folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, daemon=True)
        self._me = Holder.this_process()
        self.fence: Fence | None = None
        """Where this process writes while it holds the lease; None before."""
        self._descriptor = -1
        # The lease for which this process waits: its holder, and the modification time of the lease file (in
        # nanoseconds) when it was first seen. `_asked` is the time of the last question to Slurm, and `_ended` is a
        # holder whose job has ended according to Slurm.
        self._awaited: tuple[Holder, int] | None = None
        self._asked = -ASK_SECONDS
        self._ended: Holder | None = None

    def __enter__(self) -> "Lease":
        self.wait()
        try:
            while not self._create():
                self.wait()
        except OSError as error:
            raise self._not_writable(error) from error
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        assert self.fence is not None
        try:
            if self.fence.place.is_dir():
                sync_unsynced()
            if _read(self.path) == self._me:
                # This fails if another process has taken over the folder in the meantime.
                with suppress(FileNotFoundError):
                    os.rename(self.path, self.fence.place / self.path.name)
        finally:
            let_go(self.fence)
            os.close(self._descriptor)
            shutil.rmtree(self.fence.place, ignore_errors=True)

    def wait(self) -> None:
        """Create the folder, and wait until no other process holds its lease.

        `with` calls this method. Call it before if the wait, but not what follows, may be interrupted by Ctrl-C. Raise
        RunError if another process holds the lease and is running, or if the folder is not writable.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while self.path.exists():
                if self._is_left_behind():
                    self._remove_left_behind()
                time.sleep(POLL_SECONDS if self._awaited else 0.02)
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path.parent} is not writable ({error.strerror}): make it writable, or choose another out="
        )

    def _renew_until_stopped(self) -> None:
        assert self.fence is not None
        while not self._stop.wait(HEARTBEAT_SECONDS):
            holder = _read(self.path)
            is_lost = not self.fence.place.is_dir() and self.path.parent.is_dir()
            if holder == self._me and not is_lost:
                # Ignore an error such as a full disk, because the run does not depend on a single renewal.
                with suppress(OSError, RunError):
                    write_json(self.path, self._me.to_json())
            elif holder is not None or is_lost:
                # Another process took over the lease while this process was suspended, and may have finished. Stop,
                # because this process cannot write to the folder any more.
                print(
                    f"{self.path.parent} was taken over by {holder or 'another process'}, because this process did not "
                    f"renew its lease in time: this process stops, and the other process continues the run",
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
                json.dump(self._me.to_json(), file)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return self._exclude_others()

    def _exclude_others(self) -> bool:
        """Make the fence of this process, and remove those of earlier holders. Return False if the lease was lost."""
        fence = Fence.in_folder(self.path.parent, self._guarded)
        earlier = [place for place in places_in(fence.place.parent) if place != fence.place]
        # Read the lease after the places were listed: if this process is stopped here, another process may take over
        # the lease, and its place must not be removed.
        if _read(self.path) != self._me:
            fence.place.rmdir()
            return False
        fence.exclude(earlier)
        hold(fence)
        # While the folder is open, /proc shows that this process works there (see `Holder.works_in`).
        self.fence, self._descriptor = fence, os.open(fence.place, os.O_RDONLY)
        for path in self.path.parent.rglob("*.jsonl") if earlier else ():
            # An earlier holder may have opened this file to append lines. Give its name to a copy.
            with written_aside(path) as copy:
                shutil.copy2(path, copy)
        return True

    def _is_left_behind(self) -> bool:
        """Return True if the lease may be removed, because its holder has ended or has not renewed it in time.

        Return False if it was just released, is still being written, or if the holder's state is unknown. Raise a
        RunError that names the holder if it is running.
        """
        # Read before `stat`: on a network file system, opening the file brings its modification time up to date.
        holder = _read(self.path)
        try:
            modified_ns = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        silent_seconds = self._now() - modified_ns / 1e9
        if holder is None:
            # The lease file is empty or incomplete. If the file is new, a process may still be writing it. If the
            # file is older, the process that was writing it must have died, so the file may be removed.
            return silent_seconds > HALF_WRITTEN_SECONDS
        # Known from the processes of this machine, at no cost. Ask Slurm only from time to time.
        ask_slurm = time.monotonic() - self._asked >= ASK_SECONDS
        state = "ended" if holder == self._ended else holder.state(ask_slurm)
        if ask_slurm:
            self._asked = time.monotonic()
        if state == "ended":
            self._ended = holder
        if state == "ended" or (state == "unknown" and silent_seconds > STALE_SECONDS):
            return True
        if self._awaited is None or self._awaited[0] != holder:
            if state == "unknown":
                self._awaited = (holder, modified_ns)
                print(
                    f"{self.path.parent} is held by {holder}, which renewed its lease {max(silent_seconds, 0):.0f} s "
                    f"ago: waiting until it renews the lease again, or counts as ended after {STALE_SECONDS:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                return False
        elif self._awaited[1] == modified_ns:
            return False
        raise RunError(
            f"{self.path.parent} is in use by {holder} (heartbeat {max(silent_seconds, 0):.0f} s ago): wait for it, "
            f"stop it, or choose another out="
        )

    def _now(self) -> float:
        """Return the time in seconds by the clock of the file system, which also gives lease files their times."""
        clock = self.path.with_name(f".lease.clock.{self._me.host}.{self._me.pid}.{threading.get_native_id()}")
        try:
            clock.write_bytes(b"")
            return clock.stat().st_mtime
        finally:
            clock.unlink(missing_ok=True)

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
                if self._now() - claim.stat().st_mtime > CLAIM_SECONDS:
                    claim.rmdir()
            return
        try:
            if self._is_left_behind():
                self.path.unlink(missing_ok=True)
        finally:
            with suppress(FileNotFoundError):
                claim.rmdir()


def holder_of_run(run: Path, ask_slurm: bool = False) -> Holder | None:
    """Return the process that is working on a run; None if there is none (see `holder_of`).

    A process that trains several seeds together holds only the lease of the folder that contains their runs, `seed_*`.
    """
    holder = holder_of(run, ask_slurm)
    return holder_of(run.parent, ask_slurm) if holder is None and RunFolder(run).is_of_one_of_several_seeds else holder


def holder_of(folder: str | Path, ask_slurm: bool = False) -> Holder | None:
    """Return the process that holds a valid lease of `folder`; None if there is none. The folder is not changed.

    If it is not known whether the holder is running, the lease is valid if it was renewed in the last STALE_SECONDS, by
    the clock of this machine. `ask_slurm` says whether to ask Slurm, which takes a fraction of a second.
    """
    path = Path(folder) / "lease.json"
    holder = _read(path)
    if holder is None:
        return None
    state = holder.state(ask_slurm)
    if state != "unknown":
        return holder if state == "running" else None
    try:
        return holder if time.time() - path.stat().st_mtime <= STALE_SECONDS else None
    except OSError:
        return None


def _read(path: Path) -> Holder | None:
    """Return the holder that a lease file names; None if there is no such file, or if it is incomplete or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            return Holder.from_json(json.loads(file.read(_MAX_LEASE_CHARACTERS)))
    except (OSError, ValueError, RecursionError):
        return None
