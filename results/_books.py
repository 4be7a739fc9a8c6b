"""Train grids of alma-lm runs on nine books, at a size for two CPU cores.

results/books/study.py and results/frontier/books.py use this module. A finished run is skipped, and a run that was
killed is continued.
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

PARTS = 50
"""Number of mega-batches into which alma-prep cuts the books. Only the first 4 are trained on. The test set is as large
as a mega-batch. Larger mega-batches would be better, but all runs had to fit into 90 minutes."""
MEGA_BATCHES = 4
PASSES = 5
"""Passes over a mega-batch in each stage."""
SEQUENCES_PER_UPDATE, TOKENS_PER_SAMPLE = 8, 128
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
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds that are run."""


@dataclass(frozen=True)
class BookStudy:
    """A grid of runs on the stream of the books.

    The ledger of a row ROW with seed SEED is committed as `ledgers`/ROW/seed_SEED.
    """

    rows: Sequence[Row]
    """The rows in the order in which they run. A row that reuses trained stages of another row comes after that row."""
    ledgers: Path
    """Folder of the committed ledgers."""

    def main(self, description: str | None) -> None:
        """Read the command line, and train the runs or copy their ledgers."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("action", choices=["run", "collect"], help="train, or copy the ledgers")
        parser.add_argument("--books", type=Path, help="folder of the books (ALMA_DATA/books by default)")
        parser.add_argument(
            "--out", type=Path, default=Path("runs/books"), help="folder of the runs (default: runs/books)"
        )
        parser.add_argument("--missing", action="store_true", help="run only rows and seeds without a committed ledger")
        parser.add_argument("--processes", type=int, default=2, help="number of runs at a time, one thread each")
        arguments = parser.parse_args()
        if arguments.action == "collect":
            self.collect(arguments.out)
            return
        if arguments.books is None and "ALMA_DATA" not in os.environ:
            sys.exit("no folder of books: give --books FOLDER, or set ALMA_DATA to the folder that contains books/")
        books = arguments.books or Path(os.environ["ALMA_DATA"]) / "books"
        self.run(books, arguments.out, arguments.processes, arguments.missing)

    def run(self, books: Path, out: Path, processes: int, missing: bool) -> None:
        """Make the stream and train all rows. Finished work is skipped.

        Args:
            books: folder of the books, .md or .txt files.
            out: folder for the stream and the runs.
            processes: number of runs at a time, each with one thread.
            missing: run only rows and seeds whose ledger is not committed.
        """
        stream, updates = _make_stream(books, out)

        def run_row(task: tuple[int, Row]) -> None:
            seed, row = task
            folder = out / row.name / f"seed_{seed}"
            started = time.monotonic()
            settings = [*SETTINGS, *row.settings, f"{row.steps}={updates}", f"seed={seed}", f"share={out / 'shared'}"]
            _run_command(["alma-lm", f"stream={stream}", f"out={folder}", *settings], folder.with_suffix(".log"))
            print(f"{row.name} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)

        # Train all rows with one seed first, then further seeds row by row, so that the table is complete even if time
        # runs out.
        tasks = [(row.seeds[0], row) for row in self.rows]
        tasks += [(seed, row) for row in self.rows for seed in row.seeds[1:]]
        if missing:
            tasks = [(seed, row) for seed, row in tasks if not self._ledger_folder(row.name, seed).exists()]
        started = time.monotonic()
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(run_row, tasks))
        print(f"all runs: {(time.monotonic() - started) / 60:.1f} minutes in this process")

    def collect(self, out: Path) -> None:
        """Copy the ledgers of finished runs into the folder of the committed ledgers.

        Committed ledgers of runs on a different stream are deleted.
        """
        splits = json.loads((out / "stream" / "stream.json").read_text())["splits"]
        evaluated_on = [splits[split]["sha256"] for split in ("valid", "test")]
        for settings in self.ledgers.glob("*/*/settings.json"):
            if json.loads(settings.read_text())["evaluated_on"] != evaluated_on:
                shutil.rmtree(settings.parent)
        for row in self.rows:
            for seed in row.seeds:
                source, target = out / row.name / f"seed_{seed}", self._ledger_folder(row.name, seed)
                summary = source / "summary.json"
                if not summary.exists() or json.loads(summary.read_text())["num_arrivals"] < MEGA_BATCHES:
                    continue
                target.mkdir(parents=True, exist_ok=True)
                for name in ("ledger.jsonl", "settings.json", "summary.json", "provenance.json"):
                    shutil.copyfile(source / name, target / name)

    def rows_by_seed(self, name: str) -> dict[int, list[LedgerRow]]:
        """Return the rows of the committed ledgers of a row of the study, by seed."""
        folders = sorted(self.ledgers.glob(f"{name}/seed_*"))
        return {int(folder.name.split("_")[1]): Ledger(folder / "ledger.jsonl").rows() for folder in folders}

    def _ledger_folder(self, name: str, seed: int) -> Path:
        return self.ledgers / name / f"seed_{seed}"


def _make_stream(books: Path, out: Path) -> tuple[Path, int]:
    """Make the stream if it does not exist. Return its folder and the number of updates of PASSES mega-batches."""
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
    return stream, -(-PASSES * largest // (SEQUENCES_PER_UPDATE * TOKENS_PER_SAMPLE))


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


def last_perplexity(rows: Sequence[LedgerRow]) -> float:
    """Return the test perplexity after the last arrival."""
    perplexity = rows[-1].scores.perplexity
    assert perplexity is not None  # every ledger row of a language model has a perplexity
    return perplexity


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Return (mean, standard error of the mean). The standard error is None for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5
