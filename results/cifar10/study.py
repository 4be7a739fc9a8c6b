"""Train the runs of the paper's CIFAR-10 figures: the reduced VGG19, B = 100. The larger ones need a GPU.

.venv/bin/python results/cifar10/study.py run --data-root DATA                runs what is missing, cheap runs first
.venv/bin/python results/cifar10/study.py run --data-root DATA --only gpu_    figures 1-4, 8 and 9 in full, on a GPU
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import Job, Study  # noqa: E402

GROW_EVERY = {1: 10, 2: 5, 10: 2, 100: 1}
"""wait -> number of stages from one growth to the next. The original code grows after every 5 of 50 stages (wait 2) and
after every 2 of 10 stages (wait 10)."""
GROWING = ("gmoe", "ff")


def settings_of(learner: str, wait: int, width: int, epochs: int, *more: str) -> list[str]:
    """Return the arguments of alma-vision for one run. `more` contains further arguments."""
    grow_every = [f"grow_every={GROW_EVERY[wait]}"] if learner in GROWING else []
    return [f"learner={learner}", f"wait={wait}", f"width={width}", f"epochs={epochs}", *grow_every, *more]


def jobs() -> Iterator[Job]:
    """Yield all jobs: first those that two CPU cores finish in an afternoon, then those that need a GPU."""
    for wait, learner in product((10, 100), ("sm", "gens", "umix", "ens", "gmoe", "ff")):
        yield Job(f"{learner}_c4_w{wait}_e10", settings_of(learner, wait, 4, 10), seeds=2)
    # Train SM at widths for which it is about as large as ff (3,481 parameters), gmoe (6,789) and gens (11,472) are
    # on average over the arrivals.
    for width in (5, 7, 9):
        yield Job(f"sm_c{width}_w10_e10", settings_of("sm", 10, width, 10), seeds=2)
    for learner in ("sm", "gens"):
        yield Job(f"{learner}_c4_w10_e10_replay", settings_of(learner, 10, 4, 10, "replay=all"), seeds=2)
    for width, wait in product((4, 8), (10, 100, 2)):
        yield Job(f"sm_c{width}_w{wait}_e100", settings_of("sm", wait, width, 100), seeds=1)
    # Repeat the ablation of the paper's first version: a stage at every mega-batch, growth at every second one, and
    # 2 experts at first.
    for learner in ("gmoe", "gmoe_flat", "moe", "ens_moe"):
        more = ["mega_batches=20", "wait=1", "width=4", "epochs=10", "experts=2", "cer_from=0"]
        if learner.startswith("gmoe"):
            more.append("grow_every=2")
        yield Job(f"ablation_{learner}", [f"learner={learner}", *more], seeds=2)
    for width, learner in product((4, 16), ("sm", "umix", "ens")):
        yield Job(f"{learner}_c{width}_w10_e20", settings_of(learner, 10, width, 20), seeds=3)
    # How many candidates Firefly needs for each unit that it adds. ff_c4_w10_e10 above has the default, 70.
    for candidates in (5, 20):
        name, few = f"ff_c4_w10_e10_candidates{candidates}", f"candidates={candidates}"
        yield Job(name, settings_of("ff", 10, 4, 10, few), seeds=2)
    for width, learner, wait in product(
        (4, 8, 16, 32, 64), ("sm", "ens", "umix", "gens", "gmoe", "ff"), (1, 2, 10, 100)
    ):
        yield Job(f"gpu_{learner}_c{width}_w{wait}", settings_of(learner, wait, width, 100), seeds=3)
    for width, learner, wait in product((4, 8, 16, 32, 64), ("sm", "ens", "umix", "gens", "gmoe", "ff"), (2, 10)):
        yield Job(
            f"gpu_{learner}_c{width}_w{wait}_replay", settings_of(learner, wait, width, 100, "replay=all"), seeds=3
        )


def selected_jobs() -> list[Job]:
    """Return all jobs if an argument on the command line starts with "gpu_", otherwise only the jobs for a CPU."""
    all_jobs = list(jobs())
    if any(argument.startswith("gpu_") for argument in sys.argv):
        return all_jobs
    return [job for job in all_jobs if not job.name.startswith("gpu_")]


STUDY = Study(HERE, "cifar10", selected_jobs())


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])
