"""Compare learners on two streams that drift: speeches of presidents since 1790, and Python's proposals since 1996.

python results/frontier/drift.py run --dated FOLDER                     train what has no ledger, two runs at a time
python results/frontier/drift.py run --dated FOLDER --only sotu --seeds 1      only the speeches, only seed 0

FOLDER contains sotu.jsonl and peps.jsonl: one JSON object per line, with the fields text and date. Each is cut into
five periods of equal length, which arrive one after another. A stage has as many updates as half a pass over its
period. The settings are those of results/frontier/books.py. They were not tuned on these streams, but the row with 1.15
times the updates was added after seed 0 of the rows with the same and with twice the updates had been seen.

The rows "anytime" have the replay, the schedule and the average of preset=anytime.

Retraining starts from random weights at every arrival and trains on all periods so far, with as many updates per period
as the others: three times the compute. The model that is trained once, on all periods, has the compute of the others;
regrets compare with it.

results/rebuild.py makes results/frontier/drift.md and drift_retraining.md of the committed ledgers.
"""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import Row, TextStudy, mean_text, training_flops  # noqa: E402

from fairseq_alma.core.ledger import LedgerRow  # noqa: E402
from fairseq_alma.core.metrics import averages_by_part, period_losses  # noqa: E402

PERIODS = 5
SEEDS = {"recipe_warm": 5, "retrained": 5, "once": 5}
"""Name -> the number of seeds. The other learners have 3."""
AVERAGE = ("schedule=constant", "average=power:8")
KEEP = (*AVERAGE, "optimizer_state=keep")
LEARNERS = {
    "recipe": ((*KEEP, "replay=0.5"), "updates", "**anytime** (`replay=0.5`)"),
    "recipe_more": ((*KEEP, "replay=0.5"), "updates", "**anytime** with 1.15 times the updates"),
    "recipe_warm": (
        (*KEEP, "replay=0.5", "warmup_updates=60"),
        "updates",
        "**anytime** with 1.15 times the updates, warm-up of 60",
    ),
    "recipe_2": ((*KEEP, "replay=0.5"), "updates", "**anytime** with twice the updates"),
    "retrained": (
        (*AVERAGE, "from_scratch=true", "replay=all"),
        "updates_per_mega_batch",
        "constant rate and average, retrained on everything",
    ),
    "retrained_less": (
        (*AVERAGE, "from_scratch=true", "replay=all"),
        "updates_per_mega_batch",
        "retrained with 0.38 of the updates",
    ),
    "once": (AVERAGE, "updates_per_mega_batch", "constant rate and average, trained once"),
    "sm": ((), "updates", "SM, wait 1"),
    "uniform": ((*KEEP, "replay=uniform"), "updates", "anytime with `replay=uniform`"),
    "no_replay": (KEEP, "updates", "anytime without replay"),
    "sm_half": (("replay=0.5",), "updates", "SM, wait 1, `replay=0.5`"),
}
"""Name -> settings, the setting for the length of a stage, and the name in the table."""
TIMES = {"recipe_more": 3 / 2.6, "recipe_warm": 3 / 2.6, "recipe_2": 2, "retrained_less": 1 / 2.6}
"""Name -> the factor by which the updates of each stage are multiplied.

The question is whether the recipe is as good as retraining that has 2.6 times its compute. Retraining has three times
the compute of the other rows, so `recipe_more` has 3 / 2.6 times theirs. `retrained_less` has that of `recipe_more`.

By default, the warm-up is 5% of the updates of the first stage of a training: 12 and 16 updates for `recipe_more`, and
54 and 73 for the last model that is retrained. `recipe_warm` has 5% (speeches) and 4% (proposals) of all updates."""
CORPORA = {"sotu": "Speeches of presidents, 1790 to 2026", "peps": "Python's proposals, 1996 to 2026"}
"""Name of the file -> heading."""
SHORT = {"sotu": "speeches", "peps": "proposals"}
PARTS = ("backward", "in_distribution", "forward")


@dataclass(frozen=True)
class DatedStudy(TextStudy):
    """The runs on one of the corpora."""

    corpus: str = "sotu"
    data: ClassVar[str] = "dated"

    def prepare(self, data: Path, out: Path) -> list[str]:
        cut = ["--partition", "chronological", "--mega-batches", str(PERIODS)]
        return ["--source", f"text:{data / f'{self.corpus}.jsonl'}", *cut, "--vocab-size", "8000"]


def _study(corpus: str) -> DatedStudy:
    rows = []
    for name, (more, steps, _) in LEARNERS.items():
        wait = f"wait={PERIODS if name == 'once' else 1}"
        times = TIMES.get(name, 1)
        rows.append(
            Row(
                f"{corpus}_{name}",
                ("learner=sm", "experts=4", wait, *more),
                steps,
                tuple(range(SEEDS.get(name, 3))),
                times,
            )
        )
    settings = ("dropout=0.2", "precision=bfloat16")
    return DatedStudy(rows, HERE / "ledgers", settings, PERIODS, passes=0.5, corpus=corpus)


STUDIES = {corpus: _study(corpus) for corpus in CORPORA}


