"""Train one of the alternatives of vision_peers.py and print its errors and CPU seconds as JSON.

python _vision_peers.py PEER --data-root DATA --stages 5 --epochs 20 --width 32 --seed 0

vision_peers.py starts this script in an environment that contains the other libraries. All alternatives do the same
work. They train a multilayer perceptron (MLP) with two hidden layers on MNIST in 50 parts (wait 10 of B = 500), one
stage per part. A tenth of each part is for validation. Each stage uses a new AdaDelta (learning rate 1) and batches of
128, and keeps the epoch with the lowest validation loss (the authors' code: with the best validation accuracy). The
test error is measured after each stage. The code of each alternative follows the documentation of its library.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PARTS = 50
MEAN, DEVIATION = (0.1307,), (0.3081,)


def mlp(width: int) -> nn.Module:
    """Return a multilayer perceptron (MLP) for MNIST with two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def parts(num_examples: int, seed: int) -> list:
    """Divide the examples at random into PARTS parts. Return an array of example indices for each part."""
    import numpy as np

    return np.array_split(np.random.RandomState(seed).permutation(num_examples), PARTS)


def loss_of(model: nn.Module, batches: Iterable) -> float:
    """Return the mean cross entropy of the model over all examples of the batches."""
    model.eval()
    with torch.no_grad():
        sums = [(F.cross_entropy(model(x), y, reduction="sum").item(), len(y)) for x, y, *_ in batches]
    model.train()
    return sum(loss for loss, _ in sums) / sum(count for _, count in sums)


def error_of(model: nn.Module, batches: Iterable) -> float:
    """Return the error rate of the model on all examples of the batches."""
    model.eval()
    with torch.no_grad():
        wrong = [((model(x).argmax(1) != y).sum().item(), len(y)) for x, y, *_ in batches]
    model.train()
    return sum(count for count, _ in wrong) / sum(count for _, count in wrong)


def train(model: nn.Module, batches: Iterable, validation: Iterable, epochs: int) -> None:
    """Train the model for one stage with a plain loop, and keep the epoch with the lowest validation loss.

    Args:
        model: the model, which is changed in place.
        batches: the training batches. Every epoch iterates over them from the start.
        validation: the validation batches. Every epoch iterates over them from the start.
        epochs: number of epochs.
    """
    optimizer, best, best_loss = torch.optim.Adadelta(model.parameters(), lr=1.0), None, float("inf")
    for _ in range(epochs):
        for x, y, *_ in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if (loss := loss_of(model, validation)) < best_loss:
            best, best_loss = copy.deepcopy(model.state_dict()), loss
    assert best is not None  # the first epoch always lowers the loss, which is infinite before
    model.load_state_dict(best)


def transforms() -> Any:
    """Return the torchvision transforms that convert an image to a tensor and normalise it."""
    from torchvision import transforms as t

    return t.Compose([t.ToTensor(), t.Normalize(MEAN, DEVIATION)])


def mnist(data_root: str, **options: Any) -> list:
    """Return the training set and the test set of MNIST, as torchvision datasets."""
    from torchvision.datasets import MNIST

    return [MNIST(data_root, train=is_train, **options) for is_train in (True, False)]


def plain(a: argparse.Namespace) -> Iterator[float]:
    """Train with torchvision's dataset and transforms in a DataLoader. Yield the test error after each stage.

    Args:
        a: the arguments of the command line.
    """
    from torch.utils.data import DataLoader, Subset

    training, test = mnist(a.data_root, transform=transforms())
    test_batches, model = DataLoader(test, batch_size=512), mlp(a.width)
    for part in parts(len(training), a.seed)[: a.stages]:
        middle = len(part) - len(part) // 10
        batches = DataLoader(Subset(training, part[:middle]), batch_size=128, shuffle=True)
        train(model, batches, DataLoader(Subset(training, part[middle:]), batch_size=512), a.epochs)
        yield error_of(model, test_batches)


def continuum(a: argparse.Namespace) -> Iterator[float]:
    """Train with Continuum's ALMA scenario in a DataLoader. Yield the test error after each stage.

    Args:
        a: the arguments of the command line.
    """
    from continuum import tasks
    from continuum.datasets import MNIST
    from continuum.scenarios import ALMA, ClassIncremental
    from torch.utils.data import DataLoader
    from torchvision import transforms as t

    steps = [t.ToTensor(), t.Normalize(MEAN, DEVIATION)]
    scenario = ALMA(MNIST(a.data_root, download=False, train=True), PARTS, transformations=steps, random_seed=a.seed)
    test = ClassIncremental(MNIST(a.data_root, download=False, train=False), nb_tasks=1, transformations=steps)[0]
    test_batches, model = DataLoader(test, batch_size=512), mlp(a.width)
    for taskset in [scenario[number] for number in range(a.stages)]:
        training, validation = tasks.split_train_val(taskset, val_split=0.1)
        batches = DataLoader(training, batch_size=128, shuffle=True)
        train(model, batches, DataLoader(validation, batch_size=512), a.epochs)
        yield error_of(model, test_batches)


