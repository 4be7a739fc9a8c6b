"""The program of the Slurm jobs of a run (see slurm_chain.py).

python -m fairseq_alma.lm.slurm_job run RUN                     a run job: continues the run
python -m fairseq_alma.lm.slurm_job member RUN STAGE NUMBER     a member job: trains a member

A job writes to its record (see fairseq_alma.lm.jobs) how it ended. If it reaches its time limit, it saves a checkpoint
and is put back into the queue. If it fails, it is not started again, because it would fail again.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from fairseq_alma.app.signals import stopped_by_signals
from fairseq_alma.core.errors import AlmaError, StageError, message_of
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.printing import say
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.lm.failures import failure_message
from fairseq_alma.lm.jobs import RUN_STEP, JobRecord, JobState
from fairseq_alma.lm.run import WHEN_STOPPED, hide_messages_of_libraries, run_seeds
from fairseq_alma.lm.slurm_chain import Chain, HandedOver, SlurmProcesses, summarize_seeds, this_job
from launch.local import run_processes
from launch.slurm import SlurmError, is_preempted, requeue

MAX_STARTS_WITHOUT_PROGRESS = 4
"""A job that reaches its time limit this many times in a row without a new checkpoint or a finished step
is not put back into the queue again."""


class SlurmJob:
    """The Slurm job in which this process runs.

    Args:
        chain: the run to which the job belongs.
        step: what the job does, for the record.
    """

    def __init__(self, chain: Chain, step: str):
        self._chain = chain
        record = chain.jobs.read(this_job()) or JobRecord(this_job(), step, "")
        self._record = replace(record, state="running", reason=f"on {socket.gethostname()}")
        start = chain.jobs.folder / f".start-{this_job()}"
        start.write_bytes(b"")
        # By the clock of the file system, which also gives the checkpoints their times.
        self._started = start.stat().st_mtime
        start.unlink()

    def do(self, work: Callable[[], str]) -> int:
        """Call `work`, write how it ended to the record, and return the exit status of the job.

        Args:
            work: a function that returns what was done, for the record. It may raise HandedOver.
        """
        self._chain.jobs.write(self._record)
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        print(
            f"job {self._record.id} (restarts: {restarts}) on {socket.gethostname()}: {self._record.step}", flush=True
        )
        with stopped_by_signals("alma-lm", WHEN_STOPPED) as signals:
            try:
                done = work()
            except HandedOver as handed_over:
                done = str(handed_over)
            except KeyboardInterrupt:
                return self._stopped(signals)
            except (AlmaError, OSError) as error:
                return self._failed(message_of(error))
            except BaseException as error:
                self._failed(f"{type(error).__name__}: {error}")
                raise
            self._end("done", done)
            return 0

    def _stopped(self, signals: Sequence[int]) -> int:
        """Put the job back into the queue if it has reached its time limit. Return the exit status.

        Args:
            signals: the signal that has stopped the work; empty if another process has taken over the run.
        """
        if signal.SIGUSR1 not in signals and not self._is_preempted():
            # If the job was preempted without a grace time, Slurm itself puts it back into the queue.
            name = signal.Signals(signals[0]).name if signals else "another process, which has taken over the run"
            self._end("stopped", f"by {name}; the training can be resumed from its last checkpoint")
            return 1
        starts = 0 if self._has_progress() else self._record.starts_without_progress + 1
        if starts >= MAX_STARTS_WITHOUT_PROGRESS:
            return self._failed(
                f"the job was stopped at its time limit {starts} times in a row without a new checkpoint or a finished "
                f"step: give it more time (launch.time=), and run the same command again to continue"
            )
        self._record = replace(self._record, starts_without_progress=starts)
        self._end("requeued", "the job reached its time limit" if signal.SIGUSR1 in signals else "it was preempted")
        try:
            # Not SLURM_JOB_ID: for the last task of an array, this is the id of the whole array.
            requeue(this_job())
        except SlurmError as error:
            return self._failed(f"the job has reached its time limit, and cannot be put back into the queue: {error}")
        return 1

    def _is_preempted(self) -> bool:
        """Return True if Slurm preempts the job and lets it run for a grace time.

        If the job ended in this time without being put back into the queue, Slurm would count it as failed.
        """
        try:
            return is_preempted(this_job())
        except SlurmError:
            return False

    def _has_progress(self) -> bool:
        """Return True if a checkpoint was written or a step was finished since the job was started."""
        run = RunFolder(self._chain.jobs.run)
        written = [run.ledger, *run.marks(), *run.stages.rglob("checkpoint_last.pt")]
        for path in written:
            with suppress(FileNotFoundError):
                if path.stat().st_mtime >= self._started:
                    return True
        return False

    def _failed(self, reason: str) -> int:
        say(f"alma-lm: {reason}", sys.stderr)
        self._end("failed", reason)
        return 2

    def _end(self, state: JobState, reason: str) -> None:
        say(f"job {self._record.id}: {state}{f': {reason}' if state != 'failed' else ''}")
        self._chain.jobs.write(replace(self._record, state=state, reason=reason))


def continue_run(chain: Chain) -> str:
    """Continue the run until it ends, or until other jobs continue it. Return what was done.

    Raises:
        HandedOver: if other jobs continue the run.
        AlmaError: see `run`.
    """
    sys.argv = list(chain.command)
    run_seeds(chain.settings, chain)
    if chain.group is not None:
        summarize_seeds(Path(chain.group[0]), chain.group[1])
    return "the run is finished"


def train_member(chain: Chain, stage_index: int, number: int) -> str:
    """Train a member of a stage, whose configuration a run job has written. Return what was done.

    Raises:
        StageError: if the training fails.
        RunError: if another process is training the member.
    """
    from fairseq_alma.checkpoints import LAST, num_updates, read_checkpoint, repair_stage_folder
    from fairseq_alma.lm.member import CONFIG, DONE
    from fairseq_alma.lm.stage_processes import training_command

    folder = chain.jobs.run / "stages" / f"stage_{stage_index:03d}" / f"member_{number}"
    config = OmegaConf.load(folder / CONFIG)
    if (folder / DONE).exists():
        return "the member was trained already"
    # Before the repair, wait until a process that was training the member counts as ended.
    Lease(folder).wait()
    repair_stage_folder(folder, needs_best=chain.settings.average is None)
    last = read_checkpoint(folder / LAST)
    # fairseq would do one more update with a training that has ended.
    if last is not None and num_updates(last) >= config.optimization.max_update:
        return "the member was trained already"
    del last
    log = folder / "log.txt"
    log_size = log.stat().st_size if log.exists() else 0
    command = training_command(folder / CONFIG, chain.settings)
    print(f"training, with the log {log}", flush=True)
    start = time.monotonic()
    (status,) = run_processes([SlurmProcesses(chain, 0).member_job(command, log)])
    assert status is not None
    if status != 0:
        raise StageError(failure_message(log, log_size, status, chain.settings.lr, config.dataset.batch_size, 1))
    return f"trained in {time.monotonic() - start:.0f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Do the work of a job. Return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_alma.lm.slurm_job", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    run = kinds.add_parser("run", help="continue a run")
    member = kinds.add_parser("member", help="train a member of a stage")
    for kind in (run, member):
        kind.add_argument("run", help="the run folder")
    member.add_argument("stage", type=int)
    member.add_argument("number", type=int)
    arguments = parser.parse_args(argv)
    hide_messages_of_libraries()
    chain = Chain.load(arguments.run)
    if arguments.kind == "run":
        return SlurmJob(chain, RUN_STEP).do(lambda: continue_run(chain))
    step = f"stage {arguments.stage}, member {arguments.number}"
    return SlurmJob(chain, step).do(lambda: train_member(chain, arguments.stage, arguments.number))


if __name__ == "__main__":
    sys.exit(main())
