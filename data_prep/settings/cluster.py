"""The settings of Slurm jobs, each declared together with its command-line option."""

import shlex
from dataclasses import dataclass

from data_prep.settings.options import setting

WHERE_IT_RUNS = "where it runs"
"""Name of the section of --help with the options that say where tasks run."""


@dataclass(frozen=True)
class Cluster:
    """Settings of the Slurm jobs that run tasks."""

    partition: str | None = setting(
        None, "--slurm-partition", WHERE_IT_RUNS, metavar="NAME",
        help="Slurm partition of the jobs; default: the cluster's default partition",
    )  # fmt: skip
    time: str = setting(
        "04:00:00", "--slurm-time", WHERE_IT_RUNS, metavar="HH:MM:SS",
        help="time limit of a job; default: %(default)s",
    )  # fmt: skip
    memory_gb: int = setting(
        4, "--slurm-memory-gb", WHERE_IT_RUNS, metavar="N",
        help="memory of a job in GB per core; jobs use one core, except the job that trains the tokenizer; "
        "default: %(default)s",
    )  # fmt: skip
    options: str = setting(
        "", "--slurm-options", WHERE_IT_RUNS, metavar="TEXT",
        help="further options of sbatch for all jobs, written as on its command line: "
        "--slurm-options='--account=my_project --qos=normal' (with the equals sign)",
    )  # fmt: skip

    def __post_init__(self):
        try:
            shlex.split(self.options)
        except ValueError as error:
            raise ValueError(
                f"--slurm-options {self.options!r} cannot be split into options ({error}): check its quotation marks"
            ) from error
