"""The subcommands status, cancel and logs of runs, with or without Slurm jobs."""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rich.table import Table

from fairseq_alma.app.slurm_jobs import FOLDER, JobRecord, RunJobs
from fairseq_alma.app.tables import deployed_message, ledger_table, title_of, waiting_message, wide_console
from fairseq_alma.core.arrivals import Arrivals, read_arrivals
from fairseq_alma.core.deployments import stage_in_use
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.lease import holder_of, holder_of_run
from fairseq_alma.core.ledger import deployed_stage
from fairseq_alma.core.metrics import checked_rows, excess_losses, perplexity_of, unusual_arrivals
from fairseq_alma.core.printing import json_text, say
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, find_runs
from launch.slurm import QueuedJob, SlurmError, cancel

CANCEL_SECONDS = 150.0
"""Longest time in seconds that `cancel_runs` waits for the end of a run. A run that is stopped saves checkpoints."""
POLL_SECONDS = 0.5
AGAIN_SECONDS = 10.0
"""Time in seconds after which `cancel_runs` sends a running job the signal again. A job ignores it after the first."""


def status(folder: Path, json: bool = False) -> int:
    """Print the ledger and the jobs of each run in `folder`, and what is left to do. Return the exit status.

    With `json`, print one JSON object for each run instead (see `state_of`). Raise RunError if there is no run.
    """
    if json:
        for run in runs_in(folder):
            if (run / "settings.json").exists():
                say(json_text(state_of(run)))
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
            left = left if digests else "no mega-batch has arrived"
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
    state: dict[str, Any] = {"run": str(run), "state": "running" if is_running else "unfinished" if left or not digests
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
        "new_text_perplexity": perplexity_of(new_text.loss) if is_text and new_text else None,
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
    begun = [record for record in records.values() if record.state != "submitted"]
    last = [record for record in begun if record.id.partition("_")[0] == begun[-1].id.partition("_")[0]]
    if not queued and any(record.state == "failed" for record in last):
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
    # Of seeds that are trained together, no process works on one alone.
    runs = list(dict.fromkeys(map(_where_it_works, runs_in(folder))))
    cancelled: list[Path] = []
    errors: list[RunError] = []
    for run in runs:
        try:
            cancelled += [run] if _cancel(RunJobs(run)) else []
        except RunError as error:
            errors.append(error)  # the others must not go on running because of it
    if cancelled or not errors:
        say(f"cancelled: {', '.join(map(str, cancelled))}" if cancelled else f"{folder}: no run is pending or running")
    if errors:
        raise RunError("\n".join(map(str, errors)))
    return 0


def _where_it_works(run: Path) -> Path:
    """Return the folder whose lease the process holds that is working on a run; the run itself if there is none."""
    is_of_parent = holder_of(run) is None and holder_of_run(run) is not None
    return run.parent if is_of_parent else run


def _cancel(jobs: RunJobs) -> bool:
    """End the run, and wait until it has ended. Return False if it was neither pending nor running."""
    is_found = False
    asked: dict[str, float] = {}
    end = time.monotonic() + CANCEL_SECONDS
    while (queued := jobs.queued_if_any()) or holder_of(jobs.run, ask_slurm=True) is not None:
        try:
            # Repeat it, because a job may have submitted the next one just before it was cancelled.
            cancel([job.id for job in queued if job.state == "PENDING"])
            # The job saves what it trains, and ends. scancel alone would kill a training on several nodes. A job whose
            # node is still being prepared for it (Slurm's Prolog) does not get the signal, so it is sent again.
            now = time.monotonic()
            running = [
                job.id
                for job in queued
                if job.state == "RUNNING" and now - asked.get(job.id, -math.inf) > AGAIN_SECONDS
            ]
            cancel(running, signal.SIGTERM, to="script")
            asked.update(dict.fromkeys(running, now))
        except SlurmError as error:
            raise RunError(f"{jobs.run} cannot be cancelled: {error}") from error
        holder = holder_of(jobs.run)
        if not queued and not is_found and holder is not None:
            if holder.state(ask_slurm=False) != "running":
                how = f"there (kill -TERM {holder.pid})"
                if holder.job_id:
                    job = f"scancel --batch --signal=TERM {holder.job_id}"
                    how += f", or, if the script of the job starts it with exec, with {job}"
                raise RunError(f"{jobs.run} is in use by {holder}: cancel it {how}")
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
        is_last = not any(jobs.queued_if_any() or holder_of_run(jobs.run, ask_slurm=True) for jobs in runs)
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
