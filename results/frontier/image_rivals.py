"""Compare preset=anytime with rivals of the continual learning literature on images: class by class, in random order.

python results/frontier/image_rivals.py select --data-root DATA          choose settings: 90 to 110 runs a stream
python results/frontier/image_rivals.py run --data-root DATA             train what has no ledger, two runs at a time
python results/frontier/image_rivals.py run --data-root DATA --only cifar10_classes

Every row has about the training FLOPs of EPOCHS passes over each mega-batch. ER, DER++ and GDumb have a memory of 500
or 5,000 training images; the other rows with replay keep all. The plugins in results/rivals name the sources of the
rivals. Budgeted uniform sampling needs no plugin: a fixed number of steps at each arrival, with batches drawn uniformly
from all images so far (Prabhu et al. 2023, arXiv 2303.11165).

`select` tries learning rates and the values of `Recipe.grid` on seed 100, another division of the same training images
(results/SELECTION_images.md), and writes the errors on validation data to image_rivals_selection.json. `run` uses what
was best on the same stream, and reports seeds 0 to 4. On one core, one seed of a row takes two minutes on CIFAR-10 and
15 seconds on MNIST, and everything nine hours. results/rebuild.py makes results/frontier/image_rivals.md of the
committed ledgers.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from _grid import Job, Study  # noqa: E402
from _selection import Choices  # noqa: E402
from _texts import mean_text  # noqa: E402

from fairseq_alma.core.error_matrix import read_errors  # noqa: E402
from fairseq_alma.core.ledger import Ledger  # noqa: E402
from fairseq_alma.core.waiting import arrivals_of_stages  # noqa: E402

EPOCHS, SEEDS, SELECTION_SEED = 10, 5, 100
SELECTION = Choices(HERE / "image_rivals_selection.json", "validation_error")
MEMORIES = (500, 5000)
REPLAYED = ("select_by=last", "lr={lr}", "epochs={epochs}")
WAITS = {"wait": ("10", "1", "5", "25", "geometric")}
SCHEDULE = "schedule={schedule}"


@dataclass(frozen=True)
class Recipe:
    """One row of each table."""

    label: str
    """The name in the table."""
    settings: tuple[str, ...]
    """Arguments of alma-vision. {NAME} stands for the value that was chosen from the grid, {epochs} for the epochs."""
    grid: Mapping[str, tuple[str, ...]] | None = field(default_factory=dict)
    """Name -> the values that are tried, after those of lr. They are tried name by name, in this order; names that are
    still to come have their first value. None: the settings of the paper, and nothing is tried."""
    decays: bool = False
    """Whether a rate that falls in each stage is tried, too, with all values of lr."""
    memory: int | None = None
    """Size of the memory if each stage trains on the memory only; None for the other recipes."""


def _with_memory(size: int) -> dict[str, Recipe]:
    """Return the recipes that keep a memory of `size` training images."""
    er, text, bounded = ("plugin=results.rivals.er", "learner=er"), f"memory {size:,}", (f"memory={size}", *REPLAYED)
    derpp = ("plugin=results.rivals.der", "learner=derpp", "replay=0.667", "alpha={alpha}", "beta={beta}", SCHEDULE)
    gdumb = ("plugin=results.rivals.gdumb", "learner=gdumb", "replay=all", "schedule=cosine", "wait={wait}")
    alpha_beta = {"alpha": ("0.2", "0.1", "0.5", "1"), "beta": ("0.5", "1")}
    return {
        f"er_{size}": Recipe(
            f"ER, {text}",
            (*er, "replay={replay}", SCHEDULE, *bounded),
            {"replay": ("0.5", "0.8", "uniform")},
            decays=True,
        ),
        f"derpp_{size}": Recipe(f"DER++, {text}", (*derpp, *bounded), alpha_beta, decays=True),
        f"gdumb_{size}": Recipe(
            f"GDumb, {text}", (*gdumb, *bounded), {"wait": ("5", "1", "10", "25", "geometric")}, memory=size
        ),
        f"anytime_{size}": Recipe(
            f"anytime, {text}", (*er, "replay={replay}", "average=power:8", *bounded), {"replay": ("uniform", "0.5")}
        ),
    }


RECIPES = {
    "anytime": Recipe("**anytime**", ("preset=anytime", "extra_epochs=0", *REPLAYED)),
    "anytime_half": Recipe("anytime, `replay=0.5`", ("preset=anytime", "replay=0.5", "extra_epochs=0", *REPLAYED)),
    "budgeted": Recipe("budgeted uniform sampling", ("learner=sm", "replay=uniform", SCHEDULE, *REPLAYED), decays=True),
    "sm_half": Recipe("SM, `replay=0.5`", ("learner=sm", "replay=0.5", SCHEDULE, *REPLAYED), decays=True),
    **{name: recipe for size in MEMORIES for name, recipe in _with_memory(size).items()},
    "anytime_waits": Recipe(
        "anytime, waits chosen", ("preset=anytime", "extra_epochs=0", "wait={wait}", *REPLAYED), WAITS
    ),
    "sm_waits": Recipe("SM, waits chosen", ("learner=sm", "wait={wait}", "lr={lr}", "epochs={epochs}"), WAITS),
    "sm_w1": Recipe("SM, wait 1", ("learner=sm", "epochs={epochs}"), None),
    "sm_w10": Recipe("SM, wait 10", ("learner=sm", "wait=10", "epochs={epochs}"), None),
}
"""Name -> recipe."""


@dataclass(frozen=True)
class RivalStudy(Study):
    """The runs on one stream. The run of a recipe has the name STREAM_RECIPE."""

    stream: str
    """Name of the stream."""
    heading: str
    settings: tuple[str, ...]
    """Arguments of alma-vision that all recipes have."""
    num_mega_batches: int
    num_new: int
    """Number of training images of a mega-batch."""
    lr: tuple[str, ...]
    """The learning rates that are tried, the default first."""
    actions: ClassVar[Mapping[str, str]] = {"select": "choose the settings", **Study.actions}

    def epochs(self, recipe: Recipe, wait: str) -> int:
        """Return the epochs of each stage for which the images that all stages read are those of EPOCHS passes."""
        if recipe.memory is None:
            return EPOCHS
        stages = arrivals_of_stages(self.num_mega_batches, int(wait) if wait.isdecimal() else wait)
        read = sum(min(recipe.memory, t * self.num_new) for t in stages)
        return max(1, round(EPOCHS * self.num_mega_batches * self.num_new / read))

    def grid(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return the values that are tried for a recipe. Names with a comma, and their values, belong together."""
        recipe = RECIPES[name]
        if recipe.grid is None:
            return {}
        rates = {"lr": self.lr}
        if recipe.decays:
            rates = {"lr,schedule": tuple(f"{lr},{name}" for name in ("constant", "cosine") for lr in self.lr)}
        return {**rates, **recipe.grid}

    def job(self, name: str, chosen: Mapping[str, str]) -> Job:
        """Return the runs of a recipe with these values from its grid."""
        values: dict[str, str] = {}
        for names, texts in chosen.items():
            values |= zip(names.split(","), texts.split(","), strict=True)
        epochs = self.epochs(RECIPES[name], values.get("wait", "1"))
        settings = [text.format(**values, epochs=epochs) for text in RECIPES[name].settings]
        return Job(f"{self.stream}_{name}", [*self.settings, *settings], SEEDS)

    def do(self, arguments: argparse.Namespace, deadline: float) -> None:
        if arguments.what == "select":
            return self._select(arguments, deadline)
        known = {name: self._best(name) for name in RECIPES}
        if without := [name for name, values in known.items() if values is None]:
            print(f"{SELECTION.path} has no choice on {self.stream} for {', '.join(without)}, which are not run: give "
                  f"`select` first", file=sys.stderr)  # fmt: skip
        jobs = [self.job(name, values) for name, values in known.items() if values is not None]
        super(RivalStudy, replace(self, jobs=jobs)).do(arguments, deadline)

    def _best(self, name: str) -> dict[str, str] | None:
        """Return the values with the lowest error on validation data; None if not all of the grid were tried."""
        return SELECTION.best(self.stream, name, self.grid(name))

    def _select(self, arguments: argparse.Namespace, deadline: float) -> None:
        """Try the grid of each recipe, with one seed, and write the errors on validation data to SELECTION."""

        def search(name: str) -> None:
            def measure(values: dict[str, str]) -> float | None:
                job = self.job(name, values)
                folder = "_".join(["select", job.name, *values.values()]).replace(",", "_")
                # The ledgers are not committed. The test set is scored, too, but nothing here reads these scores.
                if not self._train(job, folder, [f"seed={SELECTION_SEED}"], arguments.data_root, deadline):
                    return None
                return validation_error(self._runs / folder)

            if SELECTION.search(self.stream, name, self.grid(name), measure) is None:
                print(f"{name}: not everything was tried: give the same command again", file=sys.stderr, flush=True)

        names = [name for name in RECIPES if f"{self.stream}_{name}".startswith(arguments.only)]
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(search, names))


