"""Runs the training processes of a stage on this machine, in parallel if possible, with a live display."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import fairseq_alma
from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.core.fence import fence_of
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.slurm_job import JOB_VARIABLE, this_job
from fairseq_alma.lm.display import StageDisplay
from fairseq_alma.lm.settings import LanguageModelSettings
from launch.local import Job, run_processes, share_of_machine
from launch.warm import warm_start

# Environment variables of a cluster job. The value None removes them for the training processes, for two reasons.
# First, fairseq would try to train on all machines of the job, but a stage uses only this machine. Second, fairseq
# would compute the port on which its processes communicate from the job id, so members that train at the same time
# would use one port.
ON_THIS_MACHINE = dict.fromkeys(
    ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment variable with which `python -m` does not import modules from the current folder.

Without it, if a user starts alma-lm in a folder with another copy of this repository, the training processes would
import the code of that copy."""

STREAM_IS_CHECKED = {"ALMA_STREAM_IS_CHECKED": "1"}
"""Environment variable with which the task alma_lm does not check the bytes of a split (see `CHECKED` there).

MemberTraining has checked them once, for all training processes."""

STOP_SECONDS = 60.0
"""Time in seconds that a training process has after SIGTERM to finish its update and to write a checkpoint."""

TRAIN_MEMBER = "fairseq_alma.lm.train_member"
"""Program that trains one member of a stage."""

IMPORTED = (TRAIN_MEMBER, *fairseq_alma.REGISTERED, "torch._dynamo")
"""Modules that a training process needs. A server process imports them once, and training processes are forks of it.

torch._dynamo is in the list, because torch imports it when the first optimizer is created, and this import takes more
than a second."""


def training_command(config: Path, settings: LanguageModelSettings) -> list[str]:
    """Return the command that trains a member in one stage, whose configuration of fairseq is in the file `config`."""
    command = [sys.executable, "-m", TRAIN_MEMBER, str(config)]
    command += ["--checkpoint-minutes", str(settings.checkpoint_minutes)]
    if fence := fence_of(config):
        command += ["--run-fence", str(fence.place)]
    if settings.average is not None:
        command += ["--average", settings.average]
    if settings.plugin is not None:
        command += ["--plugin", settings.plugin]
    return [*command, "--keep-optimizer"] if settings.keeps_optimizer else command


class LocalProcesses:
    """Runs the processes of a stage on this machine and divides the GPUs or CPU cores among the members.

    Each job is one process (train_member.py) and trains one member.

    Args:
        num_mega_batches: number of mega-batches in the stream, B. It is only shown in the progress display.
        at_once: number of members that train at the same time. By default the number of GPUs, or of cores.
        scalars: if given, this object writes the training and validation perplexities to TensorBoard files.
    """

    num_nodes = 1
    """Number of machines on which each member is trained. Each of them has the same number of devices."""
    stop_seconds = STOP_SECONDS
    """Time in seconds that a training process has to end after SIGTERM."""

    def __init__(self, num_mega_batches: int, at_once: int | None = None, scalars: RunScalars | None = None):
        self._start = warm_start(IMPORTED)
        # Import torch only here, because the import takes seconds and is not needed to report invalid settings.
        import torch

        self._num_mega_batches = num_mega_batches
        self._at_once, self._scalars = at_once, scalars
        self._num_gpus = torch.cuda.device_count()
        self.kind = "cuda" if self._num_gpus else "cpu"
        """Type of the devices that train."""
        self.memory: int | None = None
        """Memory in bytes that a job may use on the smallest GPU; None if the devices are CPUs."""
        if self._num_gpus:
            self.memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(self._num_gpus))
            # If more members than GPUs train at the same time, several of them share a GPU.
            self.memory //= max(1, -(-(at_once or 1) // self._num_gpus))

    def num_devices(self, num_jobs: int) -> int:
        """Return the number of devices for each job of a stage with `num_jobs` jobs. Each job trains one member."""
        (slot, *_) = self._slots(num_jobs)
        return len(slot["CUDA_VISIBLE_DEVICES"].split(",")) if "CUDA_VISIBLE_DEVICES" in slot else self._num_gpus or 1

    def run(
        self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int, updates: int
    ) -> dict[int, int | None]:
        """Run the jobs, in parallel if there are enough devices, wait for all of them, and return their exit statuses.

        Args:
            stage: the stage to which the jobs belong.
            jobs: command and log file of each member that is not finished, by member number.
            num_jobs: number of all members of the stage, by which the devices are divided. So when a stage is resumed,
                the remaining members get as many devices as before, and the results are the same.
            updates: number of updates of each job, for the display.

        Returns:
            Exit status of each job, by member number. It is negative if a signal killed the job, and None if the job
                was not started because another job failed.
        """
        with StageDisplay(stage, dict.fromkeys(jobs, updates), self._num_mega_batches, self._scalars) as display:
            processes = [
                replace(self.member_job(command, log), on_line=display.member(m)) for m, (command, log) in jobs.items()
            ]
            statuses = run_processes(processes, self._slots(num_jobs))
        return dict(zip(jobs, statuses, strict=True))

    def check_free(self, stage: Stage) -> None:
        """Do nothing: no other process has been asked to train members of the stage."""

    def member_job(self, command: list[str], log: Path) -> Job:
        """Return the process that trains a member."""
        return Job(
            command,
            log,
            environment={
                **ON_THIS_MACHINE,
                **SAFE_PATH,
                **STREAM_IS_CHECKED,
                JOB_VARIABLE: this_job(),
            },
            start=self._start,
            grace_seconds=self.stop_seconds,
        )

    def _slots(self, num_jobs: int) -> list[dict[str, str]]:
        """Return the environment variables that assign GPUs or CPU cores to each job that can run at the same time."""
        return share_of_machine(num_jobs, self._num_gpus, self._at_once)
