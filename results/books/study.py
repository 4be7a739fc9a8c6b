"""Train the learners of the paper's Table 2 on nine books, at a size for two CPU cores.

python results/books/study.py run --books FOLDER      train what has no ledger in results/books, two runs at a time
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _claims import Claim, claim_table  # noqa: E402
from _texts import BookStudy, Row  # noqa: E402

ONE_SEED = (0,)
"""The seed of rows for which no finding is tested statistically."""
ROWS = (
    Row("sm_w1_4", ("learner=sm", "wait=1", "experts=4")),
    Row("sm_w1_12", ("learner=sm", "wait=1", "experts=12")),
    Row("gmoe_w1", ("learner=gmoe", "wait=1", "experts=4", "grow_experts=[2,2,4]")),
    Row("ens_w1_4at2", ("learner=ens", "wait=1", "experts=4", "members=2")),
    Row("sm_w4_4_4x", ("learner=sm", "wait=4", "experts=4"), "updates_per_mega_batch"),
    Row("ens_w4_4x", ("learner=ens", "wait=4", "experts=4", "members=2"), "updates_per_mega_batch"),
    Row("sm_w1_8", ("learner=sm", "wait=1", "experts=8"), seeds=ONE_SEED),
    Row("gens_w1", ("learner=gens", "wait=1", "experts=4"), seeds=ONE_SEED),
    Row("sm_w4_4", ("learner=sm", "wait=4", "experts=4"), seeds=ONE_SEED),
)
STUDY = BookStudy(ROWS, HERE / "ledgers")
CLAIMS = (
    Claim("SM with 12 experts against 4", "sm_w1_12", "sm_w1_4"),
    Claim("SM with 8 experts against 4", "sm_w1_8", "sm_w1_4"),
    Claim("Ens 4@2 against SM with as many experts (8)", "ens_w1_4at2", "sm_w1_8"),
    Claim("Ens 4@2 against the largest SM (12 experts)", "ens_w1_4at2", "sm_w1_12"),
    Claim("Ens 4@2 against gMoE", "ens_w1_4at2", "gmoe_w1"),
    Claim("gMoE against SM with the 4 experts that it starts from", "gmoe_w1", "sm_w1_4"),
    Claim("SM with gMoE's last size, 12 experts, against gMoE", "sm_w1_12", "gmoe_w1"),
    Claim("SM with gMoE's mean size, 8 experts, against gMoE", "sm_w1_8", "gmoe_w1"),
    Claim("Ens 4@2 against gEns", "ens_w1_4at2", "gens_w1"),
    Claim("Ens_w4 (4x steps) against Ens_w1, 4@2", "ens_w4_4x", "ens_w1_4at2"),
    Claim("SM_w4 (4x steps) against SM_w1, 4 experts", "sm_w4_4_4x", "sm_w1_4"),
    Claim("SM_w4 (4x steps) against SM_w4 (1x steps), 4 experts", "sm_w4_4_4x", "sm_w4_4"),
)


def claims() -> str:
    """Return the text of claims.md: for each finding of the paper, the difference that the committed ledgers show."""
    found = {row.name: STUDY.rows_by_seed(row.name) for row in ROWS}
    return "\n".join([*claim_table(CLAIMS, found), ""])


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/books")
