"""Compare growing mixtures with fixed ones of their average and of their final size, on books in one pass, 5 seeds.

.venv/bin/python results/frontier/growth.py run --books DATA/books    runs what is missing, two runs at a time
.venv/bin/python results/frontier/growth.py run --only gmoe --seeds 1  only some rows, only seed 0

The stream has B = 4 mega-batches of a tenth of the books, and each stage is one pass over its mega-batch. (In
results/books, a stage has five passes over a smaller mega-batch. There the model overfits, and 12 experts are no better
than 4.) All rows have the same number of updates. The learning rate is that of results/books. Nothing was tuned.

results/rebuild.py makes results/frontier/growth.md of the committed ledgers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import ROOT, copy_results  # noqa: E402

MEGA_BATCHES, PARTS, SEEDS = 4, 10, 5
SEQUENCES_PER_UPDATE, TOKENS_PER_SAMPLE = 8, 128
LEFT_OUT = "gitenberg_moby_dick"
"""The beginning of the name of a book file that is skipped, because it is a second copy of Moby-Dick."""
T_95 = 2.776
"""Half the width of a 95% confidence interval of a mean over 5 seeds, in standard errors (Student's t)."""
SETTINGS = ("preset=quickstart", f"sequences_per_update={SEQUENCES_PER_UPDATE}", "batch_size=8", "lr=0.005",
            f"mega_batches={MEGA_BATCHES}", "wait=1", "parallel=1", "tensorboard=false")  # fmt: skip
GROWS = ("learner=gmoe", "experts=4", "grow_experts=[2,2,4]")
DENSE = ("learner=gmoe", "experts=1", "grow_experts=[3,4,4]", "grow_router=tree")
ROWS = {
    "sm_8": ("SM, 8 experts (gMoE's average is 7.5)", ("learner=sm", "experts=8")),
    "sm_12": ("SM, 12 experts (gMoE's final size)", ("learner=sm", "experts=12")),
    "gmoe_copy": ("gMoE, 4 to 12, the paper's", GROWS),
    "gmoe_tree": ("gMoE, 4 to 12, tree", (*GROWS, "grow_router=tree")),
    "sm_4": ("SM, 4 experts (gMoE's first size)", ("learner=sm", "experts=4")),
    "gmoe_gradient": ("gMoE, 4 to 12, tree, by gradient", (*GROWS, "grow_router=tree", "split_by=gradient")),
    "gmoe_random": ("gMoE, 4 to 12, tree, at random", (*GROWS, "grow_router=tree", "split_by=random")),
    "dense": ("gMoE, 1 to 12, tree", DENSE),
    "dense_drop": ("gMoE, 1 to 12, tree, half of the units dropped", (*DENSE, "grow_drop=0.5")),
}
"""Name of each row -> its text in the table, and its arguments of alma-lm. The most telling rows are first."""
FIXED = ("sm_8", "sm_12")
"""The rows with which all others are compared."""


def run(books: Path, out: Path, side_by_side: int, only: str, num_seeds: int, hours: float) -> None:
    """Make the stream and train the rows that have no committed ledger, seed after seed.

    Args:
        books: folder of the books, .md or .txt files.
        out: folder for the stream and the runs.
        side_by_side: number of runs at a time, each with one thread.
        only: train only the rows whose names start with this.
        num_seeds: number of seeds of each row.
        hours: start no run after this many hours.
    """
    sources = out / "books"
    sources.mkdir(parents=True, exist_ok=True)
    for book in sorted(books.iterdir()):
        if book.suffix in (".md", ".txt") and not book.name.startswith(LEFT_OUT):
            (link := sources / book.name).unlink(missing_ok=True)
            link.symlink_to(book.absolute())
    stream = out / "stream"
    options = ["--mega-batches", str(PARTS), "--vocab-size", "8000", "--valid-words", "10000", "--seed", "0"]
    _command(["alma-prep", str(stream), "--source", f"books:{sources}", *options], out / "stream.log")
    splits = json.loads((stream / "stream.json").read_text())["splits"]
    largest = max(splits[f"mega_batch_{t}"]["tokens"] for t in range(1, MEGA_BATCHES + 1))
    updates = -(-largest // (SEQUENCES_PER_UPDATE * TOKENS_PER_SAMPLE))
    deadline = time.monotonic() + 3600 * hours

    def run_row(task: tuple[int, str]) -> None:
        seed, name = task
        if time.monotonic() > deadline:
            return
        folder, started = out / name / f"seed_{seed}", time.monotonic()
        words = ["alma-lm", f"stream={stream}", f"out={folder}", *SETTINGS, *ROWS[name][1]]
        words += [f"updates={updates}", f"seed={seed}", f"share={out / 'shared'}"]
        if _command(words, folder.with_suffix(".log")):
            copy_results(folder, _ledgers(name, seed), str(books))
            final = json.loads((folder / "summary.json").read_text())["final"]
            print(f"{name} seed {seed}: final perplexity {final:.2f}, {time.monotonic() - started:.0f} s", flush=True)

    names = [name for name in ROWS if name.startswith(only)]
    tasks = [(seed, name) for seed in range(num_seeds) for name in names]
    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(run_row, [task for task in tasks if not (_ledgers(task[1], task[0]) / "summary.json").exists()]))


def _command(words: list[str], log: Path) -> bool:
    """Run a command of this software, append its output to the file `log`, and return whether it succeeded."""
    program = Path(sysconfig.get_path("scripts")) / words[0]
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with open(log, "a") as file:
        status = subprocess.run([program, *words[1:]], env=environment, stdout=file, stderr=file).returncode
    if status:
        print(f"{words[0]} ended with status {status}: see {log}", file=sys.stderr, flush=True)
    return status == 0


def _ledgers(name: str, seed: int) -> Path:
    """Return the folder of the committed ledger of one run."""
    return HERE / "ledgers" / f"growth_{name}" / f"seed_{seed}"


def tables() -> dict[str, str]:
    """Return file name -> table as Markdown, with the rows whose ledgers are committed; {} without ledgers."""
    found = {name: _summaries(name) for name in ROWS}
    lines = [
        "# Growing and fixed mixtures on books",
        "",
        "| learner | seeds | final perplexity | average perplexity | against 8 experts | against 12 experts | Comp |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in found.items():
        if row:
            means = " | ".join(
                _mean_text([one[key] for one in row.values()]) for key in ("final", "average_perplexity")
            )
            differences = " | ".join("" if name == base else _difference(row, found[base]) for base in FIXED)
            comp = statistics.mean(one["comp"] for one in row.values())
            lines.append(f"| {ROWS[name][0]} | {len(row)} | {means} | {differences} | {comp:.4g} |")
    if len(lines) == 4:
        return {}
    note = (
        "Differences are those of the final perplexity, paired over seeds, with their standard error. A difference is "
        "called better or worse if Student's 95% interval over 5 seeds excludes 0."
    )
    return {"growth.md": "\n".join([*lines, "", note, ""])}


def _summaries(name: str) -> dict[int, dict]:
    """Return the committed summaries of a row, by seed."""
    paths = {seed: _ledgers(name, seed) / "summary.json" for seed in range(SEEDS)}
    return {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}


def _difference(row: dict[int, dict], base: dict[int, dict]) -> str:
    """Return the difference of the final perplexities of two rows, and what it says, as text."""
    gaps = [row[seed]["final"] - base[seed]["final"] for seed in sorted(row.keys() & base.keys())]
    if len(gaps) < SEEDS:
        return _mean_text(gaps, signed=True)
    mean, error = statistics.mean(gaps), _error(gaps)
    verdict = "no difference seen" if abs(mean) <= T_95 * error else "better" if mean < 0 else "worse"
    return f"{_mean_text(gaps, signed=True)}, {verdict}"


def _mean_text(values: list[float], signed: bool = False) -> str:
    if not values:
        return ""
    text = f"{statistics.mean(values):{'+' if signed else ''}.2f}"
    return text if len(values) < 2 else f"{text} ± {_error(values):.2f}"


def _error(values: list[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run"], help="run what is missing")
    parser.add_argument("--books", type=Path, help="folder of the books (ALMA_DATA/books by default)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/growth", help="folder of the runs (runs/growth)")
    parser.add_argument("--side-by-side", type=int, default=2, help="number of runs at a time (default: 2)")
    parser.add_argument("--only", default="", help="run only rows whose name starts with this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of seeds (default: {SEEDS})")
    parser.add_argument("--hours", type=float, default=3.0, help="start no run after this many hours (default: 3)")
    arguments = parser.parse_args()
    if arguments.books is None and "ALMA_DATA" not in os.environ:
        sys.exit("no folder of books: give --books FOLDER, or set ALMA_DATA to the folder that contains books/")
    books = arguments.books or Path(os.environ["ALMA_DATA"]) / "books"
    run(books, arguments.out, arguments.side_by_side, arguments.only, arguments.seeds, arguments.hours)


if __name__ == "__main__":
    main()
