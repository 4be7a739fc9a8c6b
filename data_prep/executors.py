"""Choose where tasks run: on this machine or on a Slurm cluster."""

from contextlib import AbstractContextManager

from data_prep.settings import PrepSettings
from data_prep.tasks import Executor
from data_prep.workers import Local


def open_executor(settings: PrepSettings) -> AbstractContextManager[Executor]:
    """Return the object that runs tasks (the executor): `Slurm` if `settings.executor` is "slurm", otherwise `Local`.

    `Slurm` runs tasks in Slurm jobs, and `Local` runs them in worker processes on this machine. The executor is a
    context manager. On exit, it ends its worker processes, or cancels its unfinished Slurm jobs.
    """
    if settings.executor == "slurm":
        # Import here, because data_prep.slurm needs datatrove, which is an optional dependency (`[corpora]`).
        from data_prep.slurm import Slurm

        return Slurm(settings.cluster, settings.workers, settings.stall_seconds)
    return Local(settings.workers, settings.stall_seconds)
