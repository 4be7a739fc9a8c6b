"""Train grids of alma-lm runs on text, at a size for two CPU cores, and copy their ledgers into results/.

results/books/study.py and the studies of text in results/frontier/ use this module. A run whose ledger is committed is
skipped, and a run that was killed is continued. results/rebuild.py makes the tables from the ledgers.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from _grid import copy_results

from fairseq_alma.core.files import write_json
from fairseq_alma.core.ledger import Ledger, LedgerRow
from fairseq_alma.core.metrics import period_losses

ROOT = Path(__file__).resolve().parents[1]

SEQUENCES_PER_UPDATE, TOKENS_PER_SAMPLE = 8, 128
SETTINGS = ("preset=quickstart", f"sequences_per_update={SEQUENCES_PER_UPDATE}", "batch_size=8", "lr=0.005",
            "parallel=1")  # fmt: skip
"""Settings of every run of the studies for two CPU cores."""
LEFT_OUT = "gitenberg_moby_dick"
"""The beginning of the name of a book file that is skipped, because it is a second copy of Moby-Dick."""


@dataclass(frozen=True)
class Row:
    """One row of a study's table."""

    name: str
    """Name of the run folder."""
    settings: tuple[str, ...]
    """Arguments of alma-lm besides SETTINGS and those of the study."""
    steps: str = "updates"
    """The setting of alma-lm that determines the length of a stage: updates or updates_per_mega_batch. Its value is
    that of the study, multiplied by `times`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds that are run."""
    times: float = 1
    """How many times the updates of the study each stage has."""