def avalanche(a: argparse.Namespace) -> Iterator[float]:
    """Train with Avalanche's Naive strategy, keeping the best epoch. Yield the test error after each stage.

    Args:
        a: the arguments of the command line.
    """
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.core import SupervisedPlugin
    from avalanche.training import Naive
    from torch.utils.data import DataLoader, Subset

    class BestEpoch(SupervisedPlugin):
        def before_training_exp(self, strategy, **_):
            self.best, self.best_loss = None, float("inf")

        def after_training_epoch(self, strategy, **_):
            if (loss := loss_of(strategy.model, self.validation)) < self.best_loss:
                self.best, self.best_loss = copy.deepcopy(strategy.model.state_dict()), loss

        def after_training_exp(self, strategy, **_):
            strategy.model.load_state_dict(self.best)

    training, test = mnist(a.data_root, transform=transforms())
    cuts = parts(len(training), a.seed)[: a.stages]
    middle = len(cuts[0]) - len(cuts[0]) // 10

    def subset(dataset, which):
        chosen = Subset(dataset, which.tolist())
        chosen.targets = dataset.targets[which].tolist()
        return as_classification_dataset(chosen)

    benchmark = benchmark_from_datasets(train=[subset(training, cut[:middle]) for cut in cuts])
    test_batches, model, keeper = DataLoader(test, batch_size=512), mlp(a.width), BestEpoch()
    for experience, cut in zip(benchmark.train_stream, cuts, strict=True):
        keeper.validation = DataLoader(Subset(training, cut[middle:]), batch_size=512)
        strategy = Naive(
            model=model, optimizer=torch.optim.Adadelta(model.parameters(), lr=1.0), criterion=nn.CrossEntropyLoss(),
            train_mb_size=128, train_epochs=a.epochs, eval_mb_size=512, plugins=[keeper], evaluator=None,
        )  # fmt: skip
        strategy.train(experience, num_workers=0, pin_memory=False)
        yield error_of(model, test_batches)


def tensors(a: argparse.Namespace) -> Iterator[float]:
    """Train with torch.optim on tensors, without a DataLoader. Yield the test error after each stage.

    Args:
        a: the arguments of the command line.
    """
    (x, y), (x_test, y_test) = (
        ((dataset.data.float() / 255 - MEAN[0]) / DEVIATION[0], dataset.targets) for dataset in mnist(a.data_root)
    )
    model = mlp(a.width)

    class Shuffled:
        def __init__(self, which):
            self.which = which

        def __iter__(self):
            for index in self.which[torch.randperm(len(self.which))].split(128):
                yield x[index], y[index]

    for part in parts(len(y), a.seed)[: a.stages]:
        which = torch.from_numpy(part)
        middle = len(which) - len(which) // 10
        train(model, Shuffled(which[:middle]), [(x[which[middle:]], y[which[middle:]])], a.epochs)
        yield error_of(model, [(x_test, y_test)])


def original(a: argparse.Namespace) -> Iterator[float]:
    """Train with the code of the ALMA authors. Yield the test error after each stage.

    The authors' code (facebookresearch/alma) must be on PYTHONPATH. It reads tensors with a DataLoader, and keeps the
    epoch with the best validation accuracy.

    Args:
        a: the arguments of the command line.
    """
    from crlapi.sl.clmodels.finetune import Finetune
    from crlapi.sl.streams.mnist import MNISTEvaluationAnytimeStream, MNISTTrainAnytimeStream
    from omegaconf import OmegaConf

    class Silent:
        """A logger that discards everything."""

        def message(self, *_: Any) -> None:
            """Discard the message."""

        debug = add_scalar = message

    config = OmegaConf.create(
        {
            "init_from_scratch": False, "training_batch_size": 128, "training_num_workers": 0,
            "validation_proportion": 0.1, "validation_batch_size": 512, "validation_num_workers": 0,
            "train_replay_proportion": 0.0, "validation_replay_proportion": 0.0, "max_epochs": a.epochs,
            "device": "cpu", "patience": 1000, "patience_delta": 0, "kornia_augs": None,
            "optim": {"class_name": "torch.optim.Adadelta", "lr": 1.0},
            "model": {"class_name": "crlapi.sl.architectures.mlp.MLP", "size_layers": a.width, "n_layers": 2},
        }
    )  # fmt: skip
    stream = MNISTTrainAnytimeStream(PARTS, a.seed, a.data_root)
    test = MNISTEvaluationAnytimeStream(1, a.seed, a.data_root)[0]
    learner = Finetune(stream, config)
    for number in range(a.stages):
        learner = learner.update(stream[number], Silent())
        yield 1 - learner.evaluate(test, Silent(), {"batch_size": 512, "num_workers": 0, "device": "cpu"})["accuracy"]


def main() -> None:
    """Run the alternative that the command line names, and print its result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["plain", "continuum", "avalanche", "tensors", "original"])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    imported = time.process_time()
    with redirect_stdout(sys.stderr):  # the libraries print, but stdout must contain only the JSON result
        errors = list(globals()[arguments.peer](arguments))
    print(json.dumps({"errors": errors, "imports": imported, "all": time.process_time()}))


if __name__ == "__main__":
    main()
