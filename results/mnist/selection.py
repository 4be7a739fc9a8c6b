"""How much of an error after a stage is the choice of its epoch: SM of width 32, the first stage at wait 2 of B = 500.

    .venv/bin/python results/mnist/selection.py --data-root DATA

Ours and a plain PyTorch loop on the same data of 20 seeds, with several sets of initialisations and orders: the test
error of the epoch with the best validation accuracy (24 examples), and that of the last epoch.
"""

import argparse
import statistics
import sys
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

SEEDS, EPOCHS, WIDTH, WAIT = 20, 100, 32, 2
Errors = tuple[list[float], list[float]]
"""Of the chosen epoch and of the last one, seed after seed."""


def data_of(dataset: Dataset) -> StageData:
    """The first stage of every seed."""
    parts = [partition(dataset.training, 500, 0.1, seed)[:WAIT] for seed in range(SEEDS)]
    new = [MegaBatch(t, str(t), [part[t - 1] for part in parts]) for t in range(1, WAIT + 1)]
    return Memory(Vectors(dataset.pixels), 10, SEEDS, torch.device("cpu")).stage_data(new, [], False)


def ours(data: StageData, x: torch.Tensor, y: torch.Tensor, first: int) -> Errors:
    """All seeds stacked."""

    def generators(purpose: str) -> list[torch.Generator]:
        return [generator(first + seed, purpose, 0, 1) for seed in range(SEEDS)]

    def errors() -> list[float]:
        return (stack.logits(x[None]).argmax(-1) != y).double().mean(1).tolist()

    class Last(Watcher):
        def epoch(self, epoch, error):
            self.errors = errors() if epoch == EPOCHS else []

    stack, last = (
        MLPStack.initialised((784, WIDTH, WIDTH, 10), generators("initialisation"), torch.device("cpu")),
        Last(),
    )
    batches, optimizer = Batches(data, generators("order"), 128), AdaDelta(stack.parameters.flat)
    train_stage(stack, batches, data.validation, OwnLoss(SEEDS, 1), optimizer, EPOCHS, "validation_accuracy", last)
    return errors(), last.errors


def plain(data: StageData, x: torch.Tensor, y: torch.Tensor, first: int) -> Errors:
    """One seed after the other, the way anyone would write it."""
    chosen, last = [], []
    for seed in range(SEEDS):
        torch.manual_seed(first + seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(784, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, 10),
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
    parser.add_argument("--data-root", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load_dataset("mnist", arguments.data_root)
    data, x, y = data_of(dataset), dataset.pixels.normalise(dataset.test.images), dataset.test.labels
    for first in (0, 1000, 2000, 3000):
        for name, way in (("ours", ours), ("plain", plain)):
            told = [
                f"{100 * statistics.mean(errors):.2f} +- {100 * statistics.stdev(errors) / SEEDS**0.5:.2f}"
                for errors in way(data, x, y, first)
            ]
            print(f"{name}, seeds from {first}: chosen epoch {told[0]} %, last epoch {told[1]} %", flush=True)


if __name__ == "__main__":
    main()
