"""Compare preset=anytime with other recipes for models that learn in sequence, on two causal streams and on books.

python results/frontier/rivals.py select --data FOLDER            choose settings: 70 runs on WikiText-2
python results/frontier/rivals.py run --data FOLDER               train what has no ledger, two runs at a time
python results/frontier/rivals.py run --data FOLDER --only sotu --seeds 1     only the speeches, only seed 0

FOLDER contains dated/sotu.jsonl and dated/peps.jsonl (one JSON object per line, with the fields text and date), the
folder books, and wikitext-2/valid.txt and test.txt. The four streams that are compared:

- sotu, peps: each is cut into ten periods of about equal words, with --causal: tokenizer and validation set are those
  of the first period. A stage has as many updates as 0.3 passes over the largest period.
- books_1, books_5: four mega-batches of nine books, all of the same mix. A stage of books_1 has one pass over 194,000
  words, a stage of books_5 five passes over 39,000 words, with dropout.

All rows validate once, after the last update of a stage, so that the last checkpoint predicts: the validation set of
the causal streams is text of the first period.

Recipes that need more computation in an update have fewer updates, so that the training FLOPs are those of anytime.
Retraining from scratch has as many updates, too, so it reads less of each mega-batch the more there are. The plugins in
results/rivals name the sources of the recipes.

On a machine without the text, copy the streams from another one (runs/rivals/*/stream), and leave out --data and
ALMA_DATA. A run takes four (WikiText-2) to ten minutes of a CPU core. Eighteen runs at a time on an H200 with 16 cores
take one to two minutes, with NVIDIA's Multi-Process Service.

`select` tries the values of `Recipe.grid` on another stream, WikiText-2, and `run` uses what was chosen there.
results/SELECTION.md says how. The results are in rivals_selection.json. results/rebuild.py makes
results/frontier/rivals.md and rivals_by_stream.md of the committed ledgers and of rivals_streams.json, which this
script writes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _selection import Choices  # noqa: E402
from _texts import (  # noqa: E402
    SETTINGS,
    Row,
    TextStudy,
    add_sizes,
    arrived_and_last,
    link_books,
    mean_text,
    parts_of_matrix,
    read_sizes,
    training_flops,
)

from fairseq_alma.core.ledger import Ledger, LedgerRow  # noqa: E402

SEEDS, SELECTION_SEED = 5, 100
SELECTION, SIZES = Choices(HERE / "rivals_selection.json", "validation_loss"), HERE / "rivals_streams.json"

LR, WARMUP = ("0.005", "0.0025", "0.01"), ("10", "40")
REPLAY, KEEP, CONSTANT, AVERAGE = "replay=0.5", "optimizer_state=keep", "schedule=constant", "average=power:8"
WARMED = ("lr={lr}", "warmup_updates={warmup}")
ANYTIME = (REPLAY, KEEP, CONSTANT, AVERAGE, *WARMED)
FROM_SCRATCH = ("from_scratch=true", "replay=all", *WARMED)
GRID = {"lr": LR, "warmup": WARMUP}


def _same(stages: int, updates: int) -> float:
    return 1


def _with_teacher(stages: int, updates: int) -> float:
    """From the second stage on, the forward passes of a teacher add a third of the FLOPs."""
    return 1 / (1 + (stages - 1) / stages / 3)


def _with_fisher(stages: int, updates: int) -> float:
    """Before each stage but the first, the Fisher information takes 100 sequences, as many as 12.5 updates."""
    return 1 - 12.5 * (stages - 1) / stages / updates


def _wide(stages: int, updates: int) -> float:
    return 1 / 1.404


@dataclass(frozen=True)
class Recipe:
    """One row of the tables."""

    label: str
    """The name in the tables."""
    settings: tuple[str, ...]
    """Arguments of alma-lm. {NAME} stands for the value that was chosen from the grid."""
    plugin: str = ""
    """Name of the plugin in results/rivals, if it needs one."""
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GRID)
    """Name -> the values that are tried. They are tried name by name, in this order; names that are still to come have
    their first value."""
    as_for: str = ""
    """Another recipe whose choice this one uses, instead of one of its own."""
    times: Callable[[int, int], float] = _same
    """A function from the numbers of stages and of the updates of one of anytime to how many times these updates a
    stage has, so that the training FLOPs are those of anytime."""

    def arguments(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """Return the arguments of alma-lm with these values from the grid."""
        plugin = (f"plugin=results.rivals.{self.plugin}",) if self.plugin else ()
        return (*plugin, *(text.format_map(values) for text in self.settings))


def _continued(schedule: str, *more: str) -> tuple[str, ...]:
    options = f"fairseq=--lr-scheduler {schedule} --cooldown-share {{cooldown}}"
    return ("learner=continued", REPLAY, KEEP, *WARMED, options, *more)


TIC_LM = ("learner=tic_lm", "later_lr_ratio={later}", REPLAY, *WARMED, "fairseq=--lr-scheduler cosine")
SHARE = {"cooldown": ("0.2", "0.5")}
LWF = "fairseq=--criterion lwf --distillation-weight {weight}"
FREE = "fairseq=--optimizer schedule_free --schedule-free-r {r} --adam-betas ({beta},0.98)"
RECIPES = {
    "anytime": Recipe("**anytime**", ANYTIME),
    "sm": Recipe("SM", WARMED),
    "sm_replay": Recipe("SM, `replay=0.5`", (REPLAY, *WARMED)),
    "tic_lm": Recipe(
        "TiC-LM: AR cosines, `replay=0.5`", TIC_LM, "tic_lm", GRID | {"later": ("1", "0.5", "0.2", "0.1")}
    ),
    "wsd": Recipe("WSD, `replay=0.5`", _continued("wsd"), "schedules", GRID | SHARE),
    "wsd_average": Recipe("WSD and average, `replay=0.5`", _continued("wsd", AVERAGE), "schedules", GRID | SHARE),
    # The rate falls to half after four times the warm-up.
    "rsqrt": Recipe(
        "inverse square root, `replay=0.5`",
        _continued("rsqrt"),
        "schedules",
        {"lr": LR, "warmup": ("10", "40", "160", "640"), **SHARE},
    ),
    "retrained": Recipe("retrained on everything", FROM_SCRATCH),
    "retrained_2": Recipe(
        "retrained on everything, wait 2", (*FROM_SCRATCH, "wait=2"), times=lambda stages, updates: 2
    ),
    "lwf": Recipe(
        "LwF, `replay=0.5`",
        ("learner=lwf", LWF, REPLAY, *WARMED),
        "lwf",
        GRID | {"weight": ("1", "0.3", "3")},
        times=_with_teacher,
    ),
    "ewc": Recipe(
        "EWC",
        ("learner=ewc", "fairseq=--criterion ewc --ewc-weight {weight}", *WARMED),
        "ewc",
        GRID | {"weight": ("0.01", "0.001", "0.1")},
        times=_with_fisher,
    ),
    "shrink": Recipe(
        "shrink and perturb, `replay=0.5`",
        ("learner=shrink", "shrink={shrink}", REPLAY, *WARMED),
        "shrink",
        GRID | {"shrink": ("0.6", "0.4", "0.8", "0.9")},
    ),
    "no_average": Recipe("anytime without the average", (REPLAY, KEEP, CONSTANT, *WARMED), as_for="anytime"),
    "no_replay": Recipe("anytime without replay", (KEEP, CONSTANT, AVERAGE, *WARMED), as_for="anytime"),
    "new_state": Recipe(
        "anytime with a new optimizer state in each stage", (REPLAY, CONSTANT, AVERAGE, *WARMED), as_for="anytime"
    ),
    "decaying": Recipe("anytime with a decaying rate", (REPLAY, KEEP, AVERAGE, *WARMED), as_for="anytime"),
    "dense": Recipe("anytime, dense, as many active parameters", (*ANYTIME, "experts=1"), as_for="anytime"),
    # Its 4 layers have 10 times 512 hidden units, like 2 dense layers and 2 mixtures of 4 experts. It needs 1.404 times
    # the FLOPs.
    "dense_total": Recipe(
        "anytime, dense, as many parameters",
        (*ANYTIME, "experts=1", "fairseq=--decoder-ffn-embed-dim 1280"),
        as_for="anytime",
        times=_wide,
    ),
    "schedule_free": Recipe(
        "schedule-free AdamW, `replay=0.5`",
        (REPLAY, KEEP, CONSTANT, FREE, *WARMED),
        "schedule_free",
        {"lr": (*LR, "0.02"), "warmup": WARMUP, "r": ("0", "8"), "beta": ("0.9", "0.95")},
    ),
}
"""Name -> recipe, in the order in which they run. The last one needs a package that may be missing."""


@dataclass(frozen=True)
class RivalStudy(TextStudy):
    """The runs on one stream. The run of a recipe has the name `prefix` + recipe."""

    stream: str = ""
    """Name of the stream."""
    heading: str = ""
    """Heading of its table."""
    column: str = ""
    """Its name in the table that compares streams."""
    source: str = ""
    """Kind and file of the text, as in alma-prep's --source, with the file in the folder of the data."""
    options: tuple[str, ...] = ()
    """Other arguments of alma-prep."""
    selected_on: "RivalStudy | None" = None
    """The study, on another stream, by which the settings are chosen; None for such a study itself."""
    recipes: ClassVar[Mapping[str, Recipe]] = RECIPES
    data: ClassVar[str] = "."
    common: ClassVar[tuple[str, ...]] = (
        *(text for text in SETTINGS if not text.startswith("lr=")),
        "precision=float32", "validations=1",
    )  # fmt: skip
    actions: ClassVar[Mapping[str, str]] = {**TextStudy.actions, "select": "choose settings on another stream"}

    @property
    def prefix(self) -> str:
        """How the names of the runs begin."""
        return f"{self.stream}_rival_"

    @property
    def has_periods(self) -> bool:
        """Whether the mega-batches are periods, each with its own test text."""
        return "--period" in self.options

    def prepare(self, data: Path, out: Path) -> list[str]:
        kind, file = self.source.split(":")
        path = link_books(data / file, out / "books") if kind == "books" else data / file
        return ["--source", f"{kind}:{path}", "--vocab-size", "8000", *self.options]

    def _stream(self, arguments: argparse.Namespace, out: Path) -> Path:
        stream = super()._stream(arguments, out)
        if self.has_periods:
            add_sizes(SIZES, self.stream, stream)
        return stream

    def chosen(self, name: str) -> dict[str, str] | None:
        """Return the values with the lowest loss on validation text for a recipe; None if not all were tried."""
        name, study = self.recipes[name].as_for or name, self.selected_on or self
        return SELECTION.best(study.stream, name, study.recipes[name].grid)

    def row(self, name: str, values: Mapping[str, str], updates: int) -> Row:
        """Return the runs of a recipe with these values from its grid, if a stage of anytime has `updates` updates."""
        recipe = self.recipes[name]
        times = recipe.times(self.mega_batches, updates)
        return Row(f"{self.prefix}{name}", recipe.arguments(values), seeds=tuple(range(SEEDS)), times=times)

    def _select(self, arguments: argparse.Namespace, out: Path) -> None:
        """Try the grid of each recipe, with one seed, and write the losses on validation text to SELECTION."""
        stream = self._stream(arguments, out)
        updates = self.updates_of_stage(stream)
        deadline = time.monotonic() + 3600 * arguments.hours

        def search(name: str) -> None:
            def measure(values: dict[str, str]) -> float | None:
                run = out / f"{self.prefix}{name}" / "_".join(values.values())
                # The ledgers are not committed. The test set is scored, too, but nothing here reads these scores.
                if not self.train(self.row(name, values, updates), SELECTION_SEED, stream, run, deadline):
                    return None
                print(f"{name} {values}: {validation_loss(run):.4f}", flush=True)
                return validation_loss(run)

            if SELECTION.search(self.stream, name, self.recipes[name].grid, measure) is None:
                print(f"{name}: not everything was tried: give the same command again", file=sys.stderr, flush=True)

        own = (name for name, recipe in self.recipes.items() if not recipe.as_for)
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(search, [name for name in own if f"{self.prefix}{name}".startswith(arguments.only)]))

    def do(self, arguments: argparse.Namespace, out: Path) -> None:
        if arguments.what == "select":
            return self._select(arguments, out)
        if not (self.prefix.startswith(arguments.only) or arguments.only.startswith(self.prefix)):
            return
        named = replace(self, rows=[Row(f"{self.prefix}{name}", ()) for name in self.recipes])
        updates = named.updates_of_stage(self._stream(arguments, out))
        values = {name: self.chosen(name) for name in self.recipes}
        if without := [name for name, one in values.items() if one is None]:
            print(f"{SELECTION.path} has no choice for {', '.join(without)}, which are not run: give `select` first",
                  file=sys.stderr)  # fmt: skip
        rows = [self.row(name, one, updates) for name, one in values.items() if one is not None]
        super(RivalStudy, replace(self, rows=rows)).do(arguments, out)


