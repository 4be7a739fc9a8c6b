"""The learners of the paper's Table 2 on nine books, small enough for two cores.

python results/books/study.py run --books FOLDER --out runs/books      train, two runs at a time; run again to go on
python results/books/study.py collect --out runs/books                 ledgers into results/books/
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fairseq_alma.core.ledger import Ledger, LedgerRow

HERE = Path(__file__).parent
LEDGERS = HERE / "ledgers"
SEEDS, ONE_SEED = (0, 1, 2), (0,)
"""Three for the rows whose order is claimed."""
PARTS = 50
"""Equal parts the books are cut into; the first 4 are the stream, a 51st is its test set. More would be better and
would not fit the 90 minutes."""
MEGA_BATCHES = 4
PASSES = 5
SEQUENCES_PER_UPDATE, TOKENS_PER_SAMPLE = 8, 128
T_95 = 4.30
"""Student's t for 3 seeds, two-sided 95%."""
LEFT_OUT = "gitenberg_moby_dick"
"""A second copy of a book that is there."""
SETTINGS = ("preset=quickstart", f"sequences_per_update={SEQUENCES_PER_UPDATE}", "batch_size=8", "lr=0.005",
            "dropout=0.2", f"mega_batches={MEGA_BATCHES}", "parallel=1")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting of the study."""

    name: str
    settings: tuple[str, ...]
    steps: str = "updates"
    """Which of alma-lm's two ways to say how long a stage is; the number is that of one mega-batch in either."""
    seeds: tuple[int, ...] = SEEDS


ROWS = (
    Row("sm_w1_4", ("learner=sm", "wait=1", "experts=4")),
    Row("sm_w1_12", ("learner=sm", "wait=1", "experts=12")),
    Row("gmoe_w1", ("learner=gmoe", "wait=1", "experts=4", "grow_experts=[2,2,4]")),
    Row("ens_w1_4at2", ("learner=ens", "wait=1", "experts=4", "members=2")),
    Row("sm_w4_4_4x", ("learner=sm", "wait=4", "experts=4"), "updates_per_mega_batch"),
    Row("ens_w4_4at2_4x", ("learner=ens", "wait=4", "experts=4", "members=2"), "updates_per_mega_batch"),
    Row("sm_w1_8", ("learner=sm", "wait=1", "experts=8"), seeds=ONE_SEED),
    Row("gens_w1", ("learner=gens", "wait=1", "experts=4"), seeds=ONE_SEED),
    Row("sm_w4_4", ("learner=sm", "wait=4", "experts=4"), seeds=ONE_SEED),
)
"""In the order in which they are run: what shares stages with an earlier row comes after it."""


@dataclass(frozen=True)
class Claim:
    """An ordering of the paper's tables: after the last mega-batch `better` has the lower test perplexity."""

    text: str
    better: str
    worse: str


CLAIMS = (
    Claim("larger is better: SM with 12 experts against 4", "sm_w1_12", "sm_w1_4"),
    Claim("larger is better: SM with 8 experts against 4", "sm_w1_8", "sm_w1_4"),
    Claim("Ens is best: 4@2 against the largest SM (12 experts)", "ens_w1_4at2", "sm_w1_12"),
    Claim("Ens is best: 4@2 against gMoE", "ens_w1_4at2", "gmoe_w1"),
    Claim("growing is no better than fixed: SM with gMoE's last size (12 experts) against gMoE", "sm_w1_12", "gmoe_w1"),
    Claim("growing is no better than fixed: SM with gMoE's mean size (8 experts) against gMoE", "sm_w1_8", "gmoe_w1"),
    Claim("growing is no better than fixed: Ens 4@2 against gEns", "ens_w1_4at2", "gens_w1"),
    Claim("a sequence is harder than i.i.d.: Ens at wait 4, 4x steps, against wait 1", "ens_w4_4at2_4x", "ens_w1_4at2"),
    Claim("a sequence is harder than i.i.d.: SM at wait 4, 4x steps, against wait 1", "sm_w4_4_4x", "sm_w1_4"),
    Claim("more steps help: SM at wait 4, 4x steps against as many as one mega-batch", "sm_w4_4_4x", "sm_w4_4"),
)


