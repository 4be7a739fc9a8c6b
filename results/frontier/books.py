"""Compare one averaged model that replays with the paper's learners on nine books, in the setting of results/books.

python results/frontier/books.py run --books FOLDER    train what has no ledger in results/frontier, two runs at a time

The settings were chosen with seed 100. results/rebuild.py makes results/frontier/books.md of the ledgers.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import BookStudy, Row, arrival_table  # noqa: E402

SM = ("learner=sm", "experts=4", "wait=1")
IID = ("learner=sm", "experts=4", "wait=4")
CONSTANT = ("schedule=constant", "optimizer_state=keep")
AVERAGE = ("average=power:8",)
HALF = "replay=0.5"
DECAY = ("weight_decay=0.3", "warmup_updates=53")
"""Weight decay, and a warm-up as long as the default of `IID`: 5% of all updates. That of `SM` is 5% of a stage, 13."""
SEEDS = (0, 1, 2, 3, 4)

ROWS = (
    Row("books_power_half", (*SM, *CONSTANT, *AVERAGE, HALF), seeds=SEEDS),
    Row("books_iid_power", (*IID, "schedule=constant", *AVERAGE), "updates_per_mega_batch", seeds=SEEDS),
    Row("books_weight_decay", (*SM, *CONSTANT, *AVERAGE, HALF, *DECAY), seeds=SEEDS),
    Row("books_iid_weight_decay", (*IID, "schedule=constant", *AVERAGE, *DECAY), "updates_per_mega_batch", seeds=SEEDS),
    Row("books_sm_weight_decay", (*SM, "weight_decay=0.3")),
    Row("books_power", (*SM, *CONSTANT, *AVERAGE, "replay=uniform"), seeds=SEEDS),
    Row("books_replay", (*SM, HALF), seeds=SEEDS),
    Row("books_no_replay", (*SM, *CONSTANT, *AVERAGE), seeds=SEEDS),
    Row("books_no_average", (*SM, *CONSTANT, HALF), seeds=SEEDS),
    Row("books_decay_average", (*SM, *AVERAGE, HALF), seeds=SEEDS),
)
"""The rows in the order in which they run. The first one has the settings of preset=anytime."""
TEXTS = {
    "sm_w1_4": "SM, wait 1",
    "ens_w1_4at2": "Ens of 2, wait 1",
    "sm_w4_4_4x": "SM on all data at once (i.i.d.)",
    "books_power_half": "**anytime** (`replay=0.5`)",
    "books_weight_decay": "anytime with `weight_decay=0.3`, warm-up of 53 updates",
    "books_sm_weight_decay": "SM, wait 1, `weight_decay=0.3`",
    "books_iid_weight_decay": "constant rate and average on all data at once (i.i.d.), `weight_decay=0.3`",
    "books_iid_power": "constant rate and average on all data at once (i.i.d.)",
    "books_power": "anytime with `replay=uniform`",
    "books_replay": "SM, wait 1, `replay=0.5`",
    "books_no_replay": "anytime without replay",
    "books_no_average": "anytime without the average",
    "books_decay_average": "SM, wait 1, `replay=0.5`, and the average",
}
"""How the table names each row, also the rows of results/books."""

STUDY = BookStudy(ROWS, HERE / "ledgers")
PAPER = BookStudy((), HERE.parent / "books" / "ledgers")


def tables() -> dict[str, str]:
    """Return file name -> table: the perplexity after each arrival, with the rows whose ledgers are committed."""
    found = {name: (STUDY if name.startswith("books_") else PAPER).rows_by_seed(name) for name in TEXTS}
    if not any(found[row.name] for row in ROWS):
        return {}
    return {"books.md": arrival_table("Nine books, four mega-batches", TEXTS, found, base="sm_w1_4")}


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/books")