def validation_loss(run: Path) -> float:
    """Return the mean over t >= 2 of the loss on validation text, in nats per token."""
    losses = [row.scores.validation_loss for row in Ledger(run / "ledger.jsonl").rows()[2:]]
    return statistics.mean(loss for loss in losses if loss is not None)


def _study(
    stream: str, heading: str, source: str, *options: str, periods: int, passes: float, **other: Any
) -> RivalStudy:
    study = RivalStudy((), HERE / "ledgers", ("dropout=0",), periods, passes)
    return replace(study, stream=stream, heading=heading, source=source, options=options, **other)


_SIZES = ("--mega-batches", "5", "--valid-words", "20000", "--test-words", "5000")
SELECTED_ON = _study("wikitext", "WikiText-2", "text:wikitext-2", *_SIZES, periods=5, passes=1)
"""The stream on which the settings are chosen."""


def _dated(stream: str, column: str, heading: str, limits: str) -> RivalStudy:
    """`limits`: where the periods begin, at about a tenth of the words each."""
    # A fifth of the usual test text, because scoring ten periods after each arrival takes much of the time of a run.
    options = ("--partition", "chronological", "--causal", "--period", limits, "--test-words", "4000")
    other = {"column": column, "selected_on": SELECTED_ON}
    return _study(stream, heading, f"text:dated/{stream}.jsonl", *options, periods=10, passes=0.3, **other)


