"""launch=slurm: a run as a chain of Slurm jobs. Each job does what it can, and submits the jobs that come after it.

There are two kinds of jobs. A run job continues the run, like the command alma-lm: it grows the model, evaluates it and
writes the ledger. If a stage trains one member, the run job trains it, and submits a run job for the next stage. If a
stage trains several members, the run job submits an array of member jobs, each of which trains one member, and a run
job that starts when all members are trained.

So a job needs to know only what the run folder says, and not which stages come later. If a job fails, the jobs after it
do not start. If the run is submitted again, it continues.
"""

import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.sweep import is_finished
from fairseq_alma.core.catalogue import settings_that_are
from fairseq_alma.core.errors import RunError, SettingError, StageError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.metrics import mean_and_standard_error, read_summary
from fairseq_alma.core.printing import say
from fairseq_alma.core.protocol import LastGroup, Stage
from fairseq_alma.core.recorded_settings import differing_settings, other_settings_message
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm.batches import usable_devices
from fairseq_alma.lm.jobs import RUN_STEP, JobFolder, JobRecord, in_words, what_they_do
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.slurm_settings import WARNING_SECONDS, SlurmSettings
from fairseq_alma.lm.stage_processes import SAFE_PATH, LocalProcesses
from launch.local import Job, start_process
from launch.slurm import QueuedJob, SlurmError, signal_steps, submit

SEEDS = "seeds.json"
"""File in the folder of a run with several seeds: the seeds of the last command. Jobs of earlier commands read it."""


class HandedOver(Exception):  # noqa: N818 (not an error)
    """Other jobs continue the run. This process has submitted them, or found them in the queue."""


class _StoredChain(TypedDict):
    """The content of chain.json."""

    settings: dict[str, Any]
    slurm: dict[str, Any]
    command: list[str]
    group: tuple[str, list[int]] | None


@dataclass(frozen=True)
class Chain:
    """A run that is carried out by Slurm jobs. The file RUN/launch/chain.json contains it."""

    settings: LanguageModelSettings
    """Settings of the run. It has one seed."""
    slurm: SlurmSettings
    """What each job asks for."""
    command: tuple[str, ...]
    """The command with which the user submitted the run, for provenance.json."""
    group: tuple[str, tuple[int, ...]] | None = None
    """The folder and the seeds of a run with several seeds, of which this run is one."""

    @property
    def jobs(self) -> JobFolder:
        """The records of the jobs."""
        return JobFolder(self.settings.out)

    @classmethod
    def load(cls, run: str | Path) -> "Chain":
        """Return the chain of a run folder."""
        path = JobFolder(run).chain
        stored = read_json(path, _StoredChain)
        try:
            settings = LanguageModelSettings.from_mapping(stored["settings"])
            slurm = SlurmSettings.from_mapping(stored["slurm"])
        except SettingError as error:
            raise RunError(f"{path} is damaged ({error}): give the training command again") from error
        group = (stored["group"][0], tuple(stored["group"][1])) if stored["group"] else None
        return cls(settings, slurm, tuple(stored["command"]), group)

    def store(self) -> None:
        """Write the chain to the run folder."""
        stored = {"settings": self.settings.to_json(), "slurm": asdict(self.slurm)}
        write_json(self.jobs.chain, {**stored, "command": self.command, "group": self.group})

    def submit_run(self, after: Sequence[str] = ()) -> str:
        """Submit a run job, which starts when all jobs in `after` have succeeded. Return its id."""
        options = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
        job = self._submit(RUN_STEP, f"run {shlex.quote(self.settings.out)}", [*options, self._output("run-%j.log")])
        self.jobs.write(JobRecord(job, RUN_STEP, str(self.jobs.folder / f"run-{job}.log")))
        return job

    def submit_members(self, stage_index: int, numbers: Sequence[int]) -> str:
        """Submit an array of member jobs, one for each of the members `numbers` of a stage. Return the array's id."""
        stage = f"stage_{stage_index:03d}"
        options = [f"--array={','.join(map(str, numbers))}", self._output(f"{stage}-member_%a-%A.log")]
        arguments = f'member {shlex.quote(self.settings.out)} {stage_index} "$SLURM_ARRAY_TASK_ID"'
        array = self._submit(members_step(stage_index), arguments, options)
        for number in numbers:
            log = self.jobs.folder / f"{stage}-member_{number}-{array}.log"
            self.jobs.write(JobRecord(f"{array}_{number}", f"stage {stage_index}, member {number}", str(log)))
        return array

    def _output(self, name: str) -> str:
        folder = str(self.jobs.folder.absolute()).replace("%", "%%")
        return f"--output={folder}/{name}"

    def _submit(self, step: str, arguments: str, options: Sequence[str]) -> str:
        program = f"{shlex.quote(sys.executable)} -P -m fairseq_alma.lm.slurm_job"
        setup = ""
        if self.slurm.setup:
            # If the warning of the time limit arrives during the set-up, Slurm starts the job again.
            task = "${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
            requeue = f'scontrol requeue "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}{task}"'
            setup = (
                f"trap '{requeue}; exit 1' USR1\n"
                f"{{\n{self.slurm.setup}\n}} || {{ echo 'alma-lm: launch.setup failed' >&2; exit 2; }}\n"
            )
        script = f"#!/bin/bash\n{setup}exec {program} {arguments}\n"
        name = f"--job-name=alma-{Path(self.settings.out).name}"
        everything = [*self.slurm.options(), name, f"--chdir={Path.cwd()}", *options]
        return submit(script, everything, self.jobs.comment(step))


