"""The Slurm jobs of runs (launch=slurm).

A job of a run is the command itself, with the environment variable ALMA_JOB, which says what the job does: "run"
continues the run, and "stage K" trains a member of stage K (see fairseq_alma/lm/slurm_chain.py).

RUN/launch/command.json     the arguments with which the run was submitted, to compare them with those of later commands
RUN/launch/job_ID.json      record of one job: what it does, where its log is, how it ended
RUN/launch/*.log            output of the jobs

Any Slurm job that runs alma-lm or alma-vision is put back into the queue when it is warned of its time limit by SIGUSR1
(sbatch --signal=B:USR1@120), unless it got nowhere. A job that fails is not, because it would fail again.
"""

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.errors import RunError, StageError, message_of
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.printing import say
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.seed_record import is_finished
from fairseq_alma.core.slurm_job import this_job
from launch.slurm import (
    WARNING_SECONDS,
    QueuedJob,
    SlurmError,
    SlurmSettings,
    is_preempted,
    queue,
    requeue,
    submit,
)

FOLDER = "launch"
JOB = "ALMA_JOB"
"""Environment variable of a submitted job: what it does."""
RUN_STEP = "run"
"""What a job does that continues the run."""
_STARTED = time.time()


class HandedOver(Exception):  # noqa: N818 (not an error)
    """Other jobs continue the run. This process has submitted them, or found them in the queue."""


@dataclass(frozen=True)
class JobRecord:
    """What the run folder says about a Slurm job."""

    id: str
    """Job id, for example "123", or "123_2" for task 2 of an array."""
    step: str
    """What the job does, for example "run" or "stage 2, member 1"."""
    log: str
    """File with the output of the job."""
    state: Literal["submitted", "running", "done", "requeued", "stopped", "failed"] = "submitted"
    """As the job itself has recorded it. "stopped": cancelled or preempted. A preempted job is started again."""
    reason: str = ""
    """Why the job is in this state; empty if there is nothing to say."""


