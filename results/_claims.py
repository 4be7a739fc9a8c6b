"""Compare the paper's statements about its Table 2 with the ledgers of a study."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _texts import last_perplexity, mean_text, standard_error

from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.lm.table2 import ROWS
from fairseq_alma.report.paper import TABLE2

PAPER = {name: row.base for name, row in zip(ROWS, TABLE2, strict=True)}
"""Row of Table 2 -> test perplexity of the paper's base model at t = 1 to 4; None where the table has no number."""
T_95 = {3: 4.30, 4: 3.18, 5: 2.78}
"""Number of seeds -> half the width of a 95% confidence interval of a mean, in standard errors (Student's t)."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper: after a mega-batch, row `better` has a lower test perplexity than row `worse`."""

    text: str
    better: str
    worse: str
    t: int = 4
    """The mega-batch, counted from 1."""


def claim_table(claims: Sequence[Claim], found: Mapping[str, Mapping[int, Sequence[LedgerRow]]]) -> list[str]:
    """Return the lines of a Markdown table: by how many percent the perplexity of the better row is lower.

    The paper's difference is given if both rows are in its Table 2. Claims without a seed that both rows have are left
    out.

    Args:
        claims: the statements.
        found: for each row, named as in PAPER, seed -> rows of its ledger.
    """
    lines = ["| lower test perplexity | t | the paper | seed by seed | mean and standard error | |",
             "|:---|---:|---:|---:|---:|:---|"]  # fmt: skip
    for claim in claims:
        worse, better = found.get(claim.worse, {}), found.get(claim.better, {})
        gains = [
            gain(last_perplexity([better[seed][claim.t]]), last_perplexity([worse[seed][claim.t]]))
            for seed in sorted(worse.keys() & better.keys())
        ]
        if not gains:
            continue
        in_paper = [PAPER[name][claim.t - 1] for name in (claim.better, claim.worse) if name in PAPER]
        theirs = f"{gain(*in_paper):+.1f}" if len(in_paper) == 2 and None not in in_paper else ""
        cells = [claim.text, str(claim.t), theirs, ", ".join(f"{one:+.1f}" for one in gains), mean_text(gains)]
        lines.append(f"| {' | '.join(cells)} | {verdict(gains)} |")
    return lines


def gain(better: float, worse: float) -> float:
    """Return by how many percent one perplexity is lower than another."""
    return 100 * (1 - better / worse)


def verdict(gains: Sequence[float]) -> str:
    """Return what the differences, one for each seed, say of a claim."""
    if len(gains) < min(T_95):
        return f"{len(gains)} seed(s): not claimed"
    if abs(statistics.mean(gains)) <= T_95[len(gains)] * standard_error(gains):
        return "undecided"
    return "reproduced" if sum(gains) > 0 else "the opposite"