@dataclass(frozen=True)
class TextStudy(ABC):
    """A grid of runs on one stream. A subclass says how to make the stream.

    The ledger of a row ROW with seed SEED is committed as `ledgers`/ROW/seed_SEED.
    """

    rows: Sequence[Row]
    """The rows in the order in which they run. A row that reuses trained stages of another row comes after that row."""
    ledgers: Path
    """Folder of the committed ledgers."""
    settings: tuple[str, ...] = ("dropout=0.2",)
    """Arguments of alma-lm that all rows have, besides SETTINGS."""
    mega_batches: int = 4
    """Number of mega-batches that are trained on."""
    passes: float = 5
    """Passes over a mega-batch in each stage."""
    common: ClassVar[tuple[str, ...]] = SETTINGS
    """Settings of every run of the study, before those of the study and of the row."""
    tokens_per_update: ClassVar[int] = SEQUENCES_PER_UPDATE * TOKENS_PER_SAMPLE
    """Number of tokens in an update, with the settings in `common`."""
    actions: ClassVar[Mapping[str, str]] = {"run": "run what is missing"}
    """What the command line can ask for -> help text."""
    data: ClassVar[str]
    """Name of the folder with the text of the study, in the folder that ALMA_DATA names. The option --NAME replaces
    it. "." is the folder ALMA_DATA itself, which the option --data replaces."""

    @abstractmethod
    def prepare(self, data: Path, out: Path) -> list[str]:
        """Return the arguments of alma-prep that make the stream, without its folder.

        Args:
            data: the folder with the text.
            out: the folder of the runs.
        """

    def main(self, description: str | None, out: str, subfolder: str = "") -> None:
        """Read the command line and do what it asks for.

        Args:
            description: text for --help.
            out: default folder of the runs.
            subfolder: name of a folder in this folder, for a script that has several streams.
        """
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        help_text = "; ".join(f"{name}: {text}" for name, text in self.actions.items())
        parser.add_argument("what", choices=[*self.actions], help=help_text)
        help_text = f"folder of the text (default: {Path('ALMA_DATA', self.data)})"
        parser.add_argument(self._option, type=Path, dest="data", metavar="FOLDER", help=help_text)
        parser.add_argument("--out", type=Path, default=Path(out), help=f"folder of the runs (default: {out})")
        parser.add_argument("--side-by-side", type=int, default=2, help="number of runs at a time, one thread each")
        parser.add_argument("--only", default="", help="run only rows whose name starts with this")
        parser.add_argument("--seeds", type=int, default=99, help="number of seeds (default: all of the study)")
        parser.add_argument("--hours", type=float, default=3.0, help="start no run after this many hours (default: 3)")
        arguments = parser.parse_args()
        if arguments.data is None and (root := os.environ.get("ALMA_DATA")):
            arguments.data = Path(root, self.data)
        self.do(arguments, arguments.out / subfolder)

    def do(self, arguments: argparse.Namespace, out: Path) -> None:
        """Train the runs that are missing and copy their ledgers.

        Args:
            arguments: the command line.
            out: the folder of the runs.
        """
        rows = [row for row in self.rows if row.name.startswith(arguments.only)]
        # Train all rows with one seed first, so that the table is complete even if time runs out.
        tasks = [(seed, row) for seed in range(arguments.seeds) for row in rows if seed in row.seeds]
        missing = [(seed, row) for seed, row in tasks if not (self._folder(row.name, seed) / "summary.json").exists()]
        if missing:
            deadline = time.monotonic() + 3600 * arguments.hours
            stream, data = self._stream(arguments, out), str(arguments.data or "data")
            self._run(missing, stream, data, out, arguments.side_by_side, deadline)

    @property
    def _option(self) -> str:
        """The option of the command line for the folder of the text."""
        return "--data" if self.data == "." else f"--{self.data}"

    def _stream(self, arguments: argparse.Namespace, out: Path) -> Path:
        """Return the folder of the stream, which is made of the text if it does not exist.

        Without the stream and the text, this script exits.
        """
        stream = out / "stream"
        if (stream / "stream.json").exists():  # finished here, or copied from another machine
            return stream
        if arguments.data is None:
            sys.exit(f"no text: give {self._option} FOLDER, or copy the stream from another machine to {stream}")
        return self._make_stream(arguments.data, out)

    def _run(
        self, tasks: Sequence[tuple[int, Row]], stream: Path, data: str, out: Path, side_by_side: int, deadline: float
    ) -> None:
        def run_row(task: tuple[int, Row]) -> None:
            seed, row = task
            folder, started = out / row.name / f"seed_{seed}", time.monotonic()
            if self.train(row, seed, stream, folder, deadline):
                copy_results(folder, self._folder(row.name, seed), data, out)
                final = json.loads((folder / "summary.json").read_text())["final"]
                seconds = time.monotonic() - started
                print(f"{row.name} seed {seed}: final perplexity {final:.2f}, {seconds:.0f} s", flush=True)

        with ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(run_row, tasks))

    def train(self, row: Row, seed: int, stream: Path, folder: Path, deadline: float) -> bool:
        """Train a row with one seed in the run folder `folder`, in the folder of its row in the folder of all runs.

        Return False if the deadline, a time of `time.monotonic`, has passed or the run has failed.
        """
        if time.monotonic() > deadline:
            return False
        updates = math.ceil(row.times * self.updates_of_stage(stream))
        words = ["alma-lm", f"stream={stream}", f"out={folder}", *self.common, f"mega_batches={self.mega_batches}"]
        words += [*self.settings, *row.settings]
        words += [f"{row.steps}={updates}", f"seed={seed}", f"reuse_from={folder.parents[1] / 'shared'}"]
        return run_command(words, folder.with_name(f"{folder.name}.log"))

    def _make_stream(self, data: Path, out: Path) -> Path:
        """Make the stream if it does not exist, and return its folder."""
        stream = out / "stream"
        if not run_command(["alma-prep", str(stream), *self.prepare(data, out)], out / "stream.log"):
            sys.exit(1)
        return stream

    def updates_of_stage(self, stream: Path) -> int:
        """Return the number of updates of `passes` over a mega-batch.

        If the committed ledgers belong to another stream, this script exits.
        """
        splits = json.loads((stream / "stream.json").read_text())["splits"]
        evaluated_on = [splits[split]["sha256"] for split in ("valid", "test")]
        for row in self.rows:
            for settings in self.ledgers.glob(f"{row.name}/*/settings.json"):
                if json.loads(settings.read_text())["evaluated_on"] != evaluated_on:
                    sys.exit(f"{settings.parent} belongs to another stream than {stream}: remove it to run it again")
        largest = max(splits[f"mega_batch_{t}"]["tokens"] for t in range(1, self.mega_batches + 1))
        return math.ceil(self.passes * largest / self.tokens_per_update)

    def rows_by_seed(self, name: str) -> dict[int, list[LedgerRow]]:
        """Return the rows of the committed ledgers of a row of the study, by seed."""
        paths = {seed: next(folder.glob("ledger.jsonl*")) for seed, folder in self._committed(name).items()}
        return {seed: Ledger(path).rows() for seed, path in paths.items()}

    def summaries(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the committed summary.json of a row of the study, by seed."""
        return {seed: json.loads((path / "summary.json").read_text()) for seed, path in self._committed(name).items()}

    def _committed(self, name: str) -> dict[int, Path]:
        folders = sorted(self.ledgers.glob(f"{name}/seed_*"))
        return {int(folder.name.split("_")[1]): folder for folder in folders}

    def _folder(self, name: str, seed: int) -> Path:
        return self.ledgers / name / f"seed_{seed}"


@dataclass(frozen=True)
class BookStudy(TextStudy):
    """A grid of runs on a stream of nine books."""

    parts: int = 50
    """Number of mega-batches into which alma-prep cuts the books. Only the first ones are trained on. The test set is
    as large as a mega-batch."""
    data: ClassVar[str] = "books"

    def prepare(self, data: Path, out: Path) -> list[str]:
        sources = link_books(data, out / "books")
        options = ["--vocab-size", "8000", "--valid-words", "10000", "--seed", "0"]
        return ["--source", f"books:{sources}", "--mega-batches", str(self.parts), *options]


def link_books(data: Path, folder: Path) -> Path:
    """Make links to all books in the folder `data` and its subfolders. Return `folder`, with the links.

    README.md and the second copy of one book are left out. Without the folder `data`, this script exits.
    """
    if not data.is_dir():
        sys.exit(f"there is no folder {data}: give that of the books")
    folder.mkdir(parents=True, exist_ok=True)
    for old in filter(Path.is_symlink, folder.iterdir()):
        old.unlink()
    for book in sorted(data.rglob("*")):
        if book.suffix in (".md", ".txt") and not book.name.startswith((LEFT_OUT, "README")):
            (folder / " - ".join(book.relative_to(data).parts)).symlink_to(book.absolute())
    return folder


def setting_of_width(width: int) -> str:
    """Return the argument of alma-lm that gives a language model another width, with heads of 32 values."""
    return (
        f"fairseq=--decoder-embed-dim {width} --decoder-ffn-embed-dim {4 * width} "
        f"--decoder-attention-heads {width // 32}"
    )


def cut_at_lines(text: str, words: int) -> list[str]:
    """Return the text in parts of at least `words` words, cut at the ends of lines. The rest is left out."""
    parts: list[str] = []
    lines: list[str] = []
    count = 0
    for line in text.splitlines():
        lines.append(line)
        count += len(line.split())
        if count >= words:
            parts.append("\n".join(lines))
            lines, count = [], 0
    return parts


def run_command(words: Sequence[str], log: Path) -> bool:
    """Run a command of this software, append its output to the file `log`, and return whether it succeeded."""
    program = Path(sysconfig.get_path("scripts")) / words[0]
    log.parent.mkdir(parents=True, exist_ok=True)
    # Use one thread per run, because two runs at a time make more progress than one run with two threads.
    # Plugins of rows are modules of the repository, such as results.rivals.lwf.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": path}
    with open(log, "a") as file:
        status = subprocess.run([program, *words[1:]], env=environment, stdout=file, stderr=file).returncode
    if status:
        print(f"{words[0]} ended with status {status}: see {log}", file=sys.stderr, flush=True)
    return status == 0


def size_of(split: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of words, bytes and tokens of a split in stream.json."""
    return {unit: split[unit] for unit in ("words", "bytes", "tokens")}


def period_sizes(stream: Path) -> list[dict[str, Any]]:
    """Return the dates, and the words, bytes and tokens, of each period of a chronological stream."""
    description = json.loads((stream / "stream.json").read_text())
    return [
        {
            "first_date": period["first_date"],
            "last_date": period["last_date"],
            "train": size_of(description["splits"][f"mega_batch_{t}"]),
            "test": size_of(period["test"]),
        }
        for t, period in enumerate(description["periods"], start=1)
    ]


def add_sizes(file: Path, name: str, stream: Path) -> None:
    """Add the sizes of the periods of a chronological stream, under a name, to a JSON file that is committed."""
    write_json(file, read_sizes(file) | {name: period_sizes(stream)})


def read_sizes(file: Path) -> dict[str, Any]:
    """Return name -> sizes of the periods, as `add_sizes` wrote them; {} if the file does not exist."""
    return json.loads(file.read_text()) if file.exists() else {}


def bits_per_byte(rows: Sequence[LedgerRow], periods: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    """Return the matrix of losses of a run: arrival t from 1 -> bits per byte of the test text of each period.

    Args:
        rows: the rows of the ledger.
        periods: the return value of `period_sizes`.
    """
    tokens_per_byte = [period["test"]["tokens"] / period["test"]["bytes"] for period in periods]
    return {
        row.t: [loss * ratio / math.log(2) for loss, ratio in zip(period_losses(row), tokens_per_byte, strict=True)]
        for row in rows
        if row.t >= 1
    }


def parts_of_matrix(rows: Sequence[LedgerRow], periods: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bits per byte of a run over parts of its matrix of losses, averaged over the arrivals from t = 2 on.

    The parts are the periods that have arrived, the newest of them, and the next one; "last" are all periods after the
    last arrival.

    Args:
        rows: the rows of the ledger.
        periods: the return value of `period_sizes`.
    """
    matrix = {t: losses for t, losses in bits_per_byte(rows, periods).items() if t >= 2}
    return {
        "arrived": statistics.mean(statistics.mean(losses[:t]) for t, losses in matrix.items()),
        "newest": statistics.mean(losses[t - 1] for t, losses in matrix.items()),
        "next": statistics.mean(losses[t] for t, losses in matrix.items() if t < len(losses)),
        "last": statistics.mean(matrix[max(matrix)]),
    }


def arrived_and_last(rows: Sequence[LedgerRow]) -> dict[str, float]:
    """Return the bits per byte of the test set, averaged over the arrivals from t = 2 on, and after the last one."""
    losses = [bits for row in rows[2:] if (bits := row.scores.bits_per_byte) is not None]
    return {"arrived": statistics.mean(losses), "last": losses[-1]}


def last_perplexity(rows: Sequence[LedgerRow]) -> float:
    """Return the test perplexity after the last arrival."""
    perplexity = rows[-1].scores.perplexity
    assert perplexity is not None  # every ledger row of a language model has a perplexity
    return perplexity


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return statistics.stdev(values) / len(values) ** 0.5


def mean_text(values: Sequence[float], digits: int = 1, signed: bool = False) -> str:
    """Return the mean as text, with its standard error if there are several values; "" without values."""
    if not values:
        return ""
    text = f"{statistics.mean(values):{'+' if signed else ''}.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {standard_error(values):.{digits}f}"


def change_text(base: Mapping[int, Mapping[str, float]], own: Mapping[int, Mapping[str, float]], part: str) -> str:
    """Return by how many percent a part of the scores of runs differs from that of other runs with the same seeds.

    Args:
        base, own: seed -> part -> score.
        part: the part.

    Returns:
        Text; "" if no seed is in both.
    """
    both = sorted(base.keys() & own.keys())
    return mean_text([100 * (own[seed][part] / base[seed][part] - 1) for seed in both], signed=True)


def training_flops(runs: Mapping[int, Sequence[LedgerRow]]) -> float:
    """Return the training FLOPs of a run, averaged over the seeds. `runs` maps each seed to the rows of its ledger."""
    return statistics.mean(sum(row.spent.train_flops for row in rows) for rows in runs.values())


def arrival_table(
    heading: str,
    texts: Mapping[str, str],
    found: Mapping[str, Mapping[int, Sequence[LedgerRow]]],
    base: str,
    best_first: bool = True,
) -> str:
    """Return a table as Markdown: the test perplexity of each row after each arrival.

    Args:
        heading: the heading above the table.
        texts: for each row, how the table names it.
        found: for each row, seed -> rows of its ledger. Rows without a ledger are left out of the table.
        base: the row, one that trains at each arrival, to whose FLOPs those of the others are relative.
        best_first: if False, the rows are in the order of `found`.
    """
    arrivals = range(1, len(next(iter(found[base].values()))))
    lines = [
        f"# {heading}",
        "",
        f"| learner |{''.join(f' t = {t} |' for t in arrivals)} seeds | training FLOPs |",
        f"|:---|{'---:|' * (len(arrivals) + 2)}",
    ]
    named = [(name, runs) for name, runs in found.items() if runs]
    for name, runs in sorted(named, key=lambda one: _final(one[1])) if best_first else named:
        cost = training_flops(runs) / training_flops(found[base])
        cells = " | ".join(_perplexity(runs, t) for t in arrivals)
        lines.append(f"| {texts[name]} | {cells} | {len(runs)} | {cost:.2f} |")
    note = f"Test perplexity, mean over seeds. FLOPs are relative to {texts[base]}."
    return "\n".join([*lines, "", note, ""])


def _final(runs: Mapping[int, Sequence[LedgerRow]]) -> float:
    """Return the perplexity after the last arrival, by which the lines are sorted."""
    return statistics.mean(last_perplexity(rows) for rows in runs.values())


def _perplexity(runs: Mapping[int, Sequence[LedgerRow]], t: int) -> str:
    """Return the perplexity after an arrival as text; "" before the first training and after the last arrival."""
    rows = [one for rows in runs.values() for one in rows[t : t + 1] if one.stage > 0]
    return mean_text([last_perplexity([row]) for row in rows])
