"""Train the learners of the paper's Table 2 on nine books, at a size for two CPU cores.

python results/books/study.py run --books FOLDER      train what has no ledger in results/books, two runs at a time
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import BookStudy, Row, last_perplexity, mean_text, standard_error  # noqa: E402

from fairseq_alma.core.ledger import LedgerRow  # noqa: E402

ONE_SEED = (0,)
"""The seed of rows for which no finding is tested statistically."""
T_95 = 4.30
"""Half the width of a 95% confidence interval of a mean over 3 seeds, in standard errors (Student's t)."""
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
STUDY = BookStudy(ROWS, HERE / "ledgers")


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


def claims() -> str:
    """Return the text of claims.md: for each finding of the paper, the difference that the committed ledgers show."""
    return "\n".join([*_claim_table({row.name: STUDY.rows_by_seed(row.name) for row in ROWS}), ""])


def _claim_table(ledgers: dict[str, dict[int, list[LedgerRow]]]) -> list[str]:
    """Return the lines of a Markdown table: one line per claim, if ledgers of both rows of the claim are committed."""
    lines = ["| after the last mega-batch | difference of test perplexity, seed by seed | mean and standard error | |",
             "|---|---|---|---|"]  # fmt: skip
    for claim in CLAIMS:
        worse, better = ledgers[claim.worse], ledgers[claim.better]
        seeds = sorted(worse.keys() & better.keys())
        if not seeds:
            continue
        gains = [last_perplexity(worse[seed]) - last_perplexity(better[seed]) for seed in seeds]
        if len(gains) < 3:
            verdict = f"{len(gains)} seed(s): not claimed"
        elif abs(statistics.mean(gains)) > T_95 * standard_error(gains):
            verdict = "reproduced" if sum(gains) > 0 else "the opposite"
        else:
            verdict = "undecided"
        lines.append(
            f"| {claim.text} | {', '.join(f'{gain:+.1f}' for gain in gains)} | {mean_text(gains)} | {verdict} |"
        )
    return lines


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/books")
