"""Identity of the process that holds a lease, and whether this process has ended."""

import os
import re
import socket
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fairseq_alma.core.slurm_job import ENDED_STATES, JOB_VARIABLE, ask, cluster_name, this_job

_MAX_PID = 1 << 30
_ANY_TEXT = re.compile(r"[\w.@+-][\w.:@+\[\]-]{0,255}")
_PATTERNS = {
    "process_start": re.compile(r"\d{1,30}|alive"),
    "job_id": re.compile(r"\d{1,20}(?:_\d{1,20})?"),
    "job_restarts": re.compile(r"\d{1,20}"),
}
"""What the texts in a lease look like, if they are not _ANY_TEXT."""
_OPTIONAL = ("process_start", "boot_id", "pid_namespace", "job_id", "cluster")


@dataclass(frozen=True)
class Holder:
    """A process that holds a lease.

    Two machines or containers may have the same host name, and processes in two containers may have the same process
    id. A process is therefore identified by its id, its start time, and the PID namespace to which the id belongs.
    """

    host: str
    """Host name of the machine. Only for messages if the boot id and the PID namespace are known."""
    pid: int
    """Process id, in the PID namespace `pid_namespace`."""
    process_start: str | None
    """Start time of the process, which distinguishes it from a later process with the same id. See `process_start`."""
    boot_id: str | None = None
    """Identifier of the last start of the machine's Linux kernel; None on other systems."""
    pid_namespace: str | None = None
    """Identifier of the PID namespace: all processes in a container are in the same PID namespace, and no others."""
    job_id: str | None = None
    """Slurm job id; None outside Slurm."""
    job_restarts: str = "0"
    """How many times Slurm had restarted this job when the process started."""
    cluster: str | None = None
    """Name of the Slurm cluster to which the job belongs; None outside Slurm."""

    @classmethod
    def this_process(cls) -> "Holder":
        """Return the identity of this process."""
        found: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "boot_id": _boot_id(),
            "pid_namespace": _pid_namespace(),
            # alma-lm removes SLURM_JOB_ID for its training processes, and sets the other variable instead.
            "job_id": this_job() or os.environ.get(JOB_VARIABLE),
            "job_restarts": os.environ.get("SLURM_RESTART_COUNT", "0"),
            "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        }
        return cls(**{"host": "unknown", **{name: value for name, value in found.items() if _is_valid(name, value)}})

    @classmethod
    def from_json(cls, value: Any) -> "Holder | None":
        """Return the holder that the content of a lease file describes; None if `value` is no such content.

        A lease file may come from somebody else, and its values are given to programs: they must be what this class
        writes.
        """
        if not isinstance(value, dict) or not {"host", "pid", "process_start"} <= value.keys():
            return None
        values = {field.name: value[field.name] for field in fields(cls) if field.name in value}
        return cls(**values) if all(_is_valid(*item) for item in values.items()) else None

    def to_json(self) -> dict[str, Any]:
        """Return the content of a lease file."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a description for messages, such as "process 4321 on node1, job 77"."""
        return f"process {self.pid} on {self.host}" + (f", job {self.job_id}" if self.job_id else "")

    def state(self, ask_slurm: bool = True) -> Literal["running", "ended", "unknown"]:
        """Return whether the process is running. "unknown": this process cannot tell.

        The state is known in these cases:

        - The process is in the same PID namespace as this process.
        - The process was in the same Slurm job as this process, and Slurm has restarted the job since then.
        - The process was in a Slurm job of this cluster that has ended or restarted. This is found out only if
          `ask_slurm`, because the question takes a fraction of a second.
        """
        me = Holder.this_process()
        if self._is_in_namespace_of(me):
            start = process_start(self.pid)
            if start == ALIVE != self.process_start:
                return "unknown"
            return "running" if start == self.process_start else "ended"
        if self.job_id is not None:
            is_restarted = self.job_id == me.job_id and self.job_restarts != me.job_restarts
            if is_restarted or (ask_slurm and self._job_has_ended()):
                return "ended"
        return "unknown"

    def works_in(self, folder: Path) -> bool:
        """Return True if the process, one of this machine, has opened its place in a leased folder (see `core.fence`).

        Without /proc, for example on macOS, this cannot be seen, and the result is True.
        """
        if not Path("/proc/self/fd").is_dir():
            return True
        start = os.path.join(os.path.realpath(folder), ".lease.")  # noqa: PTH118
        try:
            return any(os.readlink(entry.path).startswith(start) for entry in os.scandir(f"/proc/{self.pid}/fd"))  # noqa: PTH115
        except OSError:
            return False

    def _is_in_namespace_of(self, other: "Holder") -> bool:
        if other.boot_id is None or other.pid_namespace is None:
            # This system is not Linux. Without containers, the host name identifies the machine.
            return self.boot_id is None and self.host == other.host
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)

    def _job_has_ended(self) -> bool:
        """Ask Slurm. Return True only if Slurm answers that the holder's job has ended or has been restarted."""
        # Job ids are unique only within a cluster, and a shared file system may be used by several clusters.
        if self.cluster is None or self.cluster != cluster_name():
            return False
        # Jobs that have ended are listed for some minutes. That a job is not listed says nothing: Slurm may hide the
        # jobs of other users (PrivateData). After these minutes, the lease is old, and taken over without an answer.
        answer = ask("squeue", "--states=all", "--noheader", f"--jobs={self.job_id}", "--Format=State:32,RestartCnt:16")
        words = answer.split() if answer is not None else []
        if len(words) != 2:
            return False
        state, restarts = words
        return state == "PENDING" or state in ENDED_STATES or restarts != self.job_restarts


def _is_valid(name: str, value: Any) -> bool:
    """Return True if a field of a lease can have this value."""
    if name == "pid":
        return type(value) is int and 0 < value <= _MAX_PID
    if value is None:
        return name in _OPTIONAL
    return isinstance(value, str) and bool(_PATTERNS.get(name, _ANY_TEXT).fullmatch(value))


ALIVE = "alive"
"""What `process_start` returns if a process exists and its start time is not known."""


def process_start(pid: int) -> str | None:
    """Return the start time of process `pid` in the PID namespace of this process; None if the process has ended.

    It is not known without /proc, for example on macOS, and for processes of other users if /proc hides them (mount
    option hidepid, common on clusters). Then the function returns ALIVE if there is a process with this id.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # there is such a process, of another user
            return ALIVE
        return ALIVE
    return None if state == "Z" else rest[18]


@cache
def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    # Do not cache the result, because a child process may be in another namespace than its parent.
    try:
        return str(Path("/proc/self/ns/pid").readlink())  # for example "pid:[4026531836]"
    except OSError:
        return None
