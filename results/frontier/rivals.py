"""Compare preset=anytime with other recipes for models that learn in sequence, on two causal streams.

python results/frontier/rivals.py select --dated FOLDER                  choose settings: about 60 runs for each corpus
python results/frontier/rivals.py run --dated FOLDER                     train what has no ledger, two runs at a time
python results/frontier/rivals.py run --dated FOLDER --only sotu --seeds 1     only the speeches, only seed 0

FOLDER contains sotu.jsonl and peps.jsonl: one JSON object per line, with the fields text and date. Each is cut into ten
periods of about equal words, with --causal: tokenizer and validation set are those of the first period. A stage has as
many updates as 0.3 passes over the largest period, so there is no dropout. All rows validate once, after the last
update of a stage, so that the last checkpoint predicts: the validation set is text of the first period.

Recipes that need more computation in an update have fewer updates, so that the training FLOPs are those of anytime. Two
rows of retraining do not: their stages are as long as all text so far is. The plugins in results/rivals name the
sources of the recipes.

`select` tries the values of `Recipe.grid` on one corpus, and `run` uses what was chosen on the other one.
results/SELECTION.md says how. The results are in rivals_selection.json. results/rebuild.py makes
results/frontier/rivals.md of the committed ledgers and of rivals_streams.json, which this script writes.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import SETTINGS, Row, TextStudy, bits_per_byte, mean_text, period_sizes, training_flops  # noqa: E402

from fairseq_alma.core.errors import RunError  # noqa: E402
from fairseq_alma.core.files import write_json  # noqa: E402
from fairseq_alma.core.ledger import Ledger, LedgerRow  # noqa: E402
from fairseq_alma.core.predictors import checked_file, read_predictor  # noqa: E402

LIMITS = {
    "sotu": "1835-12-08,1852-12-06,1872-12-02,1890-12-01,1903-12-07,1913-12-02,1947-01-06,1973-03-04,1990-01-31",
    "peps": "2002-08-12,2007-04-28,2012-04-26,2014-09-29,2017-01-12,2019-06-04,2021-05-28,2023-08-17,2025-04-04",
}
"""Name of the corpus -> where its periods begin: at about a tenth of its words each."""
CORPORA = {"sotu": "Speeches of presidents, 1790 to 2026", "peps": "Python's proposals, 1996 to 2026"}
OTHER = {"sotu": "peps", "peps": "sotu"}
PERIODS, SEEDS, SELECTION_SEED = 10, 5, 100
SELECTION, SIZES = HERE / "rivals_selection.json", HERE / "rivals_streams.json"

LR, WARMUP = ("0.005", "0.0025", "0.01"), ("10", "40")
REPLAY, KEEP, CONSTANT, AVERAGE = "replay=0.5", "optimizer_state=keep", "schedule=constant", "average=power:8"
WARMED = ("lr={lr}", "warmup_updates={warmup}")
ANYTIME = (REPLAY, KEEP, CONSTANT, AVERAGE, *WARMED)
FROM_SCRATCH = ("from_scratch=true", "replay=all", *WARMED)


@dataclass(frozen=True)
class Recipe:
    """One row of the table."""

    label: str
    """The name in the table."""
    settings: tuple[str, ...]
    """Arguments of alma-lm. {NAME} stands for the value that was chosen from the grid."""
    plugin: str = ""
    """Name of the plugin in results/rivals, if it needs one."""
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"lr": LR, "warmup": WARMUP})
    """Name -> the values that are tried. They are tried name by name, in this order; names that are still to come have
    their first value."""
    as_for: str = ""
    """Another recipe whose choice this one uses, instead of one of its own."""
    steps: str = "updates"
    times: float = 1
    """See `Row`."""

    def arguments(self, chosen: Mapping[str, str]) -> tuple[str, ...]:
        """Return the arguments of alma-lm with these values from the grid."""
        plugin = (f"plugin=results.rivals.{self.plugin}",) if self.plugin else ()
        return (*plugin, *(text.format_map(chosen) for text in self.settings))


def _tic_lm(autoregressive: str) -> tuple[str, ...]:
    own = ("learner=tic_lm", f"autoregressive={autoregressive}", "later_lr={later_lr}")
    return (*own, REPLAY, *WARMED, "fairseq=--lr-scheduler cosine")


def _continued(schedule: str, *more: str) -> tuple[str, ...]:
    options = f"fairseq=--lr-scheduler {schedule} --cooldown-share {{cooldown}}"
    return ("learner=continued", REPLAY, KEEP, *WARMED, options, *more)


TIC_GRID = {"lr": LR, "later_lr": ("0.005", "0.0025", "0.001"), "warmup": ("4", "20")}
COOLDOWN_GRID = {"lr": LR, "warmup": WARMUP, "cooldown": ("0.2", "0.5")}
LWF, LWF_GRID = "fairseq=--criterion lwf --distillation-weight {weight}", {"lr": LR, "weight": ("0.3", "1", "3")}
RECIPES = {
    "anytime": Recipe("**anytime**", ANYTIME),
    "sm": Recipe("SM", WARMED),
    "sm_replay": Recipe("SM, `replay=0.5`", (REPLAY, *WARMED)),
    "tic_ar": Recipe("TiC-LM: AR cosines, `replay=0.5`", _tic_lm("true"), "tic_lm", TIC_GRID),
    "tic_cyclic": Recipe("TiC-LM: cyclic cosines, `replay=0.5`", _tic_lm("false"), "tic_lm", TIC_GRID),
    "wsd": Recipe("WSD, `replay=0.5`", _continued("wsd"), "schedules", COOLDOWN_GRID),
    "wsd_average": Recipe("WSD and average, `replay=0.5`", _continued("wsd", AVERAGE), "schedules", COOLDOWN_GRID),
    # The rate falls to half after four times the warm-up.
    "rsqrt": Recipe(
        "inverse square root, `replay=0.5`",
        _continued("rsqrt"),
        "schedules",
        COOLDOWN_GRID | {"warmup": ("10", "40", "160")},
    ),
    "no_average": Recipe("anytime without the average", (REPLAY, KEEP, CONSTANT, *WARMED)),
    "no_replay": Recipe("anytime without replay", (KEEP, CONSTANT, AVERAGE, *WARMED)),
    "new_state": Recipe("anytime with a new optimizer state in each stage", (REPLAY, CONSTANT, AVERAGE, *WARMED)),
    "decaying": Recipe("anytime with a decaying rate", (REPLAY, KEEP, AVERAGE, *WARMED)),
    "retrained": Recipe(
        "retrained on everything", FROM_SCRATCH, as_for="retrained_equal", steps="updates_per_mega_batch"
    ),
    "retrained_2": Recipe(
        "retrained on everything, wait 2",
        (*FROM_SCRATCH, "wait=2"),
        as_for="retrained_equal",
        steps="updates_per_mega_batch",
    ),
    "retrained_equal": Recipe("retrained on everything, equal FLOPs", FROM_SCRATCH),
    "retrained_2_equal": Recipe(
        "retrained on everything, wait 2, equal FLOPs", (*FROM_SCRATCH, "wait=2"), as_for="retrained_equal", times=2
    ),
    # From the second stage on, the teacher adds a third of the FLOPs: 1 + 0.9 / 3 in all.
    "lwf": Recipe("LwF", ("learner=lwf", "lr={lr}", LWF), "lwf", LWF_GRID, times=1 / 1.3),
    "lwf_replay": Recipe(
        "LwF, `replay=0.5`", ("learner=lwf", "lr={lr}", LWF, REPLAY), "lwf", LWF_GRID, as_for="lwf", times=1 / 1.3
    ),
    # The Fisher information takes 12,800 tokens; a stage has 86,016 or more.
    "ewc": Recipe(
        "EWC",
        ("learner=ewc", "lr={lr}", "fairseq=--criterion ewc --ewc-weight {weight}"),
        "ewc",
        {"lr": LR, "weight": ("1", "0.1", "10")},
        times=0.89,
    ),
    "shrink": Recipe(
        "shrink and perturb, `replay=0.5`",
        ("learner=shrink", "lr={lr}", "shrink={shrink}", REPLAY),
        "shrink",
        {"lr": LR, "shrink": ("0.6", "0.4", "0.8")},
    ),
    "dense": Recipe("anytime, dense, as many active parameters", (*ANYTIME, "experts=1"), as_for="anytime"),
    # Its 4 layers have 10 times 512 hidden units, like 2 dense layers and 2 mixtures of 4 experts. It needs 1.404 times
    # the FLOPs.
    "dense_total": Recipe(
        "anytime, dense, as many parameters",
        (*ANYTIME, "experts=1", "fairseq=--decoder-ffn-embed-dim 1280"),
        as_for="anytime",
        times=1 / 1.404,
    ),
    "schedule_free": Recipe(
        "schedule-free AdamW, `replay=0.5`",
        (REPLAY, KEEP, CONSTANT, *WARMED, "fairseq=--optimizer schedule_free"),
        "schedule_free",
    ),
}
"""Name -> recipe, in the order in which they run. The last one needs a package that may be missing."""


def _chosen(recipe: str, corpus: str) -> dict[str, str] | None:
    """Return the values that were chosen for a recipe on a corpus; None if none were."""
    selection = json.loads(SELECTION.read_text()) if SELECTION.exists() else {}
    tried = selection.get(corpus, {}).get(RECIPES[recipe].as_for or recipe, [])
    return _best(tried) if tried else None


def _best(tried: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the values with the lowest loss on validation text."""
    return min(tried, key=lambda one: one["bits_per_byte"])["values"]