def validation_error(run: Path) -> float:
    """Return the mean over the arrivals of the error rate on validation data.

    Class by class, these are the validation data of all mega-batches, also of later ones, as for CER. In random order,
    they are those of the next mega-batch (`prequential_error_rate`).
    """
    matrix = read_errors(run, [row.stage for row in Ledger(run / "ledger.jsonl").rows()])
    if matrix is None:
        return json.loads((run / "summary.json").read_text())["prequential_error_rate"]
    return statistics.mean(statistics.mean(errors) for errors in matrix.by_mega_batch[1:])


CIFAR10: dict[str, Any] = {
    "dataset": "cifar10", "settings": ("mega_batches=50", "width=4"), "num_mega_batches": 50, "num_new": 900,
    "lr": ("0.01", "0.003", "0.03"),
}  # fmt: skip
MNIST: dict[str, Any] = {
    "dataset": "mnist", "settings": ("mega_batches=100", "width=32"), "num_mega_batches": 100, "num_new": 540,
    "lr": ("1", "0.3", "3", "10"),
}  # fmt: skip


def _study(name: str, heading: str, order: str, settings: tuple[str, ...], **sizes: Any) -> RivalStudy:
    return RivalStudy(HERE, jobs=(), stream=name, heading=heading, settings=(f"order={order}", *settings), **sizes)


