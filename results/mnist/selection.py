"""Measure how much the choice of an epoch changes the error after a stage: SM, width 32, the first stage at wait 2.

    .venv/bin/python results/mnist/selection.py --data-root DATA

MNIST, B = 500, 20 seeds. Trains this software and a plain PyTorch loop on the same data, with four sets of
initialisations and orders. Prints the test error of the epoch with the best validation accuracy (24 examples) and of
the last epoch.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fairseq_alma.core.stream import MegaBatch
from vision.batches import Batches, Memory, StageData
from vision.datasets import Dataset, load_dataset
from vision.inputs import Vectors
from vision.networks import MLPStack
from vision.optimizers import AdaDelta
from vision.seeds import generator
from vision.stream import partition
from vision.training import OwnLoss, Watcher, train_stage

EPOCHS, WIDTH, WAIT = 100, 32, 2
SEEDS = range(20)
Errors = tuple[list[float], list[float]]
"""Test errors of the chosen epoch, and test errors of the last epoch. Each list contains one number per seed."""


def data_of(dataset: Dataset, seeds: range) -> StageData:
    """Return the data of the first stage for all seeds."""
    parts = [partition(dataset, 500, 0.1, seed)[:WAIT] for seed in seeds]
    new = [MegaBatch(t, str(t), [part[t - 1] for part in parts]) for t in range(1, WAIT + 1)]
    return Memory(Vectors(dataset.pixels), 10, len(seeds), torch.device("cpu")).stage_data(new, [], False)


def ours(data: StageData, x: torch.Tensor, y: torch.Tensor, first: int) -> Errors:
    """Train one network per seed, all in one stack, with this software. Return the test errors.

    Args:
        data: data of the stage, for all seeds.
        x: test images.
        y: labels of the test images.
        first: the first seed for the initialisation and the order of the examples.
    """

    def generators(purpose: str) -> list[torch.Generator]:
        return [generator(first + seed, purpose, 0, 1) for seed in SEEDS]

    def errors() -> list[float]:
        return (stack.logits(x[None]).argmax(-1) != y).double().mean(1).tolist()

    class LastEpoch(Watcher):
        """Stores the test errors after the last epoch."""

        errors: list[float]

        def epoch(self, epoch: int, error: Callable[[], torch.Tensor]) -> None:
            self.errors = errors() if epoch == EPOCHS else []

    stack, last = (
        MLPStack.initialised((784, WIDTH, WIDTH, 10), generators("initialisation"), torch.device("cpu")),
        LastEpoch(),
    )
    batches, optimizer = Batches(data, generators("order"), 128), AdaDelta(stack.parameters.flat)
    train_stage(stack, batches, data.validation, OwnLoss(len(SEEDS), 1), optimizer, EPOCHS, "validation_accuracy", last)
    return errors(), last.errors


def plain(data: StageData, x: torch.Tensor, y: torch.Tensor, first: int, width: int = WIDTH) -> Errors:
    """Train one network per seed, one after the other, with torch's modules and torch.optim. Return the test errors.

    The arguments are those of `ours`, and the width of the network.
    """
    chosen, last = [], []
    for seed in range(data.training.num_seeds):
        torch.manual_seed(first + seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, 10),
        )  # fmt: skip
        optimizer, best = torch.optim.Adadelta(model.parameters(), lr=1.0), -1.0
        x_train, y_train = data.training.examples[seed], data.training.labels[seed]
        x_valid, y_valid = data.validation.examples[seed], data.validation.labels[seed]
        for _ in range(EPOCHS):
            for index in torch.randperm(len(y_train)).split(128):
                optimizer.zero_grad()
                F.cross_entropy(model(x_train[index]), y_train[index]).backward()
                optimizer.step()
            with torch.no_grad():
                accuracy = float((model(x_valid).argmax(-1) == y_valid).double().mean())
                if accuracy > best:
                    best, error = accuracy, float((model(x).argmax(-1) != y).double().mean())
        chosen.append(error)
        with torch.no_grad():
            last.append(float((model(x).argmax(-1) != y).double().mean()))
    return chosen, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder of the datasets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load_dataset("mnist", arguments.data_root)
    data, x, y = data_of(dataset, SEEDS), dataset.pixels.normalise(dataset.test.images), dataset.test.labels
    for first in (0, 1000, 2000, 3000):
        for name, train in (("ours", ours), ("plain", plain)):
            texts = [
                f"{100 * statistics.mean(errors):.2f} +- {100 * statistics.stdev(errors) / len(SEEDS) ** 0.5:.2f}"
                for errors in train(data, x, y, first)
            ]
            print(f"{name}, seeds from {first}: chosen epoch {texts[0]} %, last epoch {texts[1]} %", flush=True)


if __name__ == "__main__":
    main()