@dataclass(frozen=True)
class RivalStudy(TextStudy):
    """The runs on one of the corpora."""

    corpus: str = "sotu"
    data: ClassVar[str] = "dated"
    common: ClassVar[tuple[str, ...]] = (
        *(text for text in SETTINGS if not text.startswith("lr=")),
        "precision=float32", "validations=1",
    )  # fmt: skip
    actions: ClassVar[Mapping[str, str]] = {**TextStudy.actions, "select": "choose settings for the other corpus"}

    def prepare(self, data: Path, out: Path) -> list[str]:
        words = ["--source", f"text:{data / f'{self.corpus}.jsonl'}", "--partition", "chronological", "--causal"]
        # Half of the usual test text, because scoring takes a third of the time of a run.
        return [*words, "--period", LIMITS[self.corpus], "--vocab-size", "8000", "--test-words", "10000"]

    def _make_stream(self, data: Path, out: Path) -> Path:
        stream = super()._make_stream(data, out)
        sizes = json.loads(SIZES.read_text()) if SIZES.exists() else {}
        write_json(SIZES, sizes | {self.corpus: period_sizes(stream)})
        return stream

    def row(self, name: str, chosen: Mapping[str, str]) -> Row:
        """Return the runs of a recipe with these values from its grid."""
        recipe = RECIPES[name]
        arguments = recipe.arguments(chosen)
        return Row(f"{self.corpus}_rival_{name}", arguments, recipe.steps, tuple(range(SEEDS)), recipe.times)

    def do(self, arguments: argparse.Namespace, out: Path) -> None:
        if arguments.what == "select":
            return self._select(arguments, out)
        without = {name for name in RECIPES if _chosen(name, OTHER[self.corpus]) is None}
        if without:
            print(f"{SELECTION} has no choice on {OTHER[self.corpus]} for {', '.join(sorted(without))}, which are not "
                  f"run for {self.corpus}: give `select` first", file=sys.stderr)  # fmt: skip
        names = {f"{self.corpus}_rival_{name}" for name in without}
        super(RivalStudy, replace(self, rows=[row for row in self.rows if row.name not in names])).do(arguments, out)

    def _select(self, arguments: argparse.Namespace, out: Path) -> None:
        """Try the grid of each recipe, with one seed, and write the losses on validation text to SELECTION."""
        stream, data = self._text(arguments, out)
        for name, recipe in RECIPES.items():
            if recipe.as_for or not f"{self.corpus}_rival_{name}".startswith(arguments.only):
                continue
            chosen = {key: values[0] for key, values in recipe.grid.items()}
            try:
                for key, values in recipe.grid.items():
                    tried = [self._tried(name, chosen | {key: value}, stream, data, out, arguments) for value in values]
                    chosen = _best(tried)
            except RunError as error:
                print(error, file=sys.stderr, flush=True)
                continue
            print(f"{self.corpus} {name}: {chosen}", flush=True)

    def _tried(
        self, name: str, values: dict[str, str], stream: Path, data: str, out: Path, arguments: argparse.Namespace
    ) -> dict[str, Any]:
        """Return the entry of SELECTION for a recipe with these values. If it is missing, train the run and add it.

        Raise RunError if the run has not finished.
        """
        selection = json.loads(SELECTION.read_text()) if SELECTION.exists() else {}
        entries = selection.setdefault(self.corpus, {}).setdefault(name, [])
        for entry in entries:
            if entry["values"] == values:
                return entry
        row = self.row(name, values)
        row = replace(row, name=f"select_{name}_{'_'.join(values.values())}")
        # The ledgers are not committed. The test set is scored, too, but nothing here reads these scores.
        study = replace(self, rows=[row], ledgers=out / "selection")
        study._run([(SELECTION_SEED, row)], stream, data, out, 1, arguments.hours)
        run = out / row.name / f"seed_{SELECTION_SEED}"
        if not (run / "summary.json").exists():
            raise RunError(f"{run} is not finished: see {run.with_suffix('.log')}, and give the same command again")
        entry = {"values": values, "bits_per_byte": validation_bits_per_byte(run, stream)}
        entries.append(entry)
        write_json(SELECTION, selection)
        return entry


