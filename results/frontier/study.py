"""Compare one averaged model that replays with the paper's learners on MNIST, B = 500, 5 seeds.

.venv/bin/python results/frontier/study.py run --data-root DATA       runs what is missing, two runs at a time

The settings of preset=anytime were chosen on other streams: seed 100, width 32. The study reports seeds 0 to 4.
results/rebuild.py makes results/frontier/mnist_hWIDTH.md of the ledgers.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import Job, Study  # noqa: E402
from _texts import standard_error  # noqa: E402

WIDE = {32: 141, 64: 260, 4: 20}
"""For each width, that of one network with about as many parameters as five networks."""
CONSTANT = ("preset=anytime", "epochs=100", "extra_epochs=0")
"""The recipe with as many epochs as preset=paper, so that the compute of a run is that of SM."""
ROWS = {
    "sm_w10": ("learner=sm", "wait=10"),
    "anytime": ("preset=anytime",),
    "ens_w10": ("learner=ens", "wait=10"),
    "anytime_wide": ("preset=anytime",),
    "anytime_100": CONSTANT,
    "geometric": ("learner=sm", "wait=geometric"),
    "sm_w5": ("learner=sm", "wait=5"),
    "sm_w25": ("learner=sm", "wait=25"),
    "no_average": (*CONSTANT, "predict_with=last", "average_power=0"),
    "no_replay": (*CONSTANT, "replay=false"),
    "only_replay_share": (*CONSTANT, "replay=0.75"),
    "memory_5000": (*CONSTANT, "replay_memory=5000"),
    "geometric_uniform": ("learner=sm", "wait=geometric", "replay=uniform"),
    "sm_w1": ("learner=sm", "wait=1"),
    "ens_w25": ("learner=ens", "wait=25"),
}
"""Name of each row -> arguments of alma-vision, the most telling rows first."""
TEXTS = {
    "sm_w1": "SM, wait 1", "sm_w5": "SM, wait 5", "sm_w10": "SM, wait 10", "sm_w25": "SM, wait 25",
    "ens_w10": "Ens of 5, wait 10", "ens_w25": "Ens of 5, wait 25",
    "anytime": "**anytime**", "anytime_wide": "**anytime**, as many parameters as Ens of 5",
    "anytime_100": "anytime, 100 epochs", "no_average": "anytime, 100 epochs, without the average",
    "no_replay": "anytime, 100 epochs, without replay", "only_replay_share": "anytime, 100 epochs, replay=0.75",
    "memory_5000": "anytime, 100 epochs, at most 5,000 stored examples",
    "geometric": "SM, geometric waits", "geometric_uniform": "SM, geometric waits, replay=uniform",
}  # fmt: skip
"""How the table names each row."""


def jobs() -> Iterator[Job]:
    """Yield the jobs: the first six rows for each width, then the others."""
    names = list(ROWS)
    for part in (names[:6], names[6:]):
        for width in WIDE:
            for name in part:
                size = WIDE[width] if name.endswith("_wide") else width
                yield Job(f"{name}_h{width}", [*ROWS[name], f"width={size}"], seeds=5)


STUDY = Study(HERE, "mnist", list(jobs()))


def tables() -> dict[str, str]:
    """Return file name -> table of one width as Markdown, with the rows whose ledgers are committed."""
    return {f"mnist_h{width}.md": table for width in sorted(WIDE) if (table := _table(width))}


def _table(width: int) -> str:
    found = {name: _summary(name, width) for name in ROWS}
    fixed = {name: row for name, row in found.items() if name.startswith("sm_w") and row}
    if not fixed:
        return ""
    best = min(fixed, key=lambda name: _mean(fixed[name], "cer"))
    lines = [
        f"# MNIST, width {width}",
        "",
        "| learner | CER | against the best SM | final error | training FLOPs | of the best SM |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    for name, row in sorted(found.items(), key=lambda one: _mean(one[1], "cer")):
        if row:
            lines.append(_line(TEXTS[name], row, fixed[best]))
    waits = ", ".join(name[4:] for name in sorted(fixed, key=lambda name: int(name[4:])))
    return "\n".join([*lines, "", f"The best SM is {TEXTS[best]}, of the waits {waits}.", ""])


def _summary(name: str, width: int) -> list[dict]:
    """Return the summary of each seed of a run, or [] if its ledger is not committed."""
    path = HERE / "ledgers" / f"{name}_h{width}" / "summary.json"
    return json.loads(path.read_text())["per_seed"] if path.exists() else []


def _line(text: str, row: list[dict], base: list[dict]) -> str:
    """Return a line of the table. Differences are paired over seeds, with their standard error."""
    cers = [one["cer"] for one in row]
    ratios = [one["cer"] / other["cer"] - 1 for one, other in zip(row, base, strict=True)]
    change = f"{100 * statistics.mean(ratios):+.1f}% ± {100 * standard_error(ratios):.1f}" if row is not base else ""
    cost = _mean(row, "comp") / _mean(base, "comp")
    error = f"{statistics.mean(cers):.2f} ± {standard_error(cers):.2f}"
    return f"| {text} | {error} | {change} | {100 * _mean(row, 'final'):.2f}% | {_mean(row, 'comp'):.3g} | {cost:.2f} |"


def _mean(row: list[dict], key: str) -> float:
    return statistics.mean(one[key] for one in row) if row else float("inf")


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0])
