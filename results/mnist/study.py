"""Train the paper's MNIST grid: learners x waits x widths, B = 500, 100 epochs, 3 seeds.

.venv/bin/python results/mnist/study.py run --data-root DATA       runs what is missing, two runs at a time
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import Job, Study  # noqa: E402

LEARNERS = ("sm", "gens", "umix", "ens", "gmoe")
WAITS = (500, 50, 25, 10, 1)
MORE_WAITS = (10, 50, 1, 25, 500)
"""The same waits for further widths, the most telling first."""
GROW_EVERY = {1: 25, 10: 3, 25: 1, 50: 1, 500: 1}
"""Number of stages from one growth of gMoE to the next, by wait. No run grows more than 20 times."""


def jobs() -> Iterator[Job]:
    """Yield the jobs: the smallest and the largest width, then the widths between them."""
    for width, learner, wait in product((4, 64), LEARNERS, WAITS):
        yield job(width, learner, wait)
    for wait, width, learner in product(MORE_WAITS, (8, 16, 32), LEARNERS):
        yield job(width, learner, wait)


def job(width: int, learner: str, wait: int) -> Job:
    """Return one job."""
    settings = [f"learner={learner}", f"wait={wait}", f"width={width}"]
    if learner == "gmoe":
        settings.append(f"grow_every={GROW_EVERY[wait]}")
    return Job(f"{learner}_h{width}_w{wait}", settings)


def first_version_jobs() -> Iterator[Job]:
    """Yield the jobs of the paper's first version: B = 50, hard gates."""
    for learner, wait in product(LEARNERS, (5, 1, 50)):
        settings = ["preset=paper_v1", f"learner={learner}", f"wait={wait}"]
        if learner == "gmoe":
            settings.append(f"grow_every={max(1, 5 // wait)}")
        yield Job(f"v1_{learner}_w{wait}", settings)


def replay_jobs() -> Iterator[Job]:
    """Yield the jobs that train SM with full replay. The waits are long enough to make the compute affordable."""
    for width, wait in ((4, 50), (64, 50), (4, 10)):
        settings = ["learner=sm", f"wait={wait}", f"width={width}", "replay=all"]
        yield Job(f"sm_h{width}_w{wait}_replay", settings)


STUDY = Study(HERE, "mnist", [*jobs(), *replay_jobs(), *first_version_jobs()])


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])