def _books(stream: str, heading: str, parts: int, passes: float, **other: Any) -> RivalStudy:
    options = ("--mega-batches", str(parts), "--valid-words", "10000", "--test-words", "40000")
    other["selected_on"] = SELECTED_ON
    return _study(stream, heading, "books:books", *options, periods=4, passes=passes, **other)


STUDIES = (
    _dated(
        "peps",
        "proposals",
        "Python's proposals, 1996 to 2026, ten periods",
        "2002-08-12,2007-04-28,2012-04-26,2014-09-29,2017-01-12,2019-06-04,2021-05-28,2023-08-17,2025-04-04",
    ),
    _dated(
        "sotu",
        "speeches",
        "Speeches of presidents, 1790 to 2026, ten periods",
        "1835-12-08,1852-12-06,1872-12-02,1890-12-01,1903-12-07,1913-12-02,1947-01-06,1973-03-04,1990-01-31",
    ),
    _books("books_1", "Nine books in one pass, four mega-batches", 10, 1, column="books, one pass"),
    _books(
        "books_5",
        "Nine books in five passes, four mega-batches",
        50,
        5,
        column="books, five passes",
        settings=("dropout=0.2",),
    ),
)


def tables() -> dict[str, str]:
    """Return file name -> the tables of all streams, and one that compares the streams; {} without ledgers."""
    sizes = read_sizes(SIZES)
    known = {study: runs for study in STUDIES if (runs := _runs(study, sizes))}
    if not known:
        return {}
    lines = [line for study, found in known.items() for line in _table(study, found)]
    note = (
        "Bits per byte of the test text, averaged from t = 2 to the last arrival. Proposals and speeches: over the "
        "periods that have arrived, over the newest of them, and over the next one; and over all periods after the "
        "last arrival. In brackets: difference from anytime in percent, paired over seeds, with its standard error; "
        "negative is better. FLOPs are relative to anytime."
    )
    return {
        "rivals.md": "\n".join(["# The recipe and its rivals on text", "", *lines, note, ""]),
        "rivals_by_stream.md": "\n".join(_table_of_streams(known)),
    }


