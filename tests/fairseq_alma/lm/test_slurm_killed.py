"""A chain of Slurm jobs that is killed everywhere at random ends with the ledger of an uninterrupted run."""

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from fairseq_alma.app.slurm_jobs import RunJobs
from launch.slurm import SlurmError
from tests.fairseq_alma.killing import rows_without_seconds, same_rows, trainings
from tests.fairseq_alma.lm.test_slurm_chain import ENS, logs, stream, submit, whole
from tests.slurm import NODES

__all__ = ["stream"]

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]

NUM_KILLS = 20
JOB = "fairseq_alma.lm.run"
SETTINGS = (*(setting for setting in ENS if not setting.startswith("updates=")), "updates=800")


def processes_of(out: Path, *words: str) -> list[int]:
    """Return the processes whose command contains one of `words` and the path of the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().decode(errors="replace")
            if str(out) in command and any(word in command for word in words):
                found.append(int(path.parent.name))
    return found


def kill_one(pids: list[int], choose: random.Random) -> bool:
    """Kill one of the processes. Return False if there is none."""
    if not pids:
        return False
    with suppress(ProcessLookupError):
        os.kill(choose.choice(pids), signal.SIGKILL)
    return True


def test_a_chain_that_is_killed_everywhere_at_random_ends_with_the_right_ledger(slurm, stream, tmp_path):
    out, choose = tmp_path / "run", random.Random()
    seed = choose.randrange(10**6)
    print(f"seed {seed}")
    choose.seed(seed)

    def running() -> list[str]:
        return [job.id for job in RunJobs(out).queued() if job.state == "RUNNING"]

    def requeue() -> bool:
        jobs = running()
        with suppress(AssertionError):  # the job has ended meanwhile
            slurm.run("scontrol", "requeue", choose.choice(jobs)) if jobs else None
        return bool(jobs)

    def cancel() -> bool:
        jobs = running()
        slurm.run("scancel", "--quiet", choose.choice(jobs)) if jobs else None
        return bool(jobs)

    def drain() -> bool:
        node = choose.choice(NODES)
        slurm.drain(node)
        time.sleep(choose.uniform(1, 5))
        slurm.drain(node, is_on=False)
        return True

    def restart() -> bool:
        slurm.restart_node(choose.choice(NODES))
        return True

    ways = {
        # The training processes are forks of a server process of their job.
        "training": lambda: kill_one([t for job in processes_of(out, JOB) for t in trainings(job)], choose),
        "job": lambda: kill_one(processes_of(out, JOB), choose),
        "requeued": requeue,
        "cancelled": cancel,
        "node drained": drain,
        "slurmd restarted": restart,
    }
    done: Counter[str] = Counter()
    submissions = 0
    end = time.monotonic() + 3600

    def is_finished() -> bool:
        summary = out / "summary.json"
        return summary.exists() and len(rows_without_seconds(out)) == 5 and not RunJobs(out).queued()

    while not is_finished():
        assert time.monotonic() < end, (done, logs(out)[-5000:])
        with suppress(SlurmError):
            if not RunJobs(out).queued():
                result = submit(stream, out, *SETTINGS)
                assert result.returncode == 0, result.stderr
                submissions += 1
        time.sleep(choose.uniform(3, 12))
        if sum(done.values()) < NUM_KILLS:
            # Take the ways in turn, so that none of them is left out, and a way that finds nothing again later.
            for way in sorted(ways, key=lambda name: (done[name], choose.random())):
                if ways[way]():
                    done[way] += 1
                    break
    print(f"{submissions} submissions, {dict(done)}")
    assert sum(done.values()) >= NUM_KILLS, done
    assert done["training"] > 0
    same_rows(rows_without_seconds(out), whole(stream, tmp_path / "local", *SETTINGS))
    assert not list(out.rglob("lease.json"))
    assert not RunJobs(out).queued()
    assert not processes_of(out, JOB, "train_member")
