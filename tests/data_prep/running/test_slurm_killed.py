"""A run on a real Slurm on which everything happens that happens on clusters ends with the right bytes, unaided."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

from tests.data_prep.running.test_slurm import command, jobs, process_of
from tests.slurm import NODES, LocalSlurm

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]

SMALL_TASKS = """
import sys
from data_prep.encoding import encode as encoding
from data_prep.reading import read as reading
reading.MIN_SHARD_BYTES, encoding.TASK_BYTES = 1, 16_000
from data_prep.cli import main
sys.exit(main(sys.argv[1:]))
"""
NUM_BOOKS = 60
SILENT_SECONDS = 60


class Mischief:
    """Disturbs the jobs of a cluster until it is stopped.

    Each start of a job has bad luck with a probability of one in five: it is killed, requeued, or cancelled. Meanwhile,
    nodes are drained and jobs are preempted, and once Slurm answers no command for a minute.
    """

    def __init__(self, slurm: LocalSlurm, seed: int):
        self._slurm, self._choose = slurm, random.Random(seed)
        self._stopped = threading.Event()
        self.done: Counter[str] = Counter()
        self.starts = 0
        self._threads = [threading.Thread(target=each) for each in (self._disturb_jobs, self._disturb_nodes)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _disturb_jobs(self) -> None:
        seen: set[int] = set()
        while not self._stopped.wait(0.2):
            for job in jobs("RUNNING"):
                process = process_of(job)
                # A requeued job has the same id, but another process.
                if process is None or process in seen:
                    continue
                seen.add(process)
                self.starts += 1
                if self._choose.random() < 0.2:
                    threading.Timer(self._choose.uniform(0, 2), self._disturb, (job, process)).start()

    def _disturb(self, job: str, process: int) -> None:
        way = self._choose.choice(["killed", "requeued", "cancelled"])
        with suppress(AssertionError, ProcessLookupError):  # the job has ended meanwhile, or Slurm does not answer
            if way == "killed":
                os.kill(process, signal.SIGKILL)
            else:
                self._slurm.run(*(["scontrol", "requeue"] if way == "requeued" else ["scancel"]), job)
            self.done[way] += 1

    def _disturb_nodes(self) -> None:
        for number in range(1000):
            if self._stopped.wait(10):
                return
            node = self._choose.choice(NODES)
            if number == 3:
                self._slurm.stop_controller()
                self._stopped.wait(SILENT_SECONDS)
                self._slurm.start_controller()
                self.done["Slurm did not answer for a minute"] += 1
            elif number % 2:
                self._slurm.drain(node)
                self._stopped.wait(5)
                self._slurm.drain(node, is_on=False)
                self.done["node drained"] += 1
            else:
                self._slurm.submit(
                    "--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 3",
                    folder=self._slurm.folder,
                )  # fmt: skip
                self.done["all jobs of a node preempted"] += 1


def test_a_run_whose_jobs_are_killed_requeued_and_preempted_ends_with_the_right_bytes(
    slurm, tmp_path, write_corpus, folder_bytes
):
    seed = random.Random().randrange(10**6)
    print(f"seed {seed}")
    books = write_corpus(tmp_path / "books", num_files=NUM_BOOKS)
    subprocess.run(command(tmp_path / "here", books), check=True, capture_output=True)
    there = command(tmp_path / "there", books, "--executor", "slurm", "--workers", "6", "--slurm-memory", "1G")
    argv = [sys.executable, "-c", SMALL_TASKS, *there[3:]]
    began = time.monotonic()
    with Mischief(slurm, seed) as mischief:
        run = subprocess.run(argv, capture_output=True, text=True, timeout=3000)
    print(run.stderr[-6000:])
    print(f"{mischief.starts} starts seen, {dict(mischief.done)}, {time.monotonic() - began:.0f} s")
    assert run.returncode == 0
    assert "Slurm does not answer" in run.stderr
    assert folder_bytes(tmp_path / "there") == folder_bytes(tmp_path / "here")
    assert not (tmp_path / "there" / ".alma-prep").exists()
    assert mischief.starts > 80
    assert min(mischief.done[way] for way in ("killed", "requeued", "cancelled")) > 0
    assert mischief.done["node drained"] > 0
    assert mischief.done["Slurm did not answer for a minute"] == 1
    slurm.wait_for(lambda: not jobs())
