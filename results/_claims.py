"""Compare the paper's statements about its Table 2 with the ledgers of a study."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _texts import last_perplexity, mean_text, standard_error

from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.lm.table2 import ROWS
from fairseq_alma.report.paper import TABLE2

PAPER = {name: (row.base, row.large) for name, row in zip(ROWS, TABLE2, strict=True)}
"""Row of Table 2 -> test perplexities of the paper's base and large models at t = 1 to 4; None without a number."""
T_95 = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Number of seeds -> half the width of a 95% confidence interval of a mean, in standard errors (Student's t)."""


@dataclass(frozen=True)
class Claim:
    """A comparison of two rows after a mega-batch. The row that one expects to be better is `better`."""

    text: str
    better: str
    worse: str
    t: int = 4
    """The mega-batch, counted from 1."""


def claim_table(claims: Sequence[Claim], found: Mapping[str, Mapping[int, Sequence[LedgerRow]]]) -> list[str]:
    """Return the lines of a Markdown table: by how many percent the perplexity of the better row is lower.

    The paper's differences are given if both rows are in its Table 2. Claims without a seed that both rows have are
    left out.

    Args:
        claims: the statements.
        found: for each row, named as in PAPER, seed -> rows of its ledger.
    """
    lines = ["| perplexity of the first lower by, in % | t | the paper: base, large | seed by seed | mean | |",
             "|:---|---:|---:|---:|---:|:---|"]  # fmt: skip
    for claim in claims:
        worse, better = found.get(claim.worse, {}), found.get(claim.better, {})
        gains = [
            gain(last_perplexity([better[seed][claim.t]]), last_perplexity([worse[seed][claim.t]]))
            for seed in sorted(worse.keys() & better.keys())
        ]
        if not gains:
            continue
        theirs = gains_in_paper(claim)
        cells = [claim.text, str(claim.t), signed(theirs), signed(gains), mean_text(gains, signed=True)]
        lines.append(f"| {' | '.join(cells)} | {verdict(gains, theirs)} |")
    return lines


def gains_in_paper(claim: Claim) -> list[float]:
    """Return the differences of the paper's base and large models; [] if its Table 2 does not have both numbers."""
    both = zip(PAPER.get(claim.better, ()), PAPER.get(claim.worse, ()), strict=False)
    pairs = [(better[claim.t - 1], worse[claim.t - 1]) for better, worse in both]
    return [gain(better, worse) for better, worse in pairs if better is not None and worse is not None]


def signed(values: Sequence[float]) -> str:
    """Return the values as text, with their signs."""
    return ", ".join(f"{one:+.1f}" for one in values)


def gain(better: float, worse: float) -> float:
    """Return by how many percent one perplexity is lower than another."""
    return 100 * (1 - better / worse)


def verdict(gains: Sequence[float], theirs: Sequence[float] = ()) -> str:
    """Return what the differences, one for each seed, say of a claim.

    A claim is not seen if the 95% interval contains zero, and is below the differences of both models of the paper.

    Args:
        gains: the differences.
        theirs: those of the paper's models; () if its text makes the claim, and no number does.
    """
    if len(gains) < min(T_95):
        return f"{len(gains)} seed(s): not claimed"
    if theirs and min(theirs) < 0 < max(theirs):
        return "the paper's models disagree"
    sign = -1 if theirs and theirs[0] < 0 else 1
    mean, half = sign * statistics.mean(gains), T_95[len(gains)] * standard_error(gains)
    if abs(mean) > half:
        return "reproduced" if mean > 0 else "the opposite"
    return "not seen" if theirs and mean + half < min(sign * one for one in theirs) else "undecided"
