"""Compare policies that decide when to train, on all paths through two streams of five mega-batches of MNIST.

.venv/bin/python results/frontier/decide.py run --data-root DATA       runs what is missing, two runs at a time

A path is the set of arrivals at which a stage is trained. The last arrival always has one, so there are 16 paths, and
each is a run (`wait=[1,3,5]`). SM of width 16 trains on all that has arrived (`replay=all`), so a stage costs more the
later it is. The streams are the first five of 50 mega-batches in random order, and five mega-batches in order of the
classes, two new classes each. Nothing was tuned.

results/rebuild.py makes results/frontier/decide.md of the ledgers.
"""

import sys
from itertools import combinations
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import Job, Study  # noqa: E402

NUM_ARRIVALS, SEEDS = 5, 5
STREAMS = {
    "random": ("mega_batches=50", f"arrivals={NUM_ARRIVALS}", "last_group=train", "epochs=20"),
    "classes": ("order=classes", f"mega_batches={NUM_ARRIVALS}", "epochs=2"),
}
"""The streams, with settings that give both about the same number of updates."""


def jobs() -> list[Job]:
    """Return a job for each path through each stream."""
    early = [list(path) for size in range(NUM_ARRIVALS) for path in combinations(range(1, NUM_ARRIVALS), size)]
    return [
        Job(
            f"paths/{name}_{''.join(map(str, [*path, NUM_ARRIVALS]))}",
            ["learner=sm", "width=16", "replay=all", *settings, f"wait={[*path, NUM_ARRIVALS]}".replace(" ", "")],
            SEEDS,
        )
        for name, settings in STREAMS.items()
        for path in early
    ]


STUDY = Study(HERE, "mnist", jobs())


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])
