"""The program of a Slurm job: it does one task of a step (see `slurm`).

python -m data_prep.running.slurm_job STEP_FOLDER ARRAY_FOLDER INDEX HEARTBEAT_SECONDS

ARRAY_FOLDER belongs to one job array. It contains the numbers of the array's tasks, and for each job with index I:

    I.log       what the job has printed
    I.failed    why the task has failed; only if it has raised an exception
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from data_prep.errors import Passing, PrepError
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, write_whole
from fairseq_alma.core.settings import NonNegative

NUMBERS = "numbers.json"
FAILED = ".failed"


class Failure(NamedTuple):
    """Why a task has failed, as its job has recorded it."""

    message: str
    is_final: bool
    """Whether the task would fail again in the same way. True for the errors that alma-prep itself raises (PrepError),
    such as a filter that fails, except for Passing. Other exceptions may come from a node, so the task is tried again.
    """
    errno: int | None
    """Error number of the operating system, for example if the disk is full."""
    place: str
    """What the task was working on, such as a file name."""
    node: str

    @classmethod
    def of(cls, error: Exception, place: str) -> "Failure":
        """Return the failure that an exception means. `place` is what the task was working on."""
        is_final = isinstance(error, PrepError) and not isinstance(error, Passing)
        message = str(error) if isinstance(error, PrepError) else f"{type(error).__name__}: {error}"
        node = os.environ.get("SLURMD_NODENAME", "an unknown node")
        return cls(message, is_final, error.errno if isinstance(error, OSError) else None, place, node)


class _StoredFailure(TypedDict):
    """The same as `Failure`, as JSON."""

    message: str
    is_final: bool
    errno: int | None
    place: str
    node: str


def read_failure(folder: Path, index: int) -> Failure | None:
    """Return why the task of the job with this index has failed; None if there is no complete record."""
    try:
        return Failure(**read_json(folder / f"{index}{FAILED}", _StoredFailure))
    except (OSError, RunError):
        return None


def main(argv: Sequence[str]) -> int:
    """Do the task of this job. Return its exit status."""
    step_folder, array_folder, index, heartbeat_seconds = Path(argv[0]), Path(argv[1]), int(argv[2]), float(argv[3])
    # At SIGTERM (scancel, preemption, time limit), raise SystemExit, so that the task removes its temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Set these variables before the import, because the tokenizers library reads them when it is first used.
    threads = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    os.environ["RAYON_NUM_THREADS"] = threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads != "1" else "false"
    from data_prep.running.tasks import remove_leftovers, run_task, worker_of

    number = read_json(array_folder / NUMBERS, list[NonNegative])[index]
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"task {number} on {os.environ.get('SLURMD_NODENAME')}, started again {restarts} times by Slurm", flush=True)
    # Slurm may have killed an earlier start of this job.
    remove_leftovers(step_folder, number)
    try:
        run_task(str(step_folder), number, heartbeat_seconds)
    except Exception as error:
        traceback.print_exc()
        failure = Failure.of(error, worker_of(step_folder, number).get("at", "its start"))
        text = json.dumps(failure._asdict())
        write_whole(array_folder / f"{index}{FAILED}", text, durable=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