class RunJobs:
    """The Slurm jobs of a run, and their records in the folder RUN/launch."""

    def __init__(self, run: str | Path):
        self.run = Path(run)
        self.folder = self.run / FOLDER
        self.command = self.folder / "command.json"

    def submit(
        self, module: str, words: Sequence[str], slurm: SlurmSettings, step: str = RUN_STEP,
        after: Sequence[str] = (), members: Sequence[int] = (),
    ) -> str:  # fmt: skip
        """Submit a job, or an array with a job for each member. Return its id.

        Args:
            module: the module of the command, for example "vision.cli".
            words: the arguments of the command.
            slurm: what each job asks for.
            step: what the job does.
            after: ids of jobs. The job starts when all of them have succeeded.
            members: numbers of the jobs of an array.

        Raises:
            SlurmError: if Slurm refuses the job.
        """
        write_json(self.command, words)
        name = step.replace(" ", "_") + ("-member_%a-%A.log" if members else "-%j.log")
        options = [
            f"--job-name=alma-{self.run.name}",
            f"--chdir={Path.cwd()}",
            f"--signal=B:USR1@{WARNING_SECONDS}",
            f"--output={str(self.folder.absolute()).replace('%', '%%')}/{name}",
        ]
        options += [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
        options += [f"--array={','.join(map(str, members))}"] if members else []
        program = ["env", f"{JOB}={step}", sys.executable, "-P", "-m", module, *words]
        job = submit(program, slurm, options, f"{self.run.resolve()}#{step}")
        for suffix in [f"_{number}" for number in members] or [""]:
            log = name.replace("%a", suffix[1:]).replace("%A", job).replace("%j", job)
            what = f"{step}, member {suffix[1:]}" if members else step
            self.write(JobRecord(f"{job}{suffix}", what, str(self.folder / log)))
        return job

    def queued(self, step: str | None = None) -> list[QueuedJob]:
        """Return the jobs of this run that are pending or running, all or those of a step.

        Raise SlurmError if Slurm does not answer.
        """
        # The nodes may know the folder by another path than this machine.
        names = {str(self.run.resolve()), str(self.run.absolute())}
        found = [job for job in queue() if job.comment.rpartition("#")[0] in names]
        return [job for job in found if step is None or job.comment.rpartition("#")[2] == step]

    def queued_if_any(self) -> list[QueuedJob]:
        """Like `queued`, but a run without Slurm jobs has none, also if there is no Slurm. The error is a RunError."""
        try:
            return self.queued() if self.command.exists() else []
        except SlurmError as error:
            raise RunError(f"cannot get the jobs of {self.run} from Slurm: {error}") from error

    def write(self, record: JobRecord) -> None:
        """Write the record of a job, and replace an earlier record of this job."""
        write_json(self._record_file(record.id), asdict(record), durable=False)

    def record(self, job: str) -> JobRecord | None:
        """Return the record of a job; None if there is none, or if a power failure has damaged it."""
        try:
            return read_json(self._record_file(job), JobRecord)
        except (FileNotFoundError, RunError):
            return None

    def _record_file(self, job: str) -> Path:
        return self.folder / f"job_{job}.json"

    def records(self) -> list[JobRecord]:
        """Return the records of all jobs, oldest job first."""
        found = [read_json(path, JobRecord) for path in self.folder.glob("job_*.json")]
        return sorted(found, key=lambda record: [int(part) for part in record.id.split("_") if part.isdecimal()])

    def what_they_do(self, queued: Sequence[QueuedJob]) -> str:
        """Return what jobs that are pending or running will do; "" if there are none."""
        if not queued:
            return ""
        again = f"when they end, or after {_subcommand('cancel', self.run)}, run the training command again"
        # If a member has failed, Slurm cancels the job that would have continued the run.
        if not any(job.comment.rpartition("#")[2] == RUN_STEP for job in queued):
            return f"the queued jobs train members, but none continues the run: {again}"
        return "the queued jobs continue the run"


def submit_run(
    run: Path,
    module: str,
    words: Sequence[str],
    slurm: SlurmSettings,
    num_arrivals: int,
    folders: Sequence[Path] = (),
) -> None:
    """Submit the first job of a run, unless the run is finished or has jobs in the queue. Print what was done.

    Args:
        run: the run folder.
        module, words, slurm: see `RunJobs.submit`.
        num_arrivals: number of mega-batches of a finished run.
        folders: the run folder of each seed, if one job trains several seeds. By default, it is `run`.

    Raises:
        RunError: if the run has jobs that were submitted by another command, or is in use.
        StageError: if Slurm refuses the job.
    """
    jobs = RunJobs(run)
    before = read_json(jobs.command, list[str]) if jobs.command.exists() else []
    differing = _differing(before, words)
    runs = folders or [run]
    if (
        all(word.startswith("launch") for word in differing)
        and RunFolder(run).summary.exists()
        and all(map(is_finished, runs))
        and num_arrivals == len(read_arrivals(runs[0])["digests"])
    ):
        say(f"{run} is finished")
        return
    try:
        if not (queued := jobs.queued()):
            with Lease(run):
                # Another command may have submitted the run, while this one waited for the lease.
                if not (queued := jobs.queued()):
                    job = jobs.submit(module, words, slurm)
                    say(f"{run}: submitted job {job}, which {_subcommand('status', run)} shows")
                    return
            before = read_json(jobs.command, list[str])
            differing = _differing(before, words)
        if differing:
            raise RunError(
                f"{run} has jobs already, which were submitted with other settings: {in_words(queued)}\n"
                f"Their settings: {shlex.join(before)}\nDifferences: {shlex.join(differing)}\n"
                f"To use the new settings, first run: {_subcommand('cancel', run)}"
            )
        say(f"{run} has jobs already: {in_words(queued)}; {jobs.what_they_do(queued)}")
    except SlurmError as error:
        raise StageError(f"{run} cannot be submitted: {error}") from error


def _differing(before: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the arguments that only one of two commands for a run has. Both name its folder, perhaps differently."""
    return sorted(word for word in {*before} ^ {*words} if not word.startswith("out="))


def refuse_queued(run: str | Path) -> None:
    """Raise RunError if other Slurm jobs of a run are pending or running. Without Slurm, there are none."""
    jobs = RunJobs(run)
    try:
        queued = [job for job in jobs.queued() if job.id != this_job()] if jobs.command.exists() else []
    except SlurmError:
        return
    if queued:
        raise RunError(
            f"{run} has jobs in Slurm: {in_words(queued)}. To continue it here, first run: {_subcommand('cancel', run)}"
        )


def _subcommand(name: str, run: str | Path) -> str:
    """Return a subcommand of this command for a run, as it is typed."""
    return f"{Path(sys.argv[0]).name} {name} {shlex.quote(str(run))}"


def in_words(queued: Sequence[QueuedJob]) -> str:
    """Return the ids and states of jobs, and why a job is pending."""
    return ", ".join(
        f"{job.id} ({job.state.lower()}{f', {job.reason}' if job.state == 'PENDING' else ''})" for job in queued
    )


@contextmanager
def in_job(run: Path, signals: Sequence[int]) -> Iterator[None]:
    """Context manager for the work of a command in a Slurm job. Outside Slurm, it does nothing.

    If the job is stopped at its time limit or preempted, it is put back into the queue. The record of a job that
    `RunJobs` has submitted says how the work ended. `HandedOver` ends the `with` statement.

    Args:
        run: the run folder, or the folder of a sweep.
        signals: the signals that this process has received so far. See `stopped_by_signals`.
    """
    job = this_job()
    if job is None:
        yield
        return
    jobs = RunJobs(run)
    step = os.environ.get(JOB)
    number = os.environ.get("SLURM_ARRAY_TASK_ID")
    record = jobs.record(job) or JobRecord(job, f"{step}, member {number}" if number else step or "", "")

    def end(state: Literal["running", "done", "requeued", "stopped", "failed"], reason: str) -> None:
        if step:
            jobs.write(replace(record, state=state, reason=reason))
        # The command itself prints what has failed.
        if state == "requeued" or (step and state != "failed"):
            say(f"job {job}: {state}{reason and f': {reason}'}")

    end("running", f"on {socket.gethostname()}, restarts: {os.environ.get('SLURM_RESTART_COUNT', '0')}")
    try:
        yield
        end("done", "")
    except HandedOver as handed_over:
        end("done", str(handed_over))
    except KeyboardInterrupt:
        if not _was_interrupted_by_slurm(job, signals):
            # If the job was preempted without a grace time, Slurm itself puts it back into the queue.
            name = signal.Signals(signals[0]).name if signals else "another process, which has taken over the run"
            end("stopped", f"by {name}; it can be continued")
            raise
        if signal.SIGUSR1 in signals and not _has_progress(run):
            reason = (
                "the job was stopped at its time limit without a new checkpoint or a finished step: give it more time, "
                "and run the same command again to continue"
            )
            end("failed", reason)
            sys.exit(reason)
        end("requeued", "the job reached its time limit" if signal.SIGUSR1 in signals else "it was preempted")
        try:
            # Not SLURM_JOB_ID: for the last task of an array, this is the id of the whole array.
            requeue(job)
        except SlurmError as error:
            reason = f"the job has reached its time limit, and cannot be put back into the queue: {error}"
            end("failed", reason)
            sys.exit(reason)
        raise
    except Exception as error:
        end("failed", message_of(error) or type(error).__name__)
        raise


def _was_interrupted_by_slurm(job: str, signals: Sequence[int]) -> bool:
    """Return True if the job has been warned of its time limit, or is preempted and runs for a grace time.

    If a preempted job ended in this time without being put back into the queue, Slurm would count it as failed.
    """
    try:
        return signal.SIGUSR1 in signals or (signal.SIGTERM in signals and is_preempted(job))
    except SlurmError:
        return False


def _has_progress(folder: Path) -> bool:
    """Return True if a checkpoint was written or a step was finished in a folder since this process was started."""
    for pattern in ("*.done.json", "checkpoint_last.pt", "ledger.jsonl"):
        for path in folder.rglob(pattern):
            with suppress(FileNotFoundError):
                # The clock of the file system may differ a little.
                if path.stat().st_mtime >= _STARTED - 60:
                    return True
    return False
