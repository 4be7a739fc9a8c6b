"""The Slurm jobs of a run: their records in the run folder, and the subcommands status, cancel and logs.

RUN/launch/chain.json       the settings of the run and of its jobs, from which a job continues the run
RUN/launch/job_ID.json      record of one job: what it does, where its log is, how it ended
RUN/launch/*.log            output of the jobs
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from fairseq_alma.app.command import status
from fairseq_alma.app.tables import wide_console
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import holder_of
from fairseq_alma.core.printing import say
from fairseq_alma.core.run_folder import find_runs
from fairseq_alma.core.settings import NonNegative
from launch.slurm import QueuedJob, SlurmError, cancel, queue, signal_script

FOLDER = "launch"
RUN_STEP = "run"
"""Name of the step of a job that continues the run, see slurm_chain.py."""
CANCEL_SECONDS = 150.0
"""Longest time in seconds that `alma-lm cancel` waits for the end of a run. A run that is stopped saves checkpoints."""
POLL_SECONDS = 0.5

JobState = Literal["submitted", "running", "done", "requeued", "stopped", "failed"]
"""State of a job, as the job itself has recorded it. "stopped": cancelled or preempted. A preempted job is started
again by Slurm."""


@dataclass(frozen=True)
class JobRecord:
    """What the run folder says about a Slurm job."""

    id: str
    """Job id, for example "123", or "123_2" for task 2 of an array."""
    step: str
    """What the job does, for example "run" or "stage 2, member 1"."""
    log: str
    """File with the output of the job."""
    state: JobState = "submitted"
    reason: str = ""
    """Why the job is in this state; empty if there is nothing to say."""
    starts_without_progress: NonNegative = 0
    """How many times the job has reached its time limit, one after the other, without finishing or saving anything."""


class JobFolder:
    """The records of the Slurm jobs of a run, in the folder RUN/launch.

    Args:
        run: the run folder.
    """

    def __init__(self, run: str | Path):
        self.run = Path(run)
        self.folder = self.run / FOLDER
        self.chain = self.folder / "chain.json"

    def comment(self, step: str) -> str:
        """Return the comment with which a job is submitted. With this comment, the jobs of a run are found again."""
        return f"{self.run.absolute()}#{step}"

    def queued(self) -> list[QueuedJob]:
        """Return the jobs of this run that are pending or running.

        Raises:
            SlurmError: if Slurm does not answer.
        """
        prefix = str(self.run.absolute())
        return [job for job in queue() if job.comment.rpartition("#")[0] == prefix]

    def write(self, record: JobRecord) -> None:
        """Write the record of a job, and replace an earlier record of this job."""
        write_json(self.folder / f"job_{record.id}.json", asdict(record), durable=False)

    def read(self, job: str) -> JobRecord | None:
        """Return the record of a job; None if there is none."""
        path = self.folder / f"job_{job}.json"
        return read_json(path, JobRecord) if path.exists() else None

    def records(self) -> list[JobRecord]:
        """Return the records of all jobs, oldest job first."""
        found = [read_json(path, JobRecord) for path in self.folder.glob("job_*.json")]
        return sorted(found, key=lambda record: [int(part) for part in record.id.split("_") if part.isdecimal()])


def chains(folder: Path) -> list[JobFolder]:
    """Return the runs in `folder`, at any depth, that have Slurm jobs. `folder` itself may be a run folder."""
    return [JobFolder(path.parent.parent) for path in sorted(folder.rglob(f"{FOLDER}/chain.json"))]


def print_status(folder: Path) -> int:
    """Print the ledger and the jobs of each run in `folder`, and what is left to do. Return the exit status.

    Raises:
        RunError: if there is no run.
    """
    return status(folder, lambda run: print_jobs(JobFolder(run)), [jobs.run for jobs in chains(folder)])


def print_jobs(jobs: JobFolder) -> str:
    """Print the Slurm jobs of a run and their states.

    Return what the jobs that are pending or running will do; "" if there are none.
    """
    if not jobs.chain.exists():
        return ""
    try:
        queued = {job.id: job for job in jobs.queued()}
        unknown = ""
    except SlurmError as error:
        queued, unknown = {}, f"last recorded state; Slurm did not answer: {error}"
    records = {record.id: record for record in jobs.records()}
    for job in queued.values():
        # A job that was submitted by a process that was killed before it wrote the record.
        records.setdefault(job.id, JobRecord(job.id, job.comment.rpartition("#")[2], ""))
    table = Table(title=f"jobs of {jobs.run}", title_justify="left")
    for column in ("job", "step", "state", "reason or nodes", "log"):
        table.add_column(column, overflow="fold")
    for record in records.values():
        table.add_row(record.id, record.step, *_state(record, queued.get(record.id), unknown), record.log)
    if records:
        wide_console().print(table)
    if not queued and any(record.state == "failed" for record in records.values()):
        return "a job has failed: fix the cause that the table shows, then run the training command again"
    return what_they_do(jobs, list(queued.values()))


def what_they_do(jobs: JobFolder, queued: Sequence[QueuedJob]) -> str:
    """Return what the jobs of a run that are pending or running will do; "" if there are none.

    Args:
        jobs: the records of the jobs of the run.
        queued: the jobs that are pending or running.
    """
    if not queued:
        return ""
    again = f"when they end, or after alma-lm cancel {shlex.quote(str(jobs.run))}, run the training command again"
    if not any(job.comment.rpartition("#")[2] == RUN_STEP for job in queued):
        return f"the queued jobs train members, but none continues the run: {again}"
    # A pending run job starts when all members of the last array have been trained.
    members = [record for record in jobs.records() if "_" in record.id]
    if members and all(job.state == "PENDING" for job in queued if job.comment.rpartition("#")[2] == RUN_STEP):
        array = members[-1].id.partition("_")[0]
        ended = {record.id for record in members if record.id.startswith(f"{array}_") and record.state != "done"}
        if ended - {job.id for job in queued}:
            return f"a member has failed or was cancelled, so the queued jobs do not continue the run: {again}"
    return "the queued jobs continue the run"


def refuse_queued(run: str | Path) -> None:
    """Raise RunError if Slurm jobs of a run are pending or running. Without Slurm, there are none."""
    jobs = JobFolder(run)
    try:
        queued = jobs.queued() if jobs.chain.exists() else []
    except SlurmError:
        return
    if queued:
        raise RunError(
            f"{run} has jobs in Slurm: {in_words(queued)}. To continue it here, first run: "
            f"alma-lm cancel {shlex.quote(str(run))}"
        )


def in_words(queued: Sequence[QueuedJob]) -> str:
    """Return the ids and states of jobs, and why a job is pending."""
    return ", ".join(
        f"{job.id} ({job.state.lower()}{f', {job.reason}' if job.state == 'PENDING' else ''})" for job in queued
    )


def _state(record: JobRecord, queued: QueuedJob | None, unknown: str) -> tuple[str, str]:
    """Return the state of a job and the reason, or the nodes of a running job.

    Args:
        record: the record of the job.
        queued: the job in Slurm's queue; None if it is not there.
        unknown: why Slurm cannot be asked; empty if it can.
    """
    if queued is not None:
        return queued.state.lower(), queued.nodes or queued.reason
    if unknown or record.state in ("done", "failed"):
        return record.state, record.reason or unknown
    if record.state == "submitted":
        return "not started", "it was cancelled, a job before it has failed, or launch.setup failed (see its log)"
    if record.state == "stopped":
        return "cancelled", record.reason
    return "lost", "the job ended without recording a result: it was killed or reached its time limit. See its log"


def cancel_runs(folder: Path) -> int:
    """End all runs in `folder` that are pending or running, and wait until they have ended. Return the exit status.

    Pending jobs are cancelled. Running jobs, and processes on this machine, get SIGTERM and save a checkpoint before
    they end.

    Raises:
        RunError: if there is no run, if a run cannot be cancelled from here, or does not end in time.
    """
    runs = runs_in(folder)
    cancelled = [run for run in runs if _cancel(JobFolder(run))]
    say(f"cancelled: {', '.join(map(str, cancelled))}" if cancelled else f"{folder}: no run is pending or running")
    return 0


def _cancel(jobs: JobFolder) -> bool:
    """End the run, and wait until it has ended. Return False if it was neither pending nor running."""
    is_found = False
    asked: set[str] = set()
    end = time.monotonic() + CANCEL_SECONDS
    while (queued := _queued_if_any(jobs)) or holder_of(jobs.run, ask_slurm=True) is not None:
        try:
            # Repeat it, because a job may have submitted the next one just before it was cancelled.
            cancel([job.id for job in queued if job.state == "PENDING"])
            for job in queued:
                if job.state == "RUNNING" and job.id not in asked:
                    # The job saves what it trains, and ends. scancel alone would kill a training on several nodes.
                    signal_script(job.id, signal.SIGTERM)
                    asked.add(job.id)
        except SlurmError as error:
            raise RunError(f"{jobs.run} cannot be cancelled: {error}") from error
        holder = holder_of(jobs.run)
        if not queued and not is_found and holder is not None:
            if holder.state(ask_slurm=False) != "running":
                raise RunError(f"{jobs.run} is in use by {holder}: cancel it there")
            if not holder.works_in(jobs.run):
                raise RunError(
                    f"{jobs.run / 'lease.json'} names {holder}, which does not work there, so it was not stopped. "
                    f"If nothing works there, remove the file"
                )
            with suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGTERM)
        is_found = True
        if time.monotonic() > end:
            with suppress(SlurmError):
                cancel([job.id for job in queued])
            raise RunError(f"{jobs.run} has not ended within {CANCEL_SECONDS:.0f} seconds: run alma-lm cancel again")
        time.sleep(POLL_SECONDS)
    return is_found


def _queued_if_any(jobs: JobFolder) -> list[QueuedJob]:
    """Return the jobs of the run in Slurm's queue. A run without Slurm jobs has none, also if there is no Slurm.

    Raises:
        RunError: if the run has Slurm jobs, and Slurm does not answer.
    """
    if not jobs.chain.exists():
        return []
    try:
        return jobs.queued()
    except SlurmError as error:
        raise RunError(f"cannot get the jobs of {jobs.run} from Slurm: {error}") from error


def follow_logs(folder: Path) -> int:
    """Print the logs of the runs in `folder`, and new lines until no run is pending or running. Return the exit status.

    Raises:
        RunError: if there is no run.
    """
    runs = [JobFolder(run) for run in runs_in(folder)]
    positions: dict[Path, int] = {}
    shown: Path | None = None
    is_last = False
    while True:
        for path in (path for jobs in runs for path in _logs(jobs.run)):
            with open(path, "rb") as log:
                log.seek(positions.get(path, 0))
                # Only whole lines, so that lines of several logs are not mixed.
                text = log.read() if is_last else b"".join(line for line in log if line.endswith(b"\n"))
            positions[path] = positions.get(path, 0) + len(text)
            if text:
                if shown != path:
                    say(f"==> {path} <==")
                    shown = path
                say(text.decode("utf-8", errors="replace").removesuffix("\n"))
        sys.stdout.flush()
        if is_last:
            return 0
        is_last = not any(_queued_if_any(jobs) or holder_of(jobs.run, ask_slurm=True) is not None for jobs in runs)
        time.sleep(0 if is_last else POLL_SECONDS)


def _logs(run: Path) -> Iterator[Path]:
    """Return the logs of the jobs and the logs of all members of a run."""
    yield from sorted((run / FOLDER).glob("*.log"))
    yield from sorted((run / "stages").glob("stage_*/member_*/log.txt"))


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in `folder`, also those of runs whose first job has not started.

    Raises:
        RunError: if there are none.
    """
    found = {*find_runs(folder), *(jobs.run for jobs in chains(folder))}
    if not found:
        raise RunError(
            f"no run at {folder}: there is no settings.json in it or below it. Give a run folder, or a folder that "
            "contains run folders"
        )
    return sorted(found)