def run(books: Path, out: Path, processes: int, missing: bool) -> None:
    """Stream and runs, or what is left of them; `missing`: only those without a ledger here."""
    sources = out / "books"
    sources.mkdir(parents=True, exist_ok=True)
    for book in sorted(books.iterdir()):
        if book.suffix in (".md", ".txt") and not book.name.startswith(LEFT_OUT):
            (link := sources / book.name).unlink(missing_ok=True)
            link.symlink_to(book.absolute())
    stream = out / "stream"
    _command(["alma-prep", str(stream), "--source", f"books:{sources}", "--mega-batches", str(PARTS),
              "--vocab-size", "8000", "--valid-words", "10000", "--seed", "0"], out / "stream.log")  # fmt: skip
    splits = json.loads((stream / "stream.json").read_text())["splits"]
    largest = max(splits[f"mega_batch_{t}"]["tokens"] for t in range(1, MEGA_BATCHES + 1))
    updates = -(-PASSES * largest // (SEQUENCES_PER_UPDATE * TOKENS_PER_SAMPLE))

    def one(task: tuple[int, Row]) -> None:
        seed, row = task
        folder = out / row.name / f"seed_{seed}"
        started = time.monotonic()
        _command(["alma-lm", f"stream={stream}", f"out={folder}", *SETTINGS, *row.settings, f"{row.steps}={updates}",
                  f"seed={seed}", f"share={out / 'shared'}"], folder.with_suffix(".log"))  # fmt: skip
        print(f"{row.name} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)

    # A whole table of one seed first, then row by row: what is there when time is up can be read.
    tasks = [(SEEDS[0], row) for row in ROWS]
    tasks += [(seed, row) for row in ROWS for seed in SEEDS[1:] if seed in row.seeds]
    if missing:
        tasks = [(seed, row) for seed, row in tasks if not _folder(row, seed).exists()]
    started = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, tasks))
    print(f"all runs: {(time.monotonic() - started) / 60:.1f} minutes in this process")


def _command(words: Sequence[str], log: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / words[0]
    log.parent.mkdir(parents=True, exist_ok=True)
    # One thread each: two runs side by side do more than one run on two threads.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with open(log, "a") as file:
        status = subprocess.run([program, *words[1:]], env=environment, stdout=file, stderr=file).returncode
    if status:
        sys.exit(f"{words[0]} ended with status {status}: see {log}")


def collect(out: Path) -> None:
    """Copy the ledgers of finished runs.

    A ledger that is here already is kept where it is of the same stream.
    """
    splits = json.loads((out / "stream" / "stream.json").read_text())["splits"]
    evaluated_on = [splits[split]["sha256"] for split in ("valid", "test")]
    for settings in LEDGERS.glob("*/*/settings.json"):
        if json.loads(settings.read_text())["evaluated_on"] != evaluated_on:
            shutil.rmtree(settings.parent)
    for row in ROWS:
        for seed in row.seeds:
            source, target = out / row.name / f"seed_{seed}", LEDGERS / row.name / f"seed_{seed}"
            summary = source / "summary.json"
            if not summary.exists() or json.loads(summary.read_text())["num_arrivals"] < MEGA_BATCHES:
                continue
            target.mkdir(parents=True, exist_ok=True)
            for name in ("ledger.jsonl", "settings.json", "summary.json", "provenance.json"):
                shutil.copyfile(source / name, target / name)


def claims() -> str:
    """claims.md: the orderings of the paper's tables, and what the committed ledgers say of them."""
    return "\n".join([*_claims({row.name: _ledgers(row) for row in ROWS}), ""])


def _folder(row: Row, seed: int) -> Path:
    return LEDGERS / row.name / f"seed_{seed}"


def _ledgers(row: Row) -> dict[int, list[LedgerRow]]:
    """By seed."""
    return {seed: Ledger(f / "ledger.jsonl").rows() for seed in row.seeds if (f := _folder(row, seed)).exists()}


def _claims(ledgers: dict[str, dict[int, list[LedgerRow]]]) -> list[str]:
    lines = ["| after the last mega-batch | difference of test perplexity, seed by seed | mean and standard error | |",
             "|---|---|---|---|"]  # fmt: skip
    for claim in CLAIMS:
        worse, better = ledgers[claim.worse], ledgers[claim.better]
        seeds = sorted(worse.keys() & better.keys())
        if not seeds:
            continue
        gains = [worse[seed][-1].scores.perplexity - better[seed][-1].scores.perplexity for seed in seeds]
        mean, se = _moments(gains)
        if len(gains) < 3:
            verdict = f"{len(gains)} seed(s): not claimed"
        elif abs(mean) > T_95 * se:
            verdict = "reproduced" if mean > 0 else "the opposite"
        else:
            verdict = "undecided"
        lines.append(
            f"| {claim.text} | {', '.join(f'{gain:+.1f}' for gain in gains)} | {_mean_se(gains)} | {verdict} |"
        )
    return lines


def _moments(values: Sequence[float]) -> tuple[float, float | None]:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5


def _mean_se(values: Sequence[float]) -> str:
    mean, se = _moments(values)
    return f"{mean:.1f}" if se is None else f"{mean:.1f} ± {se:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "collect"])
    parser.add_argument("--books", type=Path, help="folder of the books (ALMA_DATA/books by default)")
    parser.add_argument("--out", type=Path, default=Path("runs/books"))
    parser.add_argument("--missing", action="store_true", help="only the runs whose ledgers are not in results/books")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    arguments = parser.parse_args()
    if arguments.verb == "collect":
        collect(arguments.out)
        return
    if arguments.books is None and "ALMA_DATA" not in os.environ:
        sys.exit("which books? Give --books FOLDER, or set ALMA_DATA to the folder that holds books/")
    run(
        arguments.books or Path(os.environ["ALMA_DATA"]) / "books",
        arguments.out,
        arguments.processes,
        arguments.missing,
    )


if __name__ == "__main__":
    main()
