"""Train the learners of the paper's Table 2 on nine books, at a size for two CPU cores.

python results/books/study.py run --books FOLDER --out runs/books      train, two runs at a time; call again to continue
python results/books/study.py collect --out runs/books                 copy the ledgers into results/books/ledgers/
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
"""Seeds of the rows for which a finding is tested statistically, and seeds of all other rows."""
PARTS = 50
"""Number of mega-batches into which alma-prep cuts the books. Only the first 4 are trained on. The test set is as large
as a mega-batch. Larger mega-batches would be better, but all runs had to fit into 90 minutes."""
MEGA_BATCHES = 4
PASSES = 5
"""Passes over a mega-batch in each stage."""
SEQUENCES_PER_UPDATE, TOKENS_PER_SAMPLE = 8, 128
T_95 = 4.30
"""Half the width of a 95% confidence interval of a mean over 3 seeds, in standard errors (Student's t)."""
LEFT_OUT = "gitenberg_moby_dick"
"""The beginning of the name of a book file that is skipped, because it is a second copy of Moby-Dick."""
SETTINGS = ("preset=quickstart", f"sequences_per_update={SEQUENCES_PER_UPDATE}", "batch_size=8", "lr=0.005",
            "dropout=0.2", f"mega_batches={MEGA_BATCHES}", "parallel=1")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of the study's table."""

    name: str
    """Name of the run folder."""
    settings: tuple[str, ...]
    """Arguments of alma-lm besides SETTINGS."""
    steps: str = "updates"
    """The setting of alma-lm that determines the length of a stage: updates or updates_per_mega_batch. All rows use the
    same value for it."""
    seeds: tuple[int, ...] = SEEDS
    """Seeds that are run."""


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
"""The rows in the order in which they run. A row that reuses trained stages of another row comes after that row."""


@dataclass(frozen=True)
class Claim:
    """A finding of the paper: after the last mega-batch, row `better` has a lower test perplexity than row `worse`."""

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
    """Make the stream and train all rows. Finished work is skipped.

    Args:
        books: folder of the books, .md or .txt files.
        out: folder for the stream and the runs.
        processes: number of runs at a time, each with one thread.
        missing: run only rows and seeds whose ledger is not in results/books/ledgers/.
    """
    sources = out / "books"
    sources.mkdir(parents=True, exist_ok=True)
    for book in sorted(books.iterdir()):
        if book.suffix in (".md", ".txt") and not book.name.startswith(LEFT_OUT):
            (link := sources / book.name).unlink(missing_ok=True)
            link.symlink_to(book.absolute())
    stream = out / "stream"
    options = ["--mega-batches", str(PARTS), "--vocab-size", "8000", "--valid-words", "10000", "--seed", "0"]
    _run_command(["alma-prep", str(stream), "--source", f"books:{sources}", *options], out / "stream.log")
    splits = json.loads((stream / "stream.json").read_text())["splits"]
    largest = max(splits[f"mega_batch_{t}"]["tokens"] for t in range(1, MEGA_BATCHES + 1))
    updates = -(-PASSES * largest // (SEQUENCES_PER_UPDATE * TOKENS_PER_SAMPLE))

    def run_row(task: tuple[int, Row]) -> None:
        seed, row = task
        folder = out / row.name / f"seed_{seed}"
        started = time.monotonic()
        settings = [*SETTINGS, *row.settings, f"{row.steps}={updates}", f"seed={seed}", f"share={out / 'shared'}"]
        _run_command(["alma-lm", f"stream={stream}", f"out={folder}", *settings], folder.with_suffix(".log"))
        print(f"{row.name} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)

    # Train all rows with one seed first, then further seeds row by row, so that the table is complete even if time
    # runs out.
    tasks = [(SEEDS[0], row) for row in ROWS]
    tasks += [(seed, row) for row in ROWS for seed in SEEDS[1:] if seed in row.seeds]
    if missing:
        tasks = [(seed, row) for seed, row in tasks if not _ledger_folder(row, seed).exists()]
    started = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run_row, tasks))
    print(f"all runs: {(time.monotonic() - started) / 60:.1f} minutes in this process")


def _run_command(words: Sequence[str], log: Path) -> None:
    """Run a command of this software and append its output to the file `log`. Exit this script if the command fails."""
    program = Path(sysconfig.get_path("scripts")) / words[0]
    log.parent.mkdir(parents=True, exist_ok=True)
    # Use one thread per run, because two runs at a time make more progress than one run with two threads.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with open(log, "a") as file:
        status = subprocess.run([program, *words[1:]], env=environment, stdout=file, stderr=file).returncode
    if status:
        sys.exit(f"{words[0]} ended with status {status}: see {log}")


def collect(out: Path) -> None:
    """Copy the ledgers of finished runs into results/books/ledgers/.

    Committed ledgers of runs on a different stream are deleted.
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
    """Return the text of claims.md: for each finding of the paper, the difference that the committed ledgers show."""
    return "\n".join([*_claim_table({row.name: _rows_by_seed(row) for row in ROWS}), ""])


def _ledger_folder(row: Row, seed: int) -> Path:
    return LEDGERS / row.name / f"seed_{seed}"


def _rows_by_seed(row: Row) -> dict[int, list[LedgerRow]]:
    """Return the rows of the committed ledger of each seed. Seeds without a committed ledger are left out."""
    folders = {seed: _ledger_folder(row, seed) for seed in row.seeds}
    return {seed: Ledger(folder / "ledger.jsonl").rows() for seed, folder in folders.items() if folder.exists()}


def _claim_table(ledgers: dict[str, dict[int, list[LedgerRow]]]) -> list[str]:
    """Return the lines of a Markdown table: one line per claim, if ledgers of both rows of the claim are committed."""
    lines = ["| after the last mega-batch | difference of test perplexity, seed by seed | mean and standard error | |",
             "|---|---|---|---|"]  # fmt: skip
    for claim in CLAIMS:
        worse, better = ledgers[claim.worse], ledgers[claim.better]
        seeds = sorted(worse.keys() & better.keys())
        if not seeds:
            continue
        gains = [_last_perplexity(worse[seed]) - _last_perplexity(better[seed]) for seed in seeds]
        mean, stderr = _mean_and_stderr(gains)
        if stderr is None or len(gains) < 3:
            verdict = f"{len(gains)} seed(s): not claimed"
        elif abs(mean) > T_95 * stderr:
            verdict = "reproduced" if mean > 0 else "the opposite"
        else:
            verdict = "undecided"
        lines.append(
            f"| {claim.text} | {', '.join(f'{gain:+.1f}' for gain in gains)} | {_mean_text(gains)} | {verdict} |"
        )
    return lines


def _last_perplexity(rows: Sequence[LedgerRow]) -> float:
    perplexity = rows[-1].scores.perplexity
    assert perplexity is not None  # every ledger row of a language model has a perplexity
    return perplexity


def _mean_and_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Return (mean, standard error of the mean). The standard error is None for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5


def _mean_text(values: Sequence[float]) -> str:
    mean, stderr = _mean_and_stderr(values)
    return f"{mean:.1f}" if stderr is None else f"{mean:.1f} ± {stderr:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "collect"], help="train, or copy the ledgers")
    parser.add_argument("--books", type=Path, help="folder of the books (ALMA_DATA/books by default)")
    parser.add_argument("--out", type=Path, default=Path("runs/books"), help="folder of the runs (default: runs/books)")
    parser.add_argument(
        "--missing", action="store_true", help="run only rows and seeds without a ledger in results/books"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of runs at a time, one thread each")
    arguments = parser.parse_args()
    if arguments.action == "collect":
        collect(arguments.out)
        return
    if arguments.books is None and "ALMA_DATA" not in os.environ:
        sys.exit("no folder of books: give --books FOLDER, or set ALMA_DATA to the folder that contains books/")
    run(
        arguments.books or Path(os.environ["ALMA_DATA"]) / "books",
        arguments.out,
        arguments.processes,
        arguments.missing,
    )


if __name__ == "__main__":
    main()
