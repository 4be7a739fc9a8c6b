"""Compare waits that need no tuning with fixed waits, for SM without replay, on nine books in 16 small mega-batches.

python results/frontier/waits.py run --books FOLDER    train what has no ledger in results/frontier, two runs at a time

A mega-batch is a hundredth of the books. A stage has 3 passes over the mega-batches it waited for. So all rows have the
same number of updates, apart from mega-batches at the end that still wait. The other settings are those of
results/books. Nothing was tuned.

results/rebuild.py makes results/frontier/waits.md of the committed ledgers.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import BookStudy, Row, last_perplexity, mean_text, training_flops  # noqa: E402

from fairseq_alma.core.ledger import LedgerRow  # noqa: E402

SEEDS = (0, 1, 2, 3, 4)
FIXED = (1, 2, 4)
WAITS = (*map(str, FIXED), "geometric", "auto")
TEXTS = {
    **{f"waits_{wait}": f"SM, wait {wait}" for wait in FIXED},
    "waits_geometric": "SM, geometric waits",
    "waits_auto": "SM, automatic waits",
}
"""How the table names each row."""
ROWS = tuple(
    Row(f"waits_{wait}", ("learner=sm", "experts=4", f"wait={wait}"), "updates_per_mega_batch", seeds=SEEDS)
    for wait in WAITS
)

STUDY = BookStudy(ROWS, HERE / "ledgers", mega_batches=16, passes=3, parts=100)


def tables() -> dict[str, str]:
    """Return file name -> table of the average and the final perplexity; {} without ledgers of a fixed wait."""
    found = {name: runs for name in TEXTS if (runs := STUDY.rows_by_seed(name))}
    fixed = [name for name in found if name.removeprefix("waits_").isdigit()]
    if not fixed:
        return {}
    best = min(fixed, key=lambda name: statistics.mean(_averages(found[name]).values()))
    lines = [
        "# Waits on nine books, 16 mega-batches",
        "",
        f"| learner | geometric mean | against {TEXTS[best]}, in % | final | stages at | seeds | training FLOPs |",
        "|:---|---:|---:|---:|:---|---:|---:|",
    ]
    for name in sorted(found, key=lambda name: statistics.mean(_averages(found[name]).values())):
        runs = found[name]
        average, base = _averages(runs), _averages(found[best])
        gaps = [100 * (average[seed] / base[seed] - 1) for seed in sorted(average.keys() & base.keys())]
        cells = [
            mean_text(list(average.values())),
            "" if name == best else mean_text(gaps, signed=True),
            mean_text([last_perplexity(rows) for rows in runs.values()]),
            " or ".join(dict.fromkeys(_stages(rows) for rows in runs.values())),
            str(len(runs)),
            f"{training_flops(runs) / training_flops(found[best]):.2f}",
        ]
        lines.append(f"| {TEXTS[name]} | {' | '.join(cells)} |")
    note = (
        "The geometric mean is that of the test perplexity over all arrivals, so it is exp(average "
        "loss). Before the first stage, the perplexity is that of the untrained model. Differences are paired over "
        "seeds, with their standard error."
    )
    return {"waits.md": "\n".join([*lines, "", note, ""])}


def _averages(runs: Mapping[int, Sequence[LedgerRow]]) -> dict[int, float]:
    """Return, for each seed, the geometric mean of the test perplexity over all arrivals."""
    return {
        seed: math.exp(statistics.mean(math.log(last_perplexity([row])) for row in rows if row.t >= 1))
        for seed, rows in runs.items()
    }


def _stages(rows: Sequence[LedgerRow]) -> str:
    """Return the arrivals after which a stage was trained, as text."""
    return ", ".join(str(row.t) for row in rows if row.updated)


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/waits")
