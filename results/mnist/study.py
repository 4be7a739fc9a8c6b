"""The paper's MNIST grid: learners x waits x widths, B = 500, 100 epochs, 3 seeds.

.venv/bin/python results/mnist/study.py run --data-root DATA       what is missing, two runs side by side
.venv/bin/python results/mnist/study.py table                      table.md and pictures from the committed ledgers
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import LABELS, Job, Study  # noqa: E402

LEARNERS = ("sm", "gens", "umix", "ens", "gmoe")
WAITS = (500, 50, 25, 10, 1)
WIDTHS = (4, 64, 8, 32)
GROW_EVERY = {1: 25, 10: 3, 25: 1, 50: 1, 500: 1}
"""gMoE: stages from growth to growth, so that no run grows more than 20 times."""


def jobs() -> Iterator[Job]:
    """The cheap ones and the outer widths first."""
    for width, learner, wait in product(WIDTHS, LEARNERS, WAITS):
        settings = [f"learner={learner}", f"wait={wait}", f"width={width}"]
        if learner == "gmoe":
            settings.append(f"grow_every={GROW_EVERY[wait]}")
        yield Job(f"{learner}_h{width}_w{wait}", settings)


def replays() -> Iterator[Job]:
    """SM with all it has seen, where that can be paid for."""
    for width, wait in ((4, 50), (64, 50), (4, 10)):
        settings = ["learner=sm", f"wait={wait}", f"width={width}", "replay=all"]
        yield Job(f"sm_h{width}_w{wait}_replay", settings)


STUDY = Study(HERE, "mnist", [*jobs(), *replays()])


def found() -> dict[tuple[int, str, int], Job]:
    """(width, learner, wait) to the runs that are finished."""
    by_name = {job.name: job for job in STUDY.finished()}
    keys = product(sorted(WIDTHS), ("sm", "ens", "umix", "gens", "gmoe"), sorted(WAITS))
    return {key: by_name[name] for key in keys if (name := f"{key[1]}_h{key[0]}_w{key[2]}") in by_name}


def table() -> None:
    """table.md, cer.png."""
    lines = [
        "| width | learner | wait | CER | final error, % | parameters, last | Mem | Comp, TFLOP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (width, learner, wait), job in found().items():
        lines.append("| " + " | ".join([str(width), LABELS[learner], str(wait), *STUDY.cells(job)]) + " |")
    for job in replays():
        if STUDY.summary_of(job):
            wait, width = (setting.partition("=")[2] for setting in job.settings[1:3])
            lines.append("| " + " | ".join([width, "SM, replay", wait, *STUDY.cells(job)]) + " |")
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    draw()
    print("\n".join(lines))


def draw() -> None:
    """CER against the wait, one panel a width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    finished = found()
    widths = sorted({width for width, _, _ in finished})
    figure, panels = plt.subplots(
        1, len(widths), figsize=(1 + 3.6 * len(widths), 3.8), layout="constrained", squeeze=False
    )
    for axes, width in zip(panels[0], widths, strict=True):
        for number, learner in enumerate(("sm", "ens", "umix", "gens", "gmoe")):
            waits = [wait for wait in sorted(WAITS) if (width, learner, wait) in finished]
            points = [STUDY.summary_of(finished[width, learner, wait]) for wait in waits]
            axes.errorbar(
                waits, [one["mean"]["cer"] for one in points], yerr=[one["stderr"]["cer"] for one in points],
                label=LABELS[learner], color=f"C{number}", marker="os^Dv"[number], capsize=2,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted(WAITS), [str(wait) for wait in sorted(WAITS)])
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.tick_params(axis="y", which="minor", labelsize="x-small")
        axes.set_title(f"width {width}", fontsize="medium")
        axes.set_xlabel("wait (mega-batches)")
        axes.grid(which="both", alpha=0.3)
    panels[0][0].set_ylabel("CER over 500 arrivals (log scale)")
    panels[0][0].legend(fontsize="small")
    figure.savefig(HERE / "cer.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0], table)