def validation_bits_per_byte(run: Path, stream: Path) -> float:
    """Return the loss on validation text: the mean over t >= 2 of the mean over all periods that have arrived.

    Args:
        run: the folder of a finished run.
        stream: a causal stream, each period of which has validation text.
    """
    # Not at the top, because the tables need no torch.
    from fairseq_alma.core.stream_folder import StreamFolder
    from fairseq_alma.evaluation.held_out import scores_of

    folder = StreamFolder.open(stream)
    by_stage: dict[int, list[float]] = {}
    means = []
    for row in Ledger(run / "ledger.jsonl").rows()[2:]:
        if row.stage not in by_stage:
            splits = [f"mega_batch_{t}/valid" for t in range(1, folder.num_periods + 1)]
            checkpoints = [checked_file(run, entry) for entry in read_predictor(run, row.stage)["checkpoints"]]
            scores = scores_of(checkpoints, folder, splits)
            by_stage[row.stage] = [
                scores[split].nll_sum / folder.counts(split)["bytes"] / math.log(2) for split in splits
            ]
        means.append(statistics.mean(by_stage[row.stage][: row.t]))
    return statistics.mean(means)


def _study(corpus: str) -> RivalStudy:
    empty = RivalStudy((), HERE / "ledgers", ("dropout=0",), PERIODS, passes=0.3, corpus=corpus)
    chosen = {
        name: _chosen(name, OTHER[corpus]) or {key: values[0] for key, values in recipe.grid.items()}
        for name, recipe in RECIPES.items()
    }
    return replace(empty, rows=[empty.row(name, chosen[name]) for name in RECIPES])