def members_step(stage_index: int) -> str:
    """Return the name of the step in which the members of a stage are trained."""
    return f"members of stage {stage_index}"


def this_job() -> str:
    """Return the id of the Slurm job in which this process runs, for example "123" or, in an array, "123_2"."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


class SlurmProcesses(LocalProcesses):
    """Trains the members of a stage in Slurm jobs. Implements the protocol `Processes` of member.py.

    Args:
        chain: the run.
        num_mega_batches: number of mega-batches in the stream, B. It is only shown in the progress display.
        scalars: see `LocalProcesses`.
    """

    def __init__(self, chain: Chain, num_mega_batches: int, scalars: RunScalars | None = None):
        super().__init__(num_mega_batches, scalars=scalars)
        self._chain = chain
        self.num_nodes = chain.slurm.nodes
        self.stop_seconds = WARNING_SECONDS - 20.0
        self._has_trained = False

    def num_devices(self, num_jobs: int) -> int:
        """Return the number of devices of each member: all devices of all nodes of a job."""
        return super().num_devices(1) * self.num_nodes

    def run(
        self, stage: Stage, jobs: Mapping[int, tuple[list[str], Path]], num_jobs: int, updates: int
    ) -> dict[int, int | None]:
        """Train the only member of a stage here, or submit jobs that train the members. See member.Processes.run.

        Raises:
            HandedOver: if other jobs train the members and continue the run.
            StageError: if Slurm refuses the jobs.
        """
        if len(jobs) == 1 and not self._has_trained:
            self._has_trained = True
            return super().run(stage, jobs, 1, updates)
        try:
            raise HandedOver(self._hand_over(stage.index, sorted(jobs)))
        except SlurmError as error:
            raise StageError(
                f"the jobs of stage {stage.index} cannot be submitted: {error}. Run the same command again to continue"
            ) from error

    def check_free(self, stage: Stage) -> None:
        """Hand over the run if jobs that train the members of this stage are queued already.

        This is so if this job has submitted them, and was then killed and started again.

        Raises:
            HandedOver: if there are such jobs.
            StageError: if Slurm refuses a job.
        """
        step = members_step(stage.index)
        try:
            if any(job.comment.rpartition("#")[2] == step for job in self._chain.jobs.queued()):
                raise HandedOver(self._hand_over(stage.index, []))
        except SlurmError as error:
            raise StageError(
                f"cannot get the jobs of stage {stage.index} from Slurm, or submit them: {error}"
            ) from error

    def _hand_over(self, stage_index: int, numbers: Sequence[int]) -> str:
        """Submit the jobs that continue the run, unless they are queued already. Return what they are.

        They are queued already if this job did this before, and was then killed and started again.
        """
        chain, me = self._chain, this_job()
        queued = [(job.comment.rpartition("#")[2], job.id) for job in chain.jobs.queued()]
        arrays = {job.partition("_")[0] for step, job in queued if step == members_step(stage_index)}
        if not arrays and len(numbers) > 1:
            arrays = {chain.submit_members(stage_index, numbers)}
        following = [job for step, job in queued if step == RUN_STEP and job != me]
        if not following:
            following = [chain.submit_run([me, *sorted(arrays)])]
        members = f"job {', '.join(sorted(arrays))} trains the members of stage {stage_index}, and " if arrays else ""
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
    """A process srun, which runs a training on several nodes. Arguments: see `launch.local.Start`."""

    def __init__(self, command: Sequence[str], output: int, environment: Mapping[str, str], errors: int | None = None):
        self._srun = start_process(command, output, environment, errors)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all processes of the training have ended. Return the exit status."""
        return self._srun.wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM to the processes of the training. If srun itself got SIGTERM, it would kill them."""
        try:
            signal_steps(os.environ["SLURM_JOB_ID"], signal.SIGTERM)
        except SlurmError:
            self._srun.terminate()

    def kill(self) -> None:
        """Kill srun, and with it the processes of the training."""
        self._srun.kill()


def submit_runs(settings: LanguageModelSettings, slurm: SlurmSettings) -> None:
    """Submit the runs of all seeds to Slurm, and print how to watch them.

    A run that is finished, or that has jobs in the queue, is not submitted again.

    Raises:
        AlmaError: if the stream is missing, if the run folder contains a run with other settings, or is in use.
        StageError: if Slurm refuses a job.
    """
    stream_folder = StreamFolder.open(settings.stream)
    num_mega_batches = len(stream_folder.stream(settings.mega_batches))
    more_will_follow = stream_folder.is_extended or num_mega_batches < stream_folder.num_mega_batches
    last_group = settings.stream_settings(num_mega_batches, more_will_follow).last_group
    _check_devices(settings, slurm)
    seeds = tuple(range(settings.seed, settings.seed + settings.seeds))
    for seed in seeds:
        one, group = settings, None
        if len(seeds) > 1:
            out = str(Path(settings.out) / f"seed_{seed}")
            one = LanguageModelSettings.from_mapping({**settings.to_json(), "seed": seed, "seeds": 1, "out": out})
            group = (settings.out, seeds)
        _submit_one(Chain(one, slurm, tuple(sys.argv), group), num_mega_batches, last_group)
    if len(seeds) > 1:
        write_json(Path(settings.out) / SEEDS, seeds)
        with suppress(RunError):  # a job is writing the summary just now
            summarize_seeds(Path(settings.out), seeds)
    out = shlex.quote(settings.out)
    say(f"alma-lm status {out}    show the ledger and the jobs")
    say(f"alma-lm logs {out}      print and follow the logs")
    say(f"alma-lm cancel {out}    cancel the jobs")


def summarize_seeds(folder: Path, seeds: Sequence[int]) -> None:
    """Write summary.json for a run with several seeds: the means over those that are finished, if there are any.

    Args:
        folder: the run folder, which contains a run folder for each seed.
        seeds: the seeds of the run, if `folder` has no file SEEDS.

    Raises:
        RunError: if another process is using `folder`.
    """
    with Lease(folder):
        if (folder / SEEDS).exists():
            seeds = read_json(folder / SEEDS, list[int])
        finished = [run for run in (folder / f"seed_{seed}" for seed in seeds) if is_finished(run)]
        if finished:
            summaries = [read_summary(run) for run in finished]
            write_json(folder / "summary.json", mean_and_standard_error(summaries))


def _check_devices(settings: LanguageModelSettings, slurm: SlurmSettings) -> None:
    """Raise SettingError if an update cannot be divided among the devices of the jobs, as far as they are known."""
    if slurm.gpus_per_node is None and settings.expert_parallel > 1:
        return  # the nodes may have GPUs that need not be asked for
    gpus = str(slurm.gpus_per_node or 1).rpartition(":")[2]
    if gpus.isdigit():
        usable_devices(settings, int(gpus) * slurm.nodes, slurm.nodes)


def _submit_one(chain: Chain, num_mega_batches: int, last_group: LastGroup) -> None:
    run = Path(chain.settings.out)
    rows = Ledger(run / "ledger.jsonl").rows() if (run / "summary.json").exists() else []
    # There must be a row for each arrival, and one for t = 0. A job that is killed may have written a row, and not yet
    # the summary.
    has_all = len(rows) > num_mega_batches and read_summary(run).get("num_arrivals", 0) >= num_mega_batches
    _check_same_settings(chain.settings, has_all and rows[-1].updated)
    # If the last mega-batches have waited so far, and should be trained on now, there is something to do.
    if has_all and (rows[-1].updated or (last_group == "wait" and not chain.settings.fork)):
        say(f"{run} is finished")
        return
    try:
        if queued := chain.jobs.queued():
            _check_same_chain(chain, queued)
            say(f"{run} has jobs already: {in_words(queued)}; {what_they_do(chain.jobs, queued)}")
            return
        with Lease(run):
            chain.store()
            say(f"{run}: submitted job {chain.submit_run()}")
    except SlurmError as error:
        raise StageError(f"{run} cannot be submitted: {error}") from error


def _check_same_chain(chain: Chain, queued: Sequence[QueuedJob]) -> None:
    """Raise RunError if the jobs of the run were submitted with other settings than those of `chain`."""
    now = {**chain.settings.to_json(), **{f"launch.{name}": value for name, value in asdict(chain.slurm).items()}}
    stored = Chain.load(chain.settings.out)
    before = {**stored.settings.to_json(), **{f"launch.{name}": value for name, value in asdict(stored.slurm).items()}}
    differing = [f"{name}: was {before.get(name)!r}, is {value!r}" for name, value in now.items()
                 if before.get(name) != value]  # fmt: skip
    if differing:
        run = chain.settings.out
        raise RunError(
            f"{run} has jobs already, which were submitted with other settings: {in_words(queued)}\n  "
            + "\n  ".join(differing)
            + f"\nTo use the new settings, first run: alma-lm cancel {shlex.quote(run)}"
        )


def _check_same_settings(settings: LanguageModelSettings, is_finished: bool) -> None:
    """Raise RunError if the run folder contains a run with other settings.

    With fork=true, some settings may differ, unless all stages of the run are trained (`is_finished`).

    The job checks it again, with the values that are known only there: the digests of the stream, and what
    `precision=auto` means.
    """
    free = list(settings_that_are("free", "language model"))
    free += ["precision"] if settings.precision == "auto" else []
    free += ["batch_size"] if settings.batch_size is None else []
    differing = differing_settings(
        Path(settings.out), settings.to_json(), [*free, "evaluated_on", "dictionary", "forks"]
    )  # fmt: skip
    names = [line.partition(":")[0] for line in differing]
    can_fork = all(name in settings_that_are("forkable", "language model") for name in names) and not is_finished
    stages = Path(settings.out) / "stages"
    if differing and any(stages.glob("*/*.done.json")) and not (settings.fork and can_fork):
        k = 1 + len(list(stages.glob("*/train.done.json")))
        raise RunError(other_settings_message(Path(settings.out), differing, k if can_fork else None))