STUDIES = (
    _study("cifar10_classes", "CIFAR-10, class by class, reduced VGG19 with 4 channels, B = 50", "classes", **CIFAR10),
    _study("cifar10_random", "CIFAR-10, in random order, reduced VGG19 with 4 channels, B = 50", "random", **CIFAR10),
    _study("mnist_classes", "MNIST, class by class, perceptron of width 32, B = 100", "classes", **MNIST),
    _study("mnist_random", "MNIST, in random order, perceptron of width 32, B = 100", "random", **MNIST),
)


def tables() -> dict[str, str]:
    """Return file name -> the tables of all streams, with the rows whose ledgers are committed; {} without ledgers."""
    lines = [line for study in STUDIES for line in _table(study)]
    if not lines:
        return {}
    note = (
        "CER is the test error rate, a fraction, summed over all arrivals. Class by class, it contains the errors on "
        "classes that have not arrived yet. Differences are paired over seeds, with their standard error; negative is "
        "better. FLOPs are relative to anytime."
    )
    return {"image_rivals.md": "\n".join(["# The recipe and its rivals on images", "", *lines, note, ""])}


def _table(study: RivalStudy) -> list[str]:
    """Return the lines of the table of a stream, the best recipe first; [] without a ledger of anytime."""
    paths = {name: study.folder / "ledgers" / f"{study.stream}_{name}" / "summary.json" for name in RECIPES}
    found = {name: json.loads(path.read_text())["per_seed"] for name, path in paths.items() if path.exists()}
    if "anytime" not in found:
        return []
    lines = [
        f"## {study.heading}",
        "",
        "| learner | CER | against anytime, in % | final error, in % | training FLOPs | seeds |",
        "|:---|---:|---:|---:|---:|---:|",
    ]
    base = found["anytime"]
    for name, seeds in sorted(found.items(), key=lambda one: statistics.mean(seed["cer"] for seed in one[1])):
        changes = [100 * (own["cer"] / other["cer"] - 1) for own, other in zip(seeds, base, strict=True)]
        cells = [
            RECIPES[name].label,
            mean_text([seed["cer"] for seed in seeds], 2),
            "" if name == "anytime" else mean_text(changes, signed=True),
            mean_text([100 * seed["final"] for seed in seeds]),
            f"{statistics.mean(own['comp'] / other['comp'] for own, other in zip(seeds, base, strict=True)):.2f}",
            str(len(seeds)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    for one in STUDIES:
        one.main(__doc__.splitlines()[0])
