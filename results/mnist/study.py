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
WIDTHS = (4, 64, 8, 32)
GROW_EVERY = {1: 25, 10: 3, 25: 1, 50: 1, 500: 1}
"""Number of stages from one growth of gMoE to the next, by wait. No run grows more than 20 times."""


def jobs() -> Iterator[Job]:
    """Yield the jobs: the smallest and the largest width first, and long waits, which are cheap, before short waits."""
    for width, learner, wait in product(WIDTHS, LEARNERS, WAITS):
        settings = [f"learner={learner}", f"wait={wait}", f"width={width}"]
        if learner == "gmoe":
            settings.append(f"grow_every={GROW_EVERY[wait]}")
        yield Job(f"{learner}_h{width}_w{wait}", settings)


def replay_jobs() -> Iterator[Job]:
    """Yield the jobs that train SM with full replay. The waits are long enough to make the compute affordable."""
    for width, wait in ((4, 50), (64, 50), (4, 10)):
        settings = ["learner=sm", f"wait={wait}", f"width={width}", "replay=all"]
        yield Job(f"sm_h{width}_w{wait}_replay", settings)


STUDY = Study(HERE, "mnist", [*jobs(), *replay_jobs()])


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])
