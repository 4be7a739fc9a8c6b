"""Part of vision_peers.py: measure training steps of several networks that are computed together, in one process.

The networks are the members of an ensemble, or single networks with different seeds.
"""

from collections.abc import Callable

import torch
from _common import interleaved, ratio_columns, table, verdict

from vision.batches import Batches, Rows, StageData
from vision.networks import MLPStack
from vision.optimizers import AdaDelta
from vision.seeds import generator
from vision.training import OwnLoss, train_stage

EPOCHS = 5


def rows(num_seeds: int, num_examples: int) -> Rows:
    """Return random examples and labels, with the shapes of MNIST, for several seeds."""
    x, y = torch.randn(num_seeds * num_examples, 784), torch.randint(10, (num_seeds * num_examples,))
    return Rows(x, y, torch.nn.functional.one_hot(y, 10).float(), num_seeds, num_examples)


def ours(num_seeds: int, members: int, width: int) -> Callable[[], None]:
    """Return a function that trains networks of this software together for one stage.

    Args:
        num_seeds: number of seeds.
        members: number of networks per seed.
        width: width of the hidden layers.
    """
    data = StageData(rows(num_seeds, 1080), 0, rows(num_seeds, 120))
    generators = [generator(number) for number in range(num_seeds * members)]
    stack = MLPStack.initialised((784, width, width, 10), generators, torch.device("cpu"))

    def train() -> None:
        batches = Batches(data, generators, 128)
        optimizer = AdaDelta(stack.parameters.flat)
        train_stage(stack, batches, data.validation, OwnLoss(num_seeds, members), optimizer, EPOCHS, "validation_loss")

    return train


def plain(members: int, width: int) -> Callable[[], None]:
    """Return a function that trains several networks (`members`) one after another for one stage, with torch.optim."""
    training, validation = rows(1, 1080), rows(1, 120)

    def train() -> None:
        for _ in range(members):
            model = torch.nn.Sequential(
                torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
                torch.nn.Linear(width, 10),
            )  # fmt: skip
            optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
            for _ in range(EPOCHS):
                for index in torch.randperm(1080).split(128):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(training.x[index]), training.y[index]).backward()
                    optimizer.step()
                with torch.no_grad():
                    torch.nn.functional.cross_entropy(model(validation.x), validation.y)

    return train


def five_of_ours(width: int) -> Callable[[], None]:
    """Return a function that trains five single networks of this software one after another."""
    single = ours(1, 1, width)

    def train() -> None:
        for _ in range(5):
            single()

    return train


def stack_tables(repeats: int) -> tuple[list[str], list[str]]:
    """Measure the training steps of one stage of wait 10. Return two Markdown tables: for ensembles, and for seeds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps, ensembles, seeds = EPOCHS * 9, [], []
    for width in (4, 32, 64):
        alternatives = {"ens": ours(1, 5, width), "five": five_of_ours(width), "plain": plain(5, width)}
        seconds = interleaved(alternatives, repeats)
        against = {name: ratio_columns(seconds[name], seconds["ens"])[1] for name in ("plain", "five")}
        ensembles.append(
            [
                width, *(f"{1000 * min(seconds[name]) / steps:.2f}" for name in ("ens", "five", "plain")),
                f"{against['plain']:.1f}", verdict(against["plain"], 4.0, at_most=False),
                f"{against['five']:.2f}", verdict(against["five"], 1.3, at_most=False),
            ]
        )  # fmt: skip
        alternatives = {"one": ours(1, 1, width), "three": ours(3, 1, width)}
        seconds = interleaved(alternatives, repeats)
        ratio = ratio_columns(seconds["three"], seconds["one"])[1]
        target = {4: 1.6, 32: 2.4}.get(width)
        seeds.append(
            [
                width, *(f"{1000 * min(seconds[name]) / steps:.2f}" for name in alternatives), f"{ratio:.2f}",
                verdict(ratio, target, at_most=True) if target else "",
            ]
        )  # fmt: skip
    return (
        table(["width", "Ens-5, ms a step", "five SM", "five torch.optim", "five torch.optim / Ens-5", "at least 4",
               "five SM / Ens-5", "at least 1.3"], ensembles),
        table(["width", "one seed, ms a step", "three seeds stacked", "ratio", "target"], seeds),
    )  # fmt: skip
