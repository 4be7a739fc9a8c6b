"""Compare models that grow with fixed ones, on books in one pass, 5 seeds: more experts, or more layers.

python results/frontier/growth.py run --books FOLDER              train what has no ledger, two runs at a time
python results/frontier/growth.py run --books FOLDER --only growth_gmoe --seeds 1      only some rows, only seed 0

The stream has B = 4 mega-batches of a tenth of the books, and each stage is one pass over its mega-batch. (In
results/books, a stage has five passes over a smaller mega-batch. There the model overfits, and 12 experts are no better
than 4.) All rows have the same number of updates. The learning rate is that of results/books. Nothing was tuned.

results/rebuild.py makes results/frontier/growth.md and growth_depth.md of the committed ledgers.
"""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _texts import BookStudy, Row, mean_text, standard_error  # noqa: E402

SEEDS = (0, 1, 2, 3, 4)
T_95 = 2.776
"""Half the width of a 95% confidence interval of a mean over 5 seeds, in standard errors (Student's t)."""
GROWS = ("learner=gmoe", "experts=4", "grow_experts=[2,2,4]")
DENSE = ("learner=gmoe", "experts=1", "grow_experts=[3,4,4]", "grow_router=tree")
LIFELONG = (
    "plugin=results.rivals.lifelong_moe", "learner=lifelong_moe", "experts=4", "grow_experts=[2,2,4]",
    "fairseq=--criterion lifelong_moe --distillation-weight 1",
)  # fmt: skip
ROWS = (
    Row("growth_sm_8", ("learner=sm", "experts=8"), seeds=SEEDS),
    Row("growth_sm_12", ("learner=sm", "experts=12"), seeds=SEEDS),
    Row("growth_gmoe_copy", GROWS, seeds=SEEDS),
    Row("growth_gmoe_tree", (*GROWS, "grow_router=tree"), seeds=SEEDS),
    Row("growth_sm_4", ("learner=sm", "experts=4"), seeds=SEEDS),
    Row("growth_gmoe_gradient", (*GROWS, "grow_router=tree", "copy_experts_by=gradient"), seeds=SEEDS),
    Row("growth_gmoe_random", (*GROWS, "grow_router=tree", "copy_experts_by=random"), seeds=SEEDS),
    Row("growth_dense", DENSE, seeds=SEEDS),
    Row("growth_dense_drop", (*DENSE, "grow_drop=0.5"), seeds=SEEDS),
    Row("growth_layers", ("learner=gmoe", "experts=4", "grow_experts=0", "grow_layers=[2,2,0]"), seeds=SEEDS),
    Row("growth_8_layers", ("learner=sm", "experts=4", "fairseq=--decoder-layers 8"), seeds=SEEDS),
    Row("growth_gstack", ("plugin=results.rivals.gstack", "learner=gstack", "experts=4"), seeds=SEEDS),
    Row("growth_lifelong", LIFELONG, seeds=SEEDS),
)
"""The rows, the most telling ones first."""
TEXTS = {
    "growth_sm_8": "SM, 8 experts (gMoE's average is 7.5)",
    "growth_sm_12": "SM, 12 experts (gMoE's final size)",
    "growth_gmoe_copy": "gMoE, 4 to 12, the paper's",
    "growth_gmoe_tree": "gMoE, 4 to 12, tree",
    "growth_sm_4": "SM, 4 experts (gMoE's first size)",
    "growth_gmoe_gradient": "gMoE, 4 to 12, tree, by gradient",
    "growth_gmoe_random": "gMoE, 4 to 12, tree, at random",
    "growth_dense": "gMoE, 1 to 12, tree",
    "growth_dense_drop": "gMoE, 1 to 12, tree, half of the units dropped",
    "growth_lifelong": "Lifelong-MoE, 4 to 12",
}
"""How the table names each row."""
FIXED = {"growth_sm_4": "4 experts", "growth_sm_8": "8", "growth_sm_12": "12"}
"""The rows with which all others are compared -> heading of the column."""
DEPTH_TEXTS = {
    "growth_8_layers": "SM, 8 layers",
    "growth_layers": "4, 6, 8 and 8 layers (`grow_layers=[2,2,0]`)",
    "growth_gstack": "4, 8, 8 and 8 layers (G_stack)",
    "growth_sm_4": "SM, 4 layers",
}
DEPTH_FIXED = {"growth_sm_4": "4 layers", "growth_8_layers": "8"}

STUDY = BookStudy(ROWS, HERE / "ledgers", settings=("dropout=0", "wait=1"), parts=10, passes=1)


def tables() -> dict[str, str]:
    """Return file name -> table as Markdown, with the rows whose ledgers are committed; {} without ledgers."""
    made = {
        "growth.md": _table("Growing and fixed mixtures on books", TEXTS, FIXED),
        "growth_depth.md": _table("Growing and fixed depth on books", DEPTH_TEXTS, DEPTH_FIXED),
    }
    return {name: table for name, table in made.items() if table}


def _table(heading: str, texts: Mapping[str, str], fixed: Mapping[str, str]) -> str:
    """Return a table as Markdown, or "" if no row of it has ledgers but those that other tables have.

    Args:
        heading: heading of the table.
        texts: name of a row -> how the table names it.
        fixed: name of a row with which all others are compared -> heading of the column.
    """
    found = {name: row for name in texts if (row := STUDY.summaries(name))}
    if not found.keys() - {"growth_sm_4"}:
        return ""
    lines = [
        f"# {heading}",
        "",
        f"| learner | seeds | final perplexity | average | against {' | against '.join(fixed.values())} | Comp |",
        f"|:---{'|---:' * (len(fixed) + 4)}|",
    ]
    for name, row in found.items():
        means = " | ".join(mean_text([one[key] for one in row.values()], 2) for key in ("final", "average_perplexity"))
        differences = " | ".join("" if name == base else _difference(row, found.get(base, {})) for base in fixed)
        comp = statistics.mean(one["comp"] for one in row.values())
        lines.append(f"| {texts[name]} | {len(row)} | {means} | {differences} | {comp:.4g} |")
    note = (
        "The average is that of the perplexities after all arrivals. Differences are those of the final perplexity in "
        "percent, paired over seeds, with their standard error. A difference is called better or worse if Student's "
        "95% interval over 5 seeds excludes 0."
    )
    return "\n".join([*lines, "", note, ""])


def _difference(row: dict[int, dict], base: dict[int, dict]) -> str:
    """Return the difference of the final perplexities of two rows in percent, and what it says, as text."""
    gaps = [100 * (row[seed]["final"] / base[seed]["final"] - 1) for seed in sorted(row.keys() & base.keys())]
    if len(gaps) < len(SEEDS):
        return mean_text(gaps, 2, signed=True)
    mean, error = statistics.mean(gaps), standard_error(gaps)
    verdict = "no clear difference" if abs(mean) <= T_95 * error else "better" if mean < 0 else "worse"
    return f"{mean_text(gaps, 2, signed=True)}, {verdict}"


if __name__ == "__main__":
    STUDY.main(__doc__, out="runs/growth")
