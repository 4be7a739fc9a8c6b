"""Where the processes of a stage run: on this machine, side by side, with a live display."""

from collections.abc import Mapping
from pathlib import Path

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.core.protocol import Stage
from fairseq_alma.lm.display import StageDisplay
from launch.local import Job, run_processes, share_of_machine

# A stage runs on this machine alone, also inside a larger job: fairseq would take these for a job of many machines, or
# (the job id, the seed of the port on which ranks meet) give members side by side the same port.
ON_THIS_MACHINE = dict.fromkeys(
    ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


class LocalProcesses:
    """Shares the GPUs of this machine, or its cores, among the members of a stage (member.Processes).

    Args:
        num_mega_batches: B, for the display.
        at_once: members side by side; by default as many as there are GPUs, or cores.
        scalars: takes what the logs of a stage say.
    """

    def __init__(self, num_mega_batches: int, at_once: int | None = None, scalars: RunScalars | None = None):
        import torch

        self._num_mega_batches = num_mega_batches
        self._at_once, self._scalars = at_once, scalars
        self._num_gpus = torch.cuda.device_count()
        self.kind = "cuda" if self._num_gpus else "cpu"

    def num_devices(self, num_jobs: int) -> int:
        (slot, *_) = self._slots(num_jobs)
        return len(slot["CUDA_VISIBLE_DEVICES"].split(",")) if "CUDA_VISIBLE_DEVICES" in slot else self._num_gpus or 1

    def run(self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int) -> dict[int, int | None]:
        updates = {number: int(command[command.index("--max-update") + 1]) for number, (command, _) in jobs.items()}
        with StageDisplay(stage, updates, self._num_mega_batches, scalars=self._scalars) as display:
            processes = [Job(command, log, display.member(m), ON_THIS_MACHINE) for m, (command, log) in jobs.items()]
            statuses = run_processes(processes, self._slots(num_jobs))
        return dict(zip(jobs, statuses, strict=True))

    def _slots(self, num_jobs: int) -> list[dict[str, str]]:
        return share_of_machine(num_jobs, self._num_gpus, self._at_once)
