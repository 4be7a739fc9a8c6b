"""Settings of launch=slurm: what the Slurm jobs of a run ask for."""

import re
import shlex
from dataclasses import dataclass

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, Settings

WARNING_SECONDS = 120
"""Time in seconds between the signal that warns a job of its time limit, and the time limit."""


@dataclass(frozen=True)
class SlurmSettings(Settings):
    """What each Slurm job of a run asks for. On the command line, each name begins with `launch.`."""

    partition: str | None = None
    """Partition. By default the default partition of the cluster."""
    account: str | None = None
    """Account."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have."""
    time: str | int = "1-00:00:00"
    """Time limit of a job, in minutes or as days-hours:minutes:seconds. 120 seconds before the limit, a job saves a
    checkpoint and is put back into the queue. So the limit must be much longer than 2 minutes."""
    nodes: Count = 1
    """Number of nodes on which each member is trained."""
    gpus_per_node: str | int | None = None
    """GPUs of each node, for example `8` or `h100:8`. By default no GPUs."""
    cpus_per_task: Count | None = None
    """CPU cores per node (each node runs one task). By default the default of the cluster."""
    mem: str | int | None = None
    """Memory per node, for example `64G`; 0: all memory of the node. By default the default of the cluster."""
    sbatch: str = ""
    """Further options of sbatch, written as on its command line."""
    setup: str = ""
    """Shell commands that each job runs first, for example `module load cuda`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = _seconds(str(self.time))
        if seconds is not None and seconds <= WARNING_SECONDS:
            raise SettingError(
                f"launch.time={self.time} must be more than {WARNING_SECONDS // 60} minutes, because a job stops "
                f"training {WARNING_SECONDS} seconds before its time limit"
            )
        try:
            shlex.split(self.sbatch)
        except ValueError as error:
            raise SettingError(
                f"launch.sbatch={self.sbatch!r} cannot be split into options ({error}): check its quotation marks"
            ) from error

    def options(self) -> list[str]:
        """Return the options of sbatch for a job."""
        given = {
            "partition": self.partition, "account": self.account, "qos": self.qos, "constraint": self.constraint,
            "time": self.time, "nodes": self.nodes, "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_task, "mem": self.mem,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        options += ["--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--signal=B:USR1@{WARNING_SECONDS}"]
        return [*options, *shlex.split(self.sbatch)]


def _seconds(time: str) -> int | None:
    """Return a time limit of Slurm in seconds; None if it is not a number of minutes, hours or days."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    # The formats are days-hours[:minutes[:seconds]], hours:minutes:seconds, minutes:seconds and minutes.
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))
