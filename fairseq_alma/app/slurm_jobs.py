"""The Slurm jobs of runs (launch=slurm), and the subcommands status, cancel and logs.

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
from json import dumps
from math import exp
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from rich.table import Table

from fairseq_alma.app.tables import deployed_message, ledger_table, title_of, waiting_message, wide_console
from fairseq_alma.core.arrivals import Arrivals, read_arrivals
from fairseq_alma.core.deployments import stage_in_use
from fairseq_alma.core.errors import RunError, StageError, message_of
from fairseq_alma.core.files import read_json, write_json
from fairseq_alma.core.lease import Lease, holder_of, holder_of_run
from fairseq_alma.core.ledger import deployed_stage
from fairseq_alma.core.metrics import checked_rows, excess_losses, unusual_arrivals
from fairseq_alma.core.printing import say
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, find_runs
from fairseq_alma.core.seed_record import is_finished
from launch.slurm import (
    WARNING_SECONDS,
    QueuedJob,
    SlurmError,
    SlurmSettings,
    cancel,
    is_preempted,
    queue,
    requeue,
    submit,
    this_job,
)

FOLDER = "launch"
JOB = "ALMA_JOB"
"""Environment variable of a submitted job: what it does."""
RUN_STEP = "run"
"""What a job does that continues the run."""
CANCEL_SECONDS = 150.0
"""Longest time in seconds that `cancel_runs` waits for the end of a run. A run that is stopped saves checkpoints."""
POLL_SECONDS = 0.5
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
        job = submit(program, slurm, options, f"{self.run.absolute()}#{step}")
        for suffix in [f"_{number}" for number in members] or [""]:
            log = name.replace("%a", suffix[1:]).replace("%A", job).replace("%j", job)
            what = f"{step}, member {suffix[1:]}" if members else step
            self.write(JobRecord(f"{job}{suffix}", what, str(self.folder / log)))
        return job

    def queued(self, step: str | None = None) -> list[QueuedJob]:
        """Return the jobs of this run that are pending or running, all or those of a step.

        Raise SlurmError if Slurm does not answer.
        """
        found = [job for job in queue() if job.comment.rpartition("#")[0] == str(self.run.absolute())]
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
    differing = sorted({*before} ^ {*words})
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
        if queued := jobs.queued():
            if differing:
                raise RunError(
                    f"{run} has jobs already, which were submitted with other settings: {in_words(queued)}\n"
                    f"Their settings: {shlex.join(before)}\nDifferences: {shlex.join(differing)}\n"
                    f"To use the new settings, first run: {_subcommand('cancel', run)}"
                )
            say(f"{run} has jobs already: {in_words(queued)}; {jobs.what_they_do(queued)}")
            return
        with Lease(run):
            job = jobs.submit(module, words, slurm)
        say(f"{run}: submitted job {job}, which {_subcommand('status', run)} shows")
    except SlurmError as error:
        raise StageError(f"{run} cannot be submitted: {error}") from error


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


def status(folder: Path, json: bool = False) -> int:
    """Print the ledger and the jobs of each run in `folder`, and what is left to do. Return the exit status.

    With `json`, print one JSON object for each run instead (see `state_of`). Raise RunError if there is no run.
    """
    if json:
        for run in runs_in(folder):
            if (run / "settings.json").exists():
                say(dumps(state_of(run)))
        return 0
    console = wide_console()
    done_by_jobs: dict[Path, str] = {}
    for run in runs_in(folder):
        # One job may train several seeds. It belongs to the folder that contains theirs.
        what_jobs_do = print_jobs(RunJobs(run)) or done_by_jobs.get(run.parent, "")
        done_by_jobs[run] = what_jobs_do
        holder = holder_of_run(run, ask_slurm=True)
        if missing := [name for name in ("settings.json", "arrivals.json") if not (run / name).exists()]:
            if (run / "ledger.jsonl").exists():
                console.print(f"{run} has a ledger, but no {missing[0]}: restore the file from a backup")
                continue
            if RunFolder(run).of_seeds():
                continue  # the jobs of a run whose seeds have folders of their own
            left = "the run has not started yet"
        else:
            settings, digests = read_settings(run, ("learner", "wait")), read_arrivals(run)["digests"]
            rows = checked_rows(run, settings.get("cer_from", 1))
            title = title_of(run, settings)
            console.print(ledger_table(rows, title, 20))
            num_left = len(digests) - max(0, len(rows) - 1)
            left = f"{num_left} of {len(digests)} mega-batches are left" if num_left > 0 else ""
            trained = max(RunFolder(run).stages_with_predictor(), default=0)
            if left and trained > (rows[-1].stage if rows else 0):
                left += f", and stage {trained} is trained, but not scored"
        if not missing and (message := deployed_message(run, rows)):
            console.print(message)
        if not left:
            waiting = waiting_message(rows, settings["wait"], settings.get("known_mega_batches", 0))
            console.print(f"finished; {waiting}" if waiting else "finished")
        elif holder is not None:
            console.print(f"{left}; {holder} is working on the run")
        elif what_jobs_do:
            console.print(f"{left}; {what_jobs_do}")
        else:
            console.print(f"{left}: run the training command again to continue")
    return 0


def state_of(run: Path) -> dict[str, Any]:
    """Return the state of a run for monitors. What is not known, or does not apply, is missing.

    run                    the run folder
    state                  "running", "unfinished" (nothing works on it now) or "finished"
    arrivals, arrivals_left, stage
    validation_perplexity, test_perplexity      of the last stage; for images validation_error_rate, test_error_rate
    predictor              the stage whose predictor is in predictor.json; 0 if there is none
    deployed               the stage whose predictor alma-deploy has deployed; without alma-deploy, `predictor`
    refused                with gate=: whether the predictor of the last stage was refused
    new_text_perplexity    of a mega-batch, by the model from before it trained on it
    new_text_arrival       which one: the last that was scored, also if its stage is not finished
    unusual                arrivals whose mega-batches were far harder or easier than earlier ones
    skipped                arrivals on which no stage trains
    rollbacks              how often the run was taken back, not counting alma-forget

    All else is about the last finished arrival, also while the stage of the next one is trained.

    Raise RunError if a file of the run is damaged.
    """
    digests = read_arrivals(run)["digests"] if RunFolder(run).arrivals.exists() else []
    rows = checked_rows(run, read_settings(run).get("cer_from", 1))
    left = len(digests) - max(0, len(rows) - 1)
    is_running = holder_of_run(run, ask_slurm=True) is not None
    state: dict[str, Any] = {"run": str(run), "state": "running" if is_running else "unfinished" if left or not rows
                             else "finished", "arrivals": max(0, len(rows) - 1), "arrivals_left": left}  # fmt: skip
    if not rows:
        return state
    last, gate = rows[-1], rows[-1].scores.gate
    is_text = last.scores.perplexity is not None
    begun = Arrivals(run, durable=False).decision(len(rows))
    new_text, t = (begun.prequential, len(rows)) if begun else (last.prequential, last.t)
    known = {
        "validation_perplexity": last.scores.validation_perplexity,
        "test_perplexity": last.scores.perplexity,
        "validation_error_rate": last.scores.validation_error_rate,
        "test_error_rate": last.scores.error_rate,
        "predictor": deployed_stage(rows) if is_text else None,
        "deployed": stage_in_use(run, rows) if is_text else None,
        "refused": gate and not gate["passed"],
        "new_text_perplexity": exp(new_text.loss) if is_text and new_text else None,
        "new_text_arrival": t if is_text and new_text else None,
        "unusual": unusual_arrivals(excess_losses(rows)) if is_text else None,
        "skipped": [row.t for row in rows if row.is_skipped] if is_text else None,
        "rollbacks": _num_rollbacks(run) if is_text else None,
    }
    return {**state, "stage": last.stage, **{name: value for name, value in known.items() if value is not None}}


class _Rollback(TypedDict):
    """What rollback.json says about the cause."""

    to_forget: NotRequired[bool]


def _num_rollbacks(run: Path) -> int:
    found = RunFolder(run).set_aside(0).parent.glob("*/rollback.json")
    return sum(not read_json(path, _Rollback).get("to_forget") for path in found)


def print_jobs(jobs: RunJobs) -> str:
    """Print the Slurm jobs of a run and their states. Return what those that are pending or running will do, or ""."""
    if not jobs.command.exists():
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
    return jobs.what_they_do(list(queued.values()))


def _state(record: JobRecord, queued: QueuedJob | None, unknown: str) -> tuple[str, str]:
    """Return the state of a job and the reason, or the nodes of a running job.

    `queued` is the job in Slurm's queue; None if it is not there. `unknown` says why Slurm cannot be asked.
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
    they end. Raise RunError if there is no run, if a run cannot be cancelled from here, or does not end in time.
    """
    runs = runs_in(folder)
    cancelled = [run for run in runs if _cancel(RunJobs(run))]
    say(f"cancelled: {', '.join(map(str, cancelled))}" if cancelled else f"{folder}: no run is pending or running")
    return 0


def _cancel(jobs: RunJobs) -> bool:
    """End the run, and wait until it has ended. Return False if it was neither pending nor running."""
    is_found = False
    asked: set[str] = set()
    end = time.monotonic() + CANCEL_SECONDS
    while (queued := jobs.queued_if_any()) or holder_of(jobs.run, ask_slurm=True) is not None:
        try:
            # Repeat it, because a job may have submitted the next one just before it was cancelled.
            cancel([job.id for job in queued if job.state == "PENDING"])
            # The job saves what it trains, and ends. scancel alone would kill a training on several nodes.
            running = [job.id for job in queued if job.state == "RUNNING" and job.id not in asked]
            cancel(running, signal.SIGTERM, to="script")
            asked.update(running)
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
            raise RunError(f"{jobs.run} has not ended within {CANCEL_SECONDS:.0f} seconds: run the same command again")
        time.sleep(POLL_SECONDS)
    return is_found


def follow_logs(folder: Path) -> int:
    """Print the logs of the runs in `folder`, and new lines until no run is pending or running. Return the exit status.

    Raise RunError if there is no run.
    """
    runs = [RunJobs(run) for run in runs_in(folder)]
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
        is_last = not any(jobs.queued_if_any() or holder_of(jobs.run, ask_slurm=True) is not None for jobs in runs)
        time.sleep(0 if is_last else POLL_SECONDS)


def _logs(run: Path) -> Iterator[Path]:
    """Return the logs of the jobs and the logs of all members of a run."""
    yield from sorted((run / FOLDER).glob("*.log"))
    yield from (log for stage in RunFolder(run).stage_folders() for log in sorted(stage.glob("member_*/log.txt")))


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in `folder`, at any depth, also those of runs whose first job has not started.

    Raise RunError if there are none.
    """
    found = {*find_runs(folder), *(path.parent.parent for path in folder.rglob(f"{FOLDER}/command.json"))}
    if not found:
        raise RunError(
            f"no run at {folder}: there is no settings.json in it or below it. Give a run folder, or a folder that "
            "contains run folders"
        )
    return sorted(found)
