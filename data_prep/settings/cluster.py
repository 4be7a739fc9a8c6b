"""The settings of Slurm jobs, each declared together with its command-line option."""

from dataclasses import dataclass
from typing import ClassVar

from data_prep.settings.options import with_option
from launch.slurm import SlurmSettings

WHERE_IT_RUNS = "where it runs"
"""Name of the section of --help with the options that say where tasks run."""


@dataclass(frozen=True)
class Cluster(SlurmSettings):
    """What the Slurm jobs that run tasks ask for. The other fields of `SlurmSettings` have no option."""

    prefix: ClassVar[str] = "--slurm-"

    partition: str | None = with_option(
        None, "--slurm-partition", WHERE_IT_RUNS, metavar="NAME",
        help="Slurm partition of the jobs; default: the cluster's default partition",
    )  # fmt: skip
    time: str | int = with_option(
        "04:00:00", "--slurm-time", WHERE_IT_RUNS, metavar="HH:MM:SS",
        help="time limit of a job; default: %(default)s",
    )  # fmt: skip
    memory: str | int | None = with_option(
        "4G", "--slurm-memory", WHERE_IT_RUNS, metavar="SIZE",
        help="memory of a job per core; jobs use one core, except the job that trains the tokenizer; "
        "default: %(default)s",
    )  # fmt: skip
    setup: str = with_option(
        "", "--slurm-setup", WHERE_IT_RUNS, metavar="COMMANDS",
        help="shell commands that each job runs first, for example 'module load python'",
    )  # fmt: skip
    options: str = with_option(
        "", "--slurm-options", WHERE_IT_RUNS, metavar="TEXT",
        help="further options of sbatch for all jobs, written as on its command line: "
        "--slurm-options='--account=my_project --qos=normal' (with the equals sign)",
    )  # fmt: skip