STUDIES = {corpus: _study(corpus) for corpus in CORPORA}


def tables() -> dict[str, str]:
    """Return file name -> the table of both corpora; {} without ledgers."""
    if not SIZES.exists():
        return {}
    sizes = json.loads(SIZES.read_text())
    lines = [line for corpus in CORPORA for line in _table(corpus, sizes.get(corpus, []))]
    if not lines:
        return {}
    note = (
        "Bits per byte of the test text, averaged over t = 2 to 10: over the periods that have arrived, over the "
        "newest of them, and over the next one; and over all periods after the last arrival. In brackets: difference "
        "from anytime in percent, paired over seeds, with its standard error; negative is better. FLOPs are relative "
        "to anytime."
    )
    return {"rivals.md": "\n".join(["# The recipe and its rivals", "", *lines, note, ""])}


def _table(corpus: str, periods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of a corpus, the best recipe first; [] without a ledger of anytime."""
    found = {name: STUDIES[corpus].rows_by_seed(f"{corpus}_rival_{name}") for name in RECIPES}
    base = {seed: _parts(rows, periods) for seed, rows in found["anytime"].items()}
    if not base:
        return []
    lines = [
        f"## {CORPORA[corpus]}",
        "",
        "| recipe | arrived | newest | next | after the last arrival | seeds | training FLOPs |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    parts = {
        name: {seed: _parts(rows, periods) for seed, rows in runs.items() if seed in base}
        for name, runs in found.items()
    }
    known = {name: by_seed for name, by_seed in parts.items() if by_seed}
    for name in sorted(known, key=lambda one: statistics.mean(own["arrived"] for own in known[one].values())):
        cells = []
        for part in ("arrived", "newest", "next", "last"):
            text = mean_text([own[part] for own in known[name].values()], digits=3)
            changes = [100 * (own[part] / base[seed][part] - 1) for seed, own in known[name].items()]
            cells.append(text if name == "anytime" else f"{text} ({mean_text(changes, signed=True)})")
        cost = training_flops({seed: found[name][seed] for seed in known[name]})
        cost /= training_flops({seed: found["anytime"][seed] for seed in known[name]})
        lines.append(f"| {RECIPES[name].label} | {' | '.join(cells)} | {len(known[name])} | {cost:.2f} |")
    return [*lines, ""]


def _parts(rows: Sequence[LedgerRow], periods: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bits per byte of a run over parts of the matrix, from t = 2 on.

    At t = 1, a learner that waits for two mega-batches has not trained yet.
    """
    matrix = {t: losses for t, losses in bits_per_byte(rows, periods).items() if t >= 2}
    return {
        "arrived": statistics.mean(statistics.mean(losses[:t]) for t, losses in matrix.items()),
        "newest": statistics.mean(losses[t - 1] for t, losses in matrix.items()),
        "next": statistics.mean(losses[t] for t, losses in matrix.items() if t < len(losses)),
        "last": statistics.mean(matrix[max(matrix)]),
    }


if __name__ == "__main__":
    for name, study in STUDIES.items():
        study.main(__doc__, out="runs/rivals", subfolder=name)
