"""The paper's CIFAR-10 figures on the reduced VGG19, B = 100, as far as two CPU cores go; the rest wants a GPU.

.venv/bin/python results/cifar10/study.py run --data-root DATA      what is missing, the cheap runs first
.venv/bin/python results/cifar10/study.py run --only gpu_           figures 1-4, 8 and 9 in full: for a GPU
.venv/bin/python results/cifar10/study.py table                     table.md from the committed ledgers
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import LABELS, Job, Study  # noqa: E402

GROW_EVERY = {1: 10, 2: 5, 10: 2, 100: 1}
"""Stages from growth to growth: every 5 of 50 and every 2 of 10, as the original code's commands."""
GROWING = ("gmoe", "ff")


def settings_of(learner: str, wait: int, width: int, epochs: int, *more: str) -> list[str]:
    """Of alma-vision."""
    grow_every = [f"grow_every={GROW_EVERY[wait]}"] if learner in GROWING else []
    return [f"learner={learner}", f"wait={wait}", f"width={width}", f"epochs={epochs}", *grow_every, *more]


def jobs() -> Iterator[Job]:
    """What two cores can do in an afternoon, then what a GPU should."""
    for wait, learner in product((10, 100), ("sm", "gens", "umix", "ens", "gmoe", "ff")):
        yield Job(f"{learner}_c4_w{wait}_e10", settings_of(learner, wait, 4, 10), seeds=2)
    # As large as ff (3,498 parameters), gmoe (6,789) and gens (11,472) are on average over the arrivals.
    for width in (5, 7, 9):
        yield Job(f"sm_c{width}_w10_e10", settings_of("sm", 10, width, 10), seeds=2)
    for learner in ("sm", "gens"):
        yield Job(f"{learner}_c4_w10_e10_replay", settings_of(learner, 10, 4, 10, "replay=all"), seeds=2)
    for width, wait in product((4, 8), (10, 100, 2)):
        yield Job(f"sm_c{width}_w{wait}_e100", settings_of("sm", wait, width, 100), seeds=1)
    # The first version's ablation: an update at every mega-batch, growth every second, beginning with 2 experts.
    for learner in ("gmoe", "gmoe_flat", "moe", "ens_moe"):
        more = ["mega_batches=20", "wait=1", "width=4", "epochs=10", "experts=2", "cer_from=0"]
        if learner.startswith("gmoe"):
            more.append("grow_every=2")
        yield Job(f"ablation_{learner}", [f"learner={learner}", *more], seeds=2)
    for width, learner, wait in product(
        (4, 8, 16, 32, 64), ("sm", "ens", "umix", "gens", "gmoe", "ff"), (1, 2, 10, 100)
    ):
        yield Job(f"gpu_{learner}_c{width}_w{wait}", settings_of(learner, wait, width, 100), seeds=3)
    for width, learner, wait in product((4, 8, 16, 32, 64), ("sm", "ens", "umix", "gens", "gmoe", "ff"), (2, 10)):
        yield Job(
            f"gpu_{learner}_c{width}_w{wait}_replay", settings_of(learner, wait, width, 100, "replay=all"), seeds=3
        )


def small_jobs() -> list[Job]:
    """Without what is left to a GPU, unless it is asked for."""
    every = list(jobs())
    return every if any(argument.startswith("gpu_") for argument in sys.argv) else [
        job for job in every if not job.name.startswith("gpu_")
    ]  # fmt: skip


STUDY = Study(HERE, "cifar10", small_jobs())


def table() -> None:
    """table.md, anytime.png."""
    lines = [
        "| run | settings | seeds | CER | final error, % | parameters, last | Mem | Comp, TFLOP |",
        "|" + "---|" * 8,
    ]
    whole = Study(HERE, "cifar10", list(jobs()))
    for job in whole.finished():
        label = LABELS[job.settings[0].removeprefix("learner=")]
        lines.append(f"| {label} | {' '.join(job.settings[1:])} | {job.seeds} | " + " | ".join(whole.cells(job)) + " |")
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    draw(whole)
    print("\n".join(lines))


def draw(whole: Study) -> None:
    """anytime.png: the test error after each arrival, mean of seeds, of what two cores did."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = {
        "c = 4, wait 10, 10 epochs": [job for job in whole.finished() if job.name.endswith("_c4_w10_e10")],
        "SM, 100 epochs": [job for job in whole.finished() if job.name.endswith("_e100")],
    }
    figure, panels = plt.subplots(1, len(shown), figsize=(10, 3.8), layout="constrained", squeeze=False, sharey=True)
    for axes, (title, jobs) in zip(panels[0], shown.items(), strict=True):
        for number, job in enumerate(jobs):
            ledgers = [whole.rows_of(job, seed) for seed in range(job.seeds)]
            errors = [100 * sum(at) / len(at) for at in zip(*map(_errors, ledgers), strict=True)]
            settings = dict(setting.partition("=")[::2] for setting in job.settings)
            label = LABELS[settings["learner"]]
            if "100" in title:
                label = f"c = {settings['width']}, wait {settings['wait']}"
            axes.step(range(len(errors)), errors, where="post", color=f"C{number}", label=label)
            axes.plot(len(errors) - 1, errors[-1], "o", color=f"C{number}", markersize=4)
        axes.set(title=title, xlabel="mega-batches that have arrived", ylim=(0, 100))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left", ncols=2)
    panels[0][0].set_ylabel("test error, %")
    figure.savefig(HERE / "anytime.png", dpi=120)
    plt.close(figure)


def _errors(rows: list[dict]) -> list[float]:
    return [row["error_rate"] for row in rows]


if __name__ == "__main__":
    STUDY.main(__doc__.splitlines()[0], table)
