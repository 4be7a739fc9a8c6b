"""Choose where tasks run: on this machine or on a Slurm cluster."""

from contextlib import AbstractContextManager

from data_prep.running.slurm import Slurm
from data_prep.running.tasks import Executor
from data_prep.running.workers import Local
from data_prep.settings import STALL_SECONDS, PrepSettings


def open_executor(settings: PrepSettings) -> AbstractContextManager[Executor]:
    """Return the object that runs tasks (the executor): `Slurm` if `settings.executor` is "slurm", otherwise `Local`.

    `Slurm` runs tasks in Slurm jobs, and `Local` runs them in worker processes on this machine. The executor is a
    context manager. On exit, it ends its worker processes.
    """
    if settings.executor == "slurm":
        return Slurm(settings.cluster, settings.workers, STALL_SECONDS["slurm"], settings.out)
    return Local(settings.workers, STALL_SECONDS["local"])
