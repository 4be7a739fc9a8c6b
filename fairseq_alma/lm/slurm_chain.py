"""launch=slurm for language models: a run as a chain of Slurm jobs.

There are two kinds of jobs. A run job continues the run, like the command alma-lm: it grows the model, evaluates it and
writes the ledger. If a stage trains one member, the run job trains it, and submits a run job for the next stage. If a
stage trains several members, the run job submits an array of member jobs, each of which trains one member, and a run
job that starts when all members are trained.

So a job needs to know only what the run folder says, and not which stages come later. If a job fails, the jobs after it
do not start. If the run is submitted again, it continues.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.slurm_jobs import RUN_STEP, HandedOver, RunJobs, submit_run
from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.core.errors import RunError, StageError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease, holder_of
from fairseq_alma.core.metrics import write_mean
from fairseq_alma.core.printing import say
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.seed_record import is_finished, refuse_other_settings
from fairseq_alma.core.slurm_job import this_job
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.batches import usable_devices
from fairseq_alma.lm.failures import failure_message
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.stage_processes import SAFE_PATH, LocalProcesses, training_command
from launch.local import Job, run_processes, start_process
from launch.slurm import WARNING_SECONDS, SlurmError, SlurmSettings, cancel

MODULE = "fairseq_alma.lm.run"
SEEDS = "seeds.json"
"""File in the folder of a run with several seeds: the seeds of the last command. Jobs of earlier commands read it."""


class SlurmProcesses(LocalProcesses):
    """Trains the members of a stage in Slurm jobs, which ask for `slurm`."""

    def __init__(self, run: str, slurm: SlurmSettings, num_mega_batches: int, scalars: RunScalars | None = None):
        super().__init__(num_mega_batches, scalars=scalars)
        self._jobs, self._slurm = RunJobs(run), slurm
        self.num_nodes = slurm.nodes
        self.stop_seconds = WARNING_SECONDS - 20.0
        self._has_trained = False

    def num_devices(self, num_jobs: int) -> int:
        """Return the number of devices of each member: all devices of all nodes of a job."""
        return super().num_devices(1) * self.num_nodes

    def run(
        self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int, updates: int
    ) -> dict[int, int | None]:
        """Train the only member of a stage here, or submit jobs that train the members. See LocalProcesses.run.

        Raises:
            HandedOver: if other jobs train the members and continue the run.
            StageError: if Slurm refuses the jobs.
        """
        if len(jobs) == 1 and not self._has_trained:
            self._has_trained = True
            return super().run(stage, jobs, 1, updates)
        raise HandedOver(self._submit_next_jobs(stage.index, sorted(jobs)))

    def check_free(self, stage: Stage) -> None:
        """Hand over the run if jobs that train the members of this stage are queued already.

        This is so if this job has submitted them, and was then killed and started again. For the errors, see `run`.
        """
        if text := self._submit_next_jobs(stage.index, None):
            raise HandedOver(text)

    def _submit_next_jobs(self, index: int, numbers: Sequence[int] | None) -> str:
        """Submit the jobs that continue the run, unless they are queued already. Return what they do.

        They are queued already if this job did this before, and was then killed and started again. If `numbers`, the
        members to train, is None, hand over only if jobs that train members are queued, and otherwise return "".
        """
        step, me = f"stage {index}", str(this_job())
        try:
            arrays = {job.id.partition("_")[0] for job in self._jobs.queued(step)}
            if numbers is None and not arrays:
                return ""
            if not arrays and numbers is not None and len(numbers) > 1:
                arrays = {self._jobs.submit(MODULE, sys.argv[1:], self._slurm, step, members=numbers)}
            following = [job.id for job in self._jobs.queued(RUN_STEP) if job.id != me]
            if not following:
                following = [self._jobs.submit(MODULE, sys.argv[1:], self._slurm, after=[me, *sorted(arrays)])]
        except SlurmError as error:
            raise StageError(
                f"the jobs of stage {index} cannot be submitted: {error}. Run the same command again to continue"
            ) from error
        members = f"job {', '.join(sorted(arrays))} trains the members of stage {index}, and " if arrays else ""
        return f"{members}job {', '.join(following)} continues the run"

    def member_job(self, command: list[str], log: Path) -> Job:
        """Return the process that trains a member on all nodes of this job."""
        if self.num_nodes == 1:
            return super().member_job(command, log)
        with socket.socket() as one:
            one.bind(("", 0))
            port = one.getsockname()[1]
        # This process runs on the first node of the job.
        address = f"{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}:{port}"
        nodes = str(self.num_nodes)
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # srun does not inherit it from sbatch
            srun.append(f"--cpus-per-task={cores}")
        job = super().member_job([*srun, *command, "--address", address], log)
        return replace(job, environment=SAFE_PATH, start=_Step)


class _Step:
    """A process srun, which runs a training on several nodes. Arguments: see `launch.local.start_process`."""

    def __init__(self, command: Sequence[str], output: int, environment: Mapping[str, str], errors: int):
        self._srun = start_process(command, output, environment, errors)
        self.wait, self.kill = self._srun.wait, self._srun.kill

    def terminate(self) -> None:
        """Send SIGTERM to the processes of the training. If srun itself got SIGTERM, it would kill them."""
        try:
            # Not SLURM_JOB_ID: for the last task of an array, this is the id of the whole array.
            cancel([str(this_job())], signal.SIGTERM)
        except SlurmError:
            self._srun.terminate()


def submit_runs(settings: LanguageModelSettings, slurm: SlurmSettings) -> None:
    """Submit the runs of all seeds to Slurm, and print how to watch them.

    A run that is finished, or that has jobs in the queue, is not submitted again.

    Raises:
        AlmaError: if the stream is missing, if the run folder contains a run with other settings, or is in use.
        StageError: if Slurm refuses a job.
    """
    num_arrivals = len(StreamFolder.open(settings.stream).stream(settings.mega_batches))
    # The nodes may have GPUs that need not be asked for.
    gpus = str(slurm.gpus or 1).rpartition(":")[2]
    if gpus.isdigit() and (slurm.gpus is not None or settings.expert_parallel == 1):
        usable_devices(settings, int(gpus) * slurm.nodes, slurm.nodes)
    if settings.seeds == 1:
        _check_same_settings(settings, num_arrivals)
        submit_run(Path(settings.out), MODULE, sys.argv[1:], slurm, num_arrivals)
    else:
        seeds = range(settings.seed, settings.seed + settings.seeds)
        own = ("out", "seed", "seeds")
        words = [word for word in sys.argv[1:] if word.partition("=")[0] not in own]
        for seed in seeds:
            out = RunFolder(Path(settings.out)).of_seed(seed).path
            one = {**settings.to_json(), "out": str(out), "seed": seed, "seeds": 1}
            _check_same_settings(LanguageModelSettings.from_mapping(one), num_arrivals)
            submit_run(out, MODULE, [*words, f"out={out}", f"seed={seed}", "seeds=1"], slurm, num_arrivals)
        write_json(Path(settings.out) / SEEDS, [*seeds])
        with suppress(RunError):  # a job is writing the summary just now
            summarize_seeds(Path(settings.out))


def summarize_seeds(folder: Path, patience_seconds: float = 0.0) -> None:
    """Write summary.json for a run with several seeds: the means over those that are finished, if there are any.

    Nothing is done for another folder. Raise RunError if another process is using `folder` for more than
    `patience_seconds`.
    """
    if (folder / SEEDS).exists():
        end = time.monotonic() + patience_seconds
        while time.monotonic() < end and holder_of(folder) is not None:
            time.sleep(0.1)
        with Lease(folder):
            runs = [RunFolder(folder).of_seed(seed).path for seed in read_json(folder / SEEDS, list[int])]
            if finished := [run for run in runs if is_finished(run)]:
                write_mean(folder, finished)


def _check_same_settings(settings: LanguageModelSettings, num_arrivals: int) -> None:
    """Raise RunError if the run folder contains a run with other settings, unless it can be forked and fork=true."""
    now = settings.recorded()
    for name, default in (("precision", "auto"), ("batch_size", None)):
        if now[name] == default:
            del now[name]  # what it means is known only in the job
    free, forkable = (settings_that_are(kind, "language model") for kind in ("free", "forkable"))
    refuse_other_settings(RunFolder(Path(settings.out)), now, free, forkable, settings.fork, num_arrivals)


def run_member_job(settings: LanguageModelSettings, slurm: SlurmSettings, index: int, number: int) -> None:
    """Train a member of a stage in a member job. The run job has written its configuration.

    Args:
        settings: settings of the run.
        slurm: what the job has asked for.
        index: index of the stage.
        number: number of the member.

    Raises:
        StageError: if the training fails.
        RunError: if another process is training the member.
    """
    from fairseq_alma.checkpoints import repair_stage_folder
    from fairseq_alma.lm.member import DONE, is_trained
    from fairseq_alma.lm.member_config import CONFIG, read_config

    folder = RunFolder(Path(settings.out)).member(index, number)
    config = read_config(folder)
    # Before the repair, wait until a process that was training the member counts as ended.
    Lease(folder).wait()
    if not (folder / DONE).exists():
        repair_stage_folder(folder, needs_best=settings.average is None)
    # fairseq would do one more update with a training that has ended.
    if (folder / DONE).exists() or is_trained(folder, config.optimization.max_update):
        say("the member was trained already")
        return
    log = folder / "log.txt"
    log_size = log.stat().st_size if log.exists() else 0
    say(f"training, with the log {log}")
    job = SlurmProcesses(settings.out, slurm, 0).member_job(training_command(folder / CONFIG, settings), log)
    (status,) = run_processes([job])
    assert status is not None
    if status != 0:
        raise StageError(failure_message(log, log_size, status, settings.lr, config.dataset.batch_size, 1))
