"""Compare policies that decide when to train, on all paths through three streams of five mega-batches.

.venv/bin/python results/frontier/decide.py run --data-root DATA       runs what is missing

A path is the set of arrivals at which a stage is trained. The last arrival always has one, so there are 16 paths, and
each is a run (`wait=[1,3,5]`) of five seeds. SM of width 16 trains on all that has arrived (`replay=all`), so a stage
costs more the later it is. Two streams are the first mega-batches of MNIST in random order, of 1,200 and of 120 images.
The third is that of digits in order of the classes, two new classes in each mega-batch. Nothing was tuned. All runs
together take minutes, because one process does all of them.

results/rebuild.py makes results/frontier/decide*.md of the ledgers.
"""

import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import ROOT, copy_results  # noqa: E402

import vision  # noqa: E402
from fairseq_alma.report.decide import tables as policy_tables  # noqa: E402
from fairseq_alma.report.reading import read_runs  # noqa: E402

LEDGERS = HERE / "ledgers" / "paths"
NUM_ARRIVALS = 5
COMMON: dict[str, Any] = {"learner": "sm", "width": 16, "replay": "all", "epochs": 20, "seeds": 5}
RANDOM = {"dataset": "mnist", "arrivals": NUM_ARRIVALS, "last_group": "train"}
STREAMS: dict[str, dict[str, Any]] = {
    "mnist_50": {**RANDOM, "mega_batches": 50},
    "mnist_500": {**RANDOM, "mega_batches": 500},
    "digits": {"dataset": "digits", "order": "classes", "mega_batches": NUM_ARRIVALS},
}
"""The streams, with the settings of their runs."""
PRICE = 20.0
"""What 1e12 training FLOPs cost, in units of CER."""


def run(data_root: str) -> None:
    """Train the paths that have no ledger, and copy their ledgers."""
    early = [list(path) for size in range(NUM_ARRIVALS) for path in combinations(range(1, NUM_ARRIVALS), size)]
    for stream, settings in STREAMS.items():
        for path in ([*path, NUM_ARRIVALS] for path in early):
            name = f"{stream}_{''.join(map(str, path))}"
            if not (LEDGERS / name / "summary.json").exists():
                out = ROOT / "runs" / "decide" / name
                vision.run(**COMMON, **settings, wait=path, data_root=data_root, out=str(out))
                copy_results(out, LEDGERS / name, data_root)


def tables() -> dict[str, str]:
    """Return file name -> table: of the policies on each stream, and of their regret over all streams."""
    if not LEDGERS.exists():
        return {}
    found = policy_tables(read_runs([LEDGERS]), PRICE)
    return {f"decide{'' if slug == 'all' else f'_{slug}'}.md": table.markdown() for slug, table in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run"], help="run the paths that are missing")
    parser.add_argument("--data-root", default="data", help="folder of the datasets' files (default: data)")
    run(parser.parse_args().data_root)
