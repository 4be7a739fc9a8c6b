"""Compare learning in sequence with i.i.d. data on nine books in one pass, mega-batches of 330,000 words, 5 seeds.

python results/frontier/one_pass.py run --books FOLDER    train what has no ledger, two runs at a time

Each stage is one pass over its mega-batch (the paper's are about 20). With replay, a part of the steps is taken from
new text. All rows have the same number of updates, and the settings of results/frontier/books.py but no dropout.

results/rebuild.py makes results/frontier/one_pass.md of the committed ledgers.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import BookStudy, Row, arrival_table  # noqa: E402

SM = ("learner=sm", "experts=4", "wait=1")
IID = ("learner=sm", "experts=4", "wait=4")
AVERAGE = ("schedule=constant", "average=decay:0.99")
KEEP = (*AVERAGE, "optimizer_state=keep")
POWER = ("schedule=constant", "average=power:8")
RECIPE = (*POWER, "optimizer_state=keep", "replay=0.5")
"""The settings of preset=anytime."""
WARM = "warmup_updates=180"
"""A tenth of all updates. By default, the warm-up is 5% of the first stage: 90 updates for the learners of all data at
once, and 22 for those in sequence."""
SEEDS = (0, 1, 2, 3, 4)

ROWS = (
    Row("one_pass_warm", (*SM, *POWER, "optimizer_state=keep", WARM), seeds=SEEDS),
    Row("one_pass_iid_warm", (*IID, *POWER, WARM), "updates_per_mega_batch", seeds=SEEDS),
    Row("one_pass_recipe", (*SM, *RECIPE), seeds=SEEDS),
    Row("one_pass_iid_power", (*IID, *POWER), "updates_per_mega_batch", seeds=SEEDS),
    Row("one_pass_power", (*SM, *POWER, "optimizer_state=keep"), seeds=SEEDS),
    Row("one_pass_average", (*SM, *KEEP), seeds=SEEDS),
    Row("one_pass_iid_average", (*IID, *AVERAGE), "updates_per_mega_batch", seeds=SEEDS),
    Row("one_pass_quarter", (*SM, *KEEP, "replay=0.25"), seeds=SEEDS),
    Row("one_pass_sm", SM, seeds=SEEDS),
    Row("one_pass_iid", IID, "updates_per_mega_batch", seeds=SEEDS),
    Row("one_pass_ens", ("learner=ens", "members=2", "experts=4", "wait=1"), seeds=SEEDS),
)
"""The rows in the order in which they run."""
TEXTS = {
    "one_pass_warm": "anytime without replay, warm-up of 180 updates",
    "one_pass_iid_warm": "constant rate and average on all data at once (i.i.d.), warm-up of 180 updates",
    "one_pass_iid_power": "constant rate and average on all data at once (i.i.d.)",
    "one_pass_recipe": "**anytime** (`replay=0.5`)",
    "one_pass_power": "anytime without replay",
    "one_pass_average": "anytime without replay, `average=decay:0.99`",
    "one_pass_iid_average": "constant rate and `average=decay:0.99` on all data at once (i.i.d.)",
    "one_pass_quarter": "anytime with `replay=0.25`, `average=decay:0.99`",
    "one_pass_sm": "SM, wait 1",
    "one_pass_iid": "SM on all data at once (i.i.d.)",
    "one_pass_ens": "Ens of 2, wait 1",
}
"""How the table names each row."""

STUDY = BookStudy(ROWS, HERE / "ledgers", ("dropout=0", "precision=bfloat16"), passes=1, parts=5)


def tables() -> dict[str, str]:
    """Return file name -> table: the perplexity after each arrival, with the rows whose ledgers are committed."""
    found = {name: STUDY.rows_by_seed(name) for name in TEXTS}
    if not found["one_pass_average"]:
        return {}
    return {"one_pass.md": arrival_table("Nine books in one pass", TEXTS, found, base="one_pass_average")}


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/one_pass")