@dataclass(frozen=True)
class Runs:
    """The runs of a recipe on a stream. The keys are seeds."""

    parts: Mapping[int, Mapping[str, float]]
    """Part, a key of PARTS -> bits per byte."""
    changes: Mapping[str, Sequence[float]]
    """Part -> by how many percent the runs differ from those of anytime with the same seeds."""
    flops: float
    """Training FLOPs, relative to those of anytime with the same seeds."""


def _runs(study: RivalStudy, sizes: Mapping[str, Any]) -> dict[str, Runs]:
    """Return recipe -> its runs with seeds that anytime has, too, the best recipe first; {} without anytime.

    Args:
        study: the runs on one stream.
        sizes: the content of SIZES: stream -> sizes of its periods.
    """
    found = {name: study.rows_by_seed(f"{study.prefix}{name}") for name in RECIPES}
    periods = sizes[study.stream] if study.has_periods and found["anytime"] else None
    base = {seed: parts_of(rows, periods) for seed, rows in found["anytime"].items()}
    known = {}
    for name, by_seed in found.items():
        if rows := {seed: one for seed, one in by_seed.items() if seed in base}:
            parts = {seed: parts_of(one, periods) for seed, one in rows.items()}
            names = next(iter(parts.values()))
            changes = {
                part: [100 * (own[part] / base[seed][part] - 1) for seed, own in parts.items()] for part in names
            }
            cost = training_flops(rows) / training_flops({seed: found["anytime"][seed] for seed in rows})
            known[name] = Runs(parts, changes, cost)
    return dict(sorted(known.items(), key=lambda one: statistics.mean(one[1].changes["arrived"])))


