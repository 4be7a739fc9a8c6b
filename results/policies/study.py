"""Compare policies that decide when to train, on all paths through five streams of five mega-batches.

python results/policies/study.py images --data DATA     train the paths on images that have no ledger: 10 minutes
python results/policies/study.py text --data DATA       those on text, two runs at a time: about an hour

DATA is the folder of MNIST's files, and of the folders books and dated. A path is the set of arrivals at which a stage
is trained. The last arrival always has one, so there are 16 paths, and each is a run (`wait=[1,3,5]`). SM trains on all
that has arrived (`replay=all`), so a stage costs more the later it is. Nothing was tuned.

Images: the first mega-batches of MNIST in random order, of 1,200 and of 120 images, and digits in order of the classes,
two new classes in each mega-batch; perceptrons of width 8 and 128, five seeds. Text: five mega-batches of nine books in
random order, and speeches in five periods with --causal, where all validation text is of the first; language models of
width 64 and 128; two seeds and one.

results/rebuild.py makes the tables of the ledgers. To add a policy, add a line to POLICIES.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.stats import rankdata

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import copy_results  # noqa: E402
from _texts import SETTINGS, BookStudy, Row, TextStudy, setting_of_width  # noqa: E402

import vision  # noqa: E402
from fairseq_alma.report.decide import PolicyOutcomes, compare, over_streams  # noqa: E402
from fairseq_alma.report.decide import tables as policy_tables  # noqa: E402
from fairseq_alma.report.reading import read_runs  # noqa: E402

POLICIES: tuple[str, ...] = ("results.policies.worse_than_usual:policy",)
"""Policies of contributors, as MODULE:FUNCTION."""

LEDGERS, NUM_ARRIVALS = HERE / "ledgers", 5
EARLY = [path for size in range(NUM_ARRIVALS) for path in combinations(range(1, NUM_ARRIVALS), size)]
PATHS = {"".join(map(str, path)): list(path) for path in ((*path, NUM_ARRIVALS) for path in EARLY)}
"""Name of the path -> its arrivals."""

SMALL, LARGE = 8, 128
COMMON: dict[str, Any] = {"learner": "sm", "replay": "all", "epochs": 20, "seeds": 5}
RANDOM = {"dataset": "mnist", "arrivals": NUM_ARRIVALS, "last_group": "train"}
STREAMS: dict[str, dict[str, Any]] = {
    "mnist_50": {**RANDOM, "mega_batches": 50},
    "mnist_500": {**RANDOM, "mega_batches": 500},
    "digits": {"dataset": "digits", "order": "classes", "mega_batches": NUM_ARRIVALS},
}
"""The streams of images, with the settings of their runs."""

PRICES = {f"width_{SMALL}": 40.0, f"width_{LARGE}": 2.5, "text_64": 250.0, "text": 100.0}
"""Folder of the ledgers -> what 1e12 training FLOPs cost, in units of CER or of the summed perplexity. Large networks
need 20 times the FLOPs of small ones on MNIST, and 48 times on digits; language models of width 128 need 2.5 times
those of width 64."""


def train_images(data: Path, runs: Path) -> None:
    """Train the paths that have no ledger in the folder `runs`, and copy their ledgers."""
    for width in (SMALL, LARGE):
        for stream, settings in STREAMS.items():
            for path, arrivals in PATHS.items():
                name = f"width_{width}/{stream}_{path}"
                if not (LEDGERS / name / "summary.json").exists():
                    out = runs / name
                    options = {**COMMON, **settings, "width": width, "wait": arrivals}
                    vision.run(**options, data_root=str(data), out=str(out))
                    copy_results(out, LEDGERS / name, str(data), runs)


@dataclass(frozen=True)
class BookPaths(BookStudy):
    """The paths through five mega-batches of books."""

    common: ClassVar[tuple[str, ...]] = (*SETTINGS, "precision=float32", "validations=1")


@dataclass(frozen=True)
class SpeechPaths(TextStudy):
    """The paths through five periods of speeches."""

    common: ClassVar[tuple[str, ...]] = BookPaths.common
    data: ClassVar[str] = "dated"

    def prepare(self, data: Path, out: Path) -> list[str]:
        words = ["--source", f"text:{data / 'sotu.jsonl'}", "--partition", "chronological", "--causal"]
        return [*words, "--period", "1851,1890,1913,1973", "--vocab-size", "8000", "--test-words", "10000"]


def _rows(name: str, seeds: tuple[int, ...], more: tuple[str, ...]) -> list[Row]:
    return [
        Row(
            f"{name}_{path}",
            ("learner=sm", "experts=4", "replay=all", f"wait=[{','.join(map(str, arrivals))}]", *more),
            "updates_per_mega_batch",
            seeds=seeds,
        )
        for path, arrivals in PATHS.items()
    ]


def _texts(folder: str, *more: str) -> dict[str, TextStudy]:
    """Return the studies of text whose ledgers are in a folder, by the name of the stream, with more settings."""
    shared: dict[str, Any] = {
        "ledgers": LEDGERS / folder, "settings": ("dropout=0",), "mega_batches": NUM_ARRIVALS,
    }  # fmt: skip
    # About as many updates for a mega-batch of speeches as for one of books.
    return {
        "books": BookPaths(_rows("books", (0, 1), more), passes=0.4, **shared),
        "speeches": SpeechPaths(_rows("speeches", (0,), more), passes=0.05, **shared),
    }


TEXTS = {"text": _texts("text"), "text_64": _texts("text_64", setting_of_width(64), "lr=0.01")}
"""Folder of the ledgers -> its studies. The rate falls as 1 over the width."""


def tables() -> dict[str, str]:
    """Return file name -> table: of the policies on each stream, of their regret over all streams, and of their order.

    Return {} if a path has no ledger, because nothing in the tables is estimated.
    """
    names = [f"width_{width}/{stream}_{path}" for width in (SMALL, LARGE) for stream in STREAMS for path in PATHS]
    for folder, studies in TEXTS.items():
        rows = [row for study in studies.values() for row in study.rows]
        names += [f"{folder}/{row.name}/seed_{seed}" for row in rows for seed in row.seeds]
    if not all((LEDGERS / name / "summary.json").exists() for name in names):
        return {}
    found = {size: compare(read_runs([LEDGERS / size]), price, POLICIES) for size, price in PRICES.items()}
    small, large, small_text, text = found.values()
    written = {"policies.md": over_streams([*small, *text])}
    for size, compared in found.items():
        written[f"{size}.md"] = over_streams(compared)
        written |= {f"{size}_{slug}.md": table for slug, table in policy_tables(compared).items()}
    return {name: table.markdown() for name, table in written.items()} | {
        "order.md": _order_table([*small, *small_text], [*large, *text])
    }


def _order_table(small: Sequence[PolicyOutcomes], large: Sequence[PolicyOutcomes]) -> str:
    """Return a table as Markdown: whether paths and policies have the order of small networks for large ones, too."""
    lines = [
        "# Does the order of small networks hold for large ones?",
        "",
        f"| stream | all {len(PATHS)} paths | policies | number of different policies |",
        "|:---|---:|---:|---:|",
    ]
    of_large = {one.subject.stream: one for one in large}
    for one in small:
        other = of_large[one.subject.stream]
        policies = _different(_policy_costs(one), _policy_costs(other))
        cells = [_correlation(_path_costs(one), _path_costs(other)), _correlation(*policies), str(len(policies[0]))]
        lines.append(f"| {one.subject.stream} | {' | '.join(cells)} |")
    note = (
        f"Spearman's rank correlation between the mean costs of width {SMALL} and of {LARGE}, for text of 64 and of "
        "128, with five seeds with its 95% interval over them (percentile bootstrap, 2,000 samples; it is too narrow). "
        "Of policies with the same paths at both widths one counts. The numbers of CARA and UPF are kept, not "
        "chosen anew in each sample."
    )
    return "\n".join([*lines, "", note, ""])


Costs = Mapping[str, Sequence[float]]
"""Name -> the cost for each seed."""


def _path_costs(compared: PolicyOutcomes) -> Costs:
    """Return path -> the cost for each seed."""
    matrices = compared.subject.matrices.values()
    return {
        name: [matrix.outcome(tuple(path)).cost(compared.price) for matrix in matrices] for name, path in PATHS.items()
    }


def _policy_costs(compared: PolicyOutcomes) -> Costs:
    """Return policy -> the cost for each seed."""
    return {
        text: [outcome.cost(compared.price) for outcome in outcomes.values()]
        for text, outcomes in compared.outcomes.items()
    }


def _different(small: Costs, large: Costs) -> tuple[Costs, Costs]:
    """Return the costs without those of policies that cost as much as an earlier one for each network and seed."""
    first = {(*small[name], *large[name]): name for name in reversed([*small])}
    return {name: small[name] for name in first.values()}, {name: large[name] for name in first.values()}


def _correlation(small: Costs, large: Costs) -> str:
    """Return the rank correlation of the mean costs, from five seeds on with its interval. Both have the same seeds."""
    a, b = (np.array([one[name] for name in small]) for one in (small, large))
    num_seeds, random = a.shape[1], np.random.default_rng(0)
    samples = np.array([np.arange(num_seeds), *(random.integers(num_seeds, size=num_seeds) for _ in range(2000))])
    # Ranks of the policies in each sample. All samples at once, because 2,000 calls of spearmanr take seconds.
    x, y = (rankdata(one[:, samples].mean(2), axis=0) for one in (a, b))
    x, y = x - x.mean(0), y - y.mean(0)
    point, *others = (x * y).sum(0) / np.sqrt((x**2).sum(0) * (y**2).sum(0))
    low, high = np.quantile(others, [0.025, 0.975])
    return f"{point:.2f} ({low:.2f} to {high:.2f})" if num_seeds >= 5 else f"{point:.2f}"


def main() -> None:
    """Read the command line and train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["images", "text"], help="what to train on")
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST, books and dated")
    parser.add_argument("--out", type=Path, default=Path("runs/policies"), help="folder of the runs")
    text = parser.add_argument_group("only for text")
    text.add_argument("--side-by-side", type=int, default=2, help="number of runs at a time (default: 2)")
    text.add_argument("--only", default="", help="run only the paths whose name starts with this")
    text.add_argument("--seeds", type=int, default=99, help="number of seeds (default: all of the study)")
    arguments = parser.parse_args()
    if arguments.what == "images":
        train_images(arguments.data, arguments.out)
        return
    root, arguments.hours = arguments.data, math.inf
    for folder, studies in TEXTS.items():
        for name, study in studies.items():
            arguments.data = root / study.data
            study.do(arguments, arguments.out / folder / name)


if __name__ == "__main__":
    main()
