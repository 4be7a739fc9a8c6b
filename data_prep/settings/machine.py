"""Defaults that depend on where alma-prep runs: the number of workers, and when a worker counts as hung."""

import os

SLURM_JOBS = 64
"""Number of Slurm jobs that run at the same time by default. It does not depend on the number of cores of the login
node, because no task runs there. Most clusters give one user as many cores; more must be asked for."""
STALL_SECONDS = {"local": 40.0, "slurm": 300.0}
"""Seconds without progress after which a worker counts as hung, for each executor. Nodes of a cluster see each other's
files through a network file system, which may show a change only after a minute (NFS's attribute cache)."""


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use.

    This can be fewer than the machine has: a process can be limited to some cores (its CPU affinity, see the command
    taskset). Inside a Slurm job, the job's allocation counts too, because not every cluster enforces it by affinity.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    if "SLURM_JOB_ID" in os.environ:
        for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
            value = os.environ.get(name, "")
            if value.isdigit() and int(value) > 0:
                return min(cores, int(value))
    return cores


def default_workers(executor: str) -> int:
    """Return the default of --workers for this executor, "local" or "slurm"."""
    return SLURM_JOBS if executor == "slurm" else usable_cores()


def default_stall_seconds(executor: str) -> float:
    """Return the default of --stall-seconds for this executor."""
    return STALL_SECONDS.get(executor, STALL_SECONDS["local"])