def tables() -> dict[str, str]:
    """Return file name -> tables of both corpora, with the rows whose ledgers are committed; {} without ledgers."""
    lines = ["# Streams that drift", ""]
    for corpus, heading in CORPORA.items():
        lines += _table(corpus, heading)
    if len(lines) == 2:
        return {}
    note = (
        "Perplexities are averages over the periods that arrived earlier (backward), over the period that has just "
        "arrived (in-distribution), and over those that arrive later (forward). In brackets: regret against the model "
        "that was trained once, in nats per token. FLOPs are relative to SM at wait 1. The tokenizer and the "
        "validation set are of all periods, so all models look ahead."
    )
    return {"drift.md": "\n".join([*lines, note, ""]), "drift_retraining.md": _against_retraining()}


def _against_retraining() -> str:
    """Return the table that compares each learner with retraining on everything, on both corpora."""
    arrivals = range(2, PERIODS + 1)
    lines = [
        "# In sequence against retraining on everything",
        "",
        "| corpus | learner | FLOPs | earlier periods | newest period | "
        + "".join(f"t = {t} | " for t in arrivals[:-1])
        + "last arrival | seeds |",
        f"|:---|:---|---:|---:|---:|{'---:|' * len(arrivals)}---:|",
    ]
    for corpus in CORPORA:
        found = {name: STUDIES[corpus].rows_by_seed(f"{corpus}_{name}") for name in LEARNERS}
        base = found["retrained"]
        for name, runs in found.items():
            both = sorted(runs.keys() & base.keys())
            if both and name not in ("retrained", "once"):
                pairs = [(runs[seed], base[seed]) for seed in both]
                cost = statistics.mean(training_flops({0: own}) / training_flops({0: other}) for own, other in pairs)
                changes = [_change(pairs, lambda t, j: j < t), _change(pairs, lambda t, j: j == t)]
                changes += [_change(pairs, partial(lambda at, t, j: j <= t == at, at)) for at in arrivals]
                cells = [SHORT[corpus], LEARNERS[name][2], f"{cost:.2f}", *changes, str(len(both))]
                lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Differences of the perplexity from that of the model that is retrained at every arrival, in percent, paired "
        "over seeds, with their standard error. Only t = 2 to 5 count, because nothing has been retrained before. The "
        "last columns average over all periods that have arrived. FLOPs are relative to those of retraining."
    )
    return "\n".join([*lines, "", note, ""])


def _change(pairs: Sequence[tuple[list[LedgerRow], list[LedgerRow]]], is_in_part: Callable[[int, int], bool]) -> str:
    """Return the difference of the perplexities of two learners over a part of the matrix, in percent, as text.

    Args:
        pairs: for each seed, the ledgers of the two learners.
        is_in_part: whether the perplexity on period j after arrival t belongs to the part.
    """
    changes = []
    for own, other in pairs:
        differences = [
            a - b
            for row, base in zip(own, other, strict=True)
            for j, (a, b) in enumerate(zip(period_losses(row), period_losses(base), strict=True), start=1)
            if row.t >= 2 and is_in_part(row.t, j)
        ]
        changes.append(100 * math.expm1(statistics.mean(differences)))
    return mean_text(changes, signed=True)


def _table(corpus: str, heading: str) -> list[str]:
    study = STUDIES[corpus]
    found = {name: study.rows_by_seed(f"{corpus}_{name}") for name in LEARNERS}
    if not found["sm"]:
        return []
    lines = [
        f"## {heading}",
        "",
        "| learner | backward | in-distribution | forward | after the last arrival | seeds | training FLOPs |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    base = training_flops(found["sm"])
    for name, runs in found.items():
        if not runs:
            continue
        # A model that is trained once has no matrix: it has seen no text before the last arrival.
        parts = [""] * len(PARTS) if name == "once" else [_part(runs, found["once"], part) for part in PARTS]
        final = mean_text([_perplexity(rows) for rows in runs.values()])
        cells = [LEARNERS[name][2], *parts, final, str(len(runs)), f"{training_flops(runs) / base:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _part(runs: dict[int, list[LedgerRow]], once: dict[int, list[LedgerRow]], part: str) -> str:
    """Return the perplexity over a part of the matrix, and in brackets the regret, as text.

    The regret of a seed compares with the run of the same seed that was trained once. It is left out if there is none.
    """
    losses, regrets = [], []
    for seed, rows in runs.items():
        matrix = {row.t: period_losses(row) for row in rows if row.t >= 1}
        losses.append(averages_by_part(matrix)[part])
        if seed in once:
            reference = period_losses(once[seed][-1])
            differences = {t: [a - b for a, b in zip(row, reference, strict=True)] for t, row in matrix.items()}
            regrets.append(averages_by_part(differences)[part])
    regret = f" ({statistics.mean(regrets):+.3f})" if regrets else ""
    return mean_text([math.exp(loss) for loss in losses]) + regret


def _perplexity(rows: Sequence[LedgerRow]) -> float:
    """Return the geometric mean of the perplexities on all periods, after the last arrival."""
    return math.exp(statistics.mean(period_losses(rows[-1])))


if __name__ == "__main__":
    for name, study in STUDIES.items():
        study.main(__doc__, out="runs/drift", subfolder=name)
