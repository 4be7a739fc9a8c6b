"""The choice of where tasks run."""

from contextlib import AbstractContextManager

from data_prep.settings import PrepSettings
from data_prep.tasks import Executor
from data_prep.workers import Local


def open_executor(settings: PrepSettings) -> AbstractContextManager[Executor]:
    """Return the executor that the settings name, as a context manager that ends its workers or jobs."""
    if settings.executor == "slurm":
        # Imported here because datatrove, which it needs, is part of the optional extra `corpora`.
        from data_prep.slurm import Slurm

        return Slurm(settings.cluster, settings.workers, settings.stall_seconds)
    return Local(settings.workers, settings.stall_seconds)