def _table(study: RivalStudy, known: Mapping[str, Runs]) -> list[str]:
    """Return the lines of the table of a stream."""
    names = PARTS if study.has_periods else {"arrived": "average from t = 2", "last": PARTS["last"]}
    lines = [
        f"## {study.heading}",
        "",
        f"| recipe | {' | '.join(names.values())} | seeds | training FLOPs |",
        f"|:---|{'---:|' * (len(names) + 2)}",
    ]
    for name, runs in known.items():
        cells = []
        for part in names:
            text = mean_text([own[part] for own in runs.parts.values()], digits=3)
            cells.append(text if name == "anytime" else f"{text} ({mean_text(runs.changes[part], signed=True)})")
        lines.append(f"| {RECIPES[name].label} | {' | '.join(cells)} | {len(runs.parts)} | {runs.flops:.2f} |")
    return [*lines, ""]


def _table_of_streams(known: Mapping[RivalStudy, Mapping[str, Runs]]) -> list[str]:
    """Return the lines of the table of the recipes that have run on all streams, the best mean over streams first."""
    names = [name for name in RECIPES if name != "anytime" and all(name in found for found in known.values())]
    changes = {name: [found[name].changes["arrived"] for found in known.values()] for name in names}
    names.sort(key=lambda name: statistics.mean(map(statistics.mean, changes[name])))
    lines = [f"| recipe |{''.join(f' {study.column} |' for study in known)}", f"|:---|{'---:|' * len(known)}"]
    for name in names:
        cells = [mean_text(one, signed=True) for one in changes[name]]
        lines.append(f"| {RECIPES[name].label} | {' | '.join(cells)} |")
    note = (
        "Bits per byte relative to anytime, in percent, averaged from t = 2 on, over the text that has arrived; "
        "negative is better."
    )
    return ["# The recipe and its rivals on text, by stream", "", *lines, "", note, ""]


PARTS = {"arrived": "arrived", "newest": "newest", "next": "next", "last": "after the last arrival"}
"""Parts of the matrix of losses -> how the table names them."""


def parts_of(rows: Sequence[LedgerRow], periods: Sequence[Mapping[str, Any]] | None) -> dict[str, float]:
    """Return the bits per byte of a run over parts of the matrix, from t = 2 on; without periods, over the test set.

    At t = 1, a learner that waits for two mega-batches has not trained yet.
    """
    return arrived_and_last(rows) if periods is None else parts_of_matrix(rows, periods)


if __name__ == "__main__":
    for one in (SELECTED_ON,) if sys.argv[1:2] == ["select"] else STUDIES:
        one.main(__doc__, out="runs/rivals", subfolder=one.stream)
