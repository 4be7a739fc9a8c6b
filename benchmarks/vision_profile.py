"""Measure how the time of a training step on MNIST is spent, and compare it with the matrix products of the step alone.

    python benchmarks/vision_profile.py [--write]

The result explains why some ratios in vision_peers.md miss their targets. A step uses one thread and a batch of 128
from a stage of wait 10 (1080 examples). Each piece of a step, for example the forward pass, is timed separately on the
same tensors. The pieces take turns, and the smallest of the repeated measurements counts. The CPU time that a process
spends on imports is measured in separate processes.
"""

import argparse
import copy
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from _common import cpu_seconds_of, provenance, table
from _vision_stacks import rows
from torch import Tensor

from vision.batches import Batches, StageData
from vision.networks import MLPStack
from vision.optimizers import AdaDelta
from vision.seeds import generator
from vision.training import OwnLoss

HERE = Path(__file__).resolve().parent
BATCH, EXAMPLES = 128, 1080
PIECES = ("batch", "forward", "loss", "backward", "optimizer")
_Batch = TypeVar("_Batch")
_Key = TypeVar("_Key")


def stacked(num_seeds: int, members: int, width: int) -> dict[str, Callable[[], object]]:
    """Return the pieces of a training step of this software, as functions that can be called repeatedly.

    Args:
        num_seeds: number of seeds that are trained together.
        members: number of networks per seed.
        width: width of the hidden layers.
    """
    generators = [generator(number) for number in range(num_seeds * members)]
    stack = MLPStack.initialised((784, width, width, 10), generators, torch.device("cpu"))
    batches = Batches(StageData(rows(num_seeds, EXAMPLES), 0, rows(num_seeds, 120)), generators, BATCH)
    loss, optimizer = OwnLoss(num_seeds, members), AdaDelta(stack.parameters.flat)
    forever = itertools.chain.from_iterable(_whole(batches.epoch()) for _ in itertools.count())
    x, one_hot = next(forever)
    d_logits = loss.gradient(stack.logits(x, training=True), one_hot)
    logits = stack.logits(x, training=True)
    return {
        "batch": lambda: next(forever),
        "forward": lambda: stack.logits(x, training=True),
        "loss": lambda: loss.gradient(logits, one_hot),
        "backward": lambda: stack.backward(d_logits),
        "optimizer": lambda: optimizer.step(stack.gradient.flat),
    }


def plain(width: int) -> dict[str, Callable[[], object]]:
    """Return the pieces of a training step of one network with autograd and torch.optim, as functions."""
    data = rows(1, EXAMPLES)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    # Let the optimizer update a copy of the model, because `backward` is called repeatedly and fails if the tensors
    # that autograd has saved for it have changed.
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adadelta(twin.parameters(), lr=1.0)
    orders = itertools.chain.from_iterable(_whole(torch.randperm(EXAMPLES).split(BATCH)) for _ in itertools.count())

    def batch() -> tuple[Tensor, Tensor]:
        index = next(orders)
        return data.x[index], data.y[index]

    x, y = batch()
    logits = model(x)
    out = torch.nn.functional.cross_entropy(logits, y)

    def backward() -> None:
        model.zero_grad()
        out.backward(retain_graph=True)

    backward()
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert other.grad is not None
        parameter.grad = other.grad.clone()
    return {
        "batch": batch,
        "forward": lambda: model(x),
        "loss": lambda: torch.nn.functional.cross_entropy(logits, y),
        "backward": backward,
        "optimizer": optimizer.step,
    }


def _whole(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Return the batches of an epoch without the last batch, which is smaller."""
    return itertools.islice(batches, EXAMPLES // BATCH)


def bare_products(networks: int, width: int) -> Callable[[], object]:
    """Return a function that computes only the eight matrix products of a training step of several networks.

    The tensors for the results are allocated before, so their allocation is not measured.
    """
    sizes, products = (784, width, width, 10), []
    for number, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
        x, w = torch.randn(networks, BATCH, num_in), torch.randn(networks, num_out, num_in)
        dy = torch.randn(networks, BATCH, num_out)
        w_io, dy_ob = w.transpose(1, 2), dy.transpose(1, 2)
        y, dw, dx = torch.empty_like(dy), torch.empty_like(w), torch.empty_like(x)
        products += [(x, w_io, y), (dy_ob, x, dw)] + ([(dy, w, dx)] if number else [])
    if networks == 1:
        products = [(a[0], b[0], out[0]) for a, b, out in products]
    product = torch.mm if networks == 1 else torch.bmm

    def all_of_them() -> None:
        for a, b, out in products:
            product(a, b, out=out)

    return all_of_them


def seconds_of(functions: dict[_Key, Callable[[], object]], repeats: int, calls: int = 60) -> dict[_Key, float]:
    """Return the CPU seconds of one call of each function, the smallest of several measurements.

    Args:
        functions: the functions by name. They take turns.
        repeats: number of measurements of each function.
        calls: number of calls in one measurement.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for key, function in functions.items():
            function()
            start = time.process_time()
            for _ in range(calls):
                function()
            best[key] = min(best[key], (time.process_time() - start) / calls)
    return best


def steps(repeats: int) -> list[str]:
    """Measure training steps. Return a Markdown table of the times, with a row for each width and kind of network."""
    lines = []
    for width in (4, 32, 64):
        kinds = {
            "SM": (1, stacked(1, 1, width)),
            "SM, torch.optim": (1, plain(width)),
            "Ens-5": (5, stacked(1, 5, width)),
            "3 seeds of SM": (3, stacked(3, 1, width)),
        }
        functions = {(kind, piece): f for kind, (_, pieces) in kinds.items() for piece, f in pieces.items()}
        functions |= {(kind, "bare"): bare_products(networks, width) for kind, (networks, _) in kinds.items()}
        seconds = seconds_of(functions, repeats)
        for kind, (networks, _) in kinds.items():
            pieces = [seconds[kind, piece] for piece in PIECES]
            flops = networks * 2 * BATCH * (2 * 784 * width + 3 * width * width + 3 * width * 10)
            bare = seconds[kind, "bare"]
            lines.append(
                [
                    width, kind, *(f"{1e6 * piece:.0f}" for piece in pieces), f"{1e6 * sum(pieces):.0f}",
                    f"{1e6 * sum(pieces) / networks:.0f}", f"{1e6 * bare:.0f}", f"{flops / bare / 1e9:.0f}",
                ]
            )  # fmt: skip
    return table(
        ["width", "step", *PIECES, "sum", "a network", "bare products", "GFLOP/s of these"], lines
    )  # fmt: skip


def imports(repeats: int) -> list[str]:
    """Measure processes that only import packages, and return a Markdown table of their CPU seconds."""
    statements = {
        "nothing": "pass",
        "numpy": "import numpy",
        "torch": "import torch",
        "vision.cli (alma-vision: torch, Hydra, rich)": "import vision.cli",
        "torch, torchvision.datasets (for a DataLoader)": "import torch, torchvision.datasets",
    }
    best = dict.fromkeys(statements, float("inf"))
    for _ in range(repeats):
        for name, statement in statements.items():
            spent, _ = cpu_seconds_of([sys.executable, "-c", statement], {"OMP_NUM_THREADS": "1"})
            best[name] = min(best[name], spent)
    return table(["a process that imports", "CPU s"], [[name, f"{seconds:.2f}"] for name, seconds in best.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="number of measurements (default: 30)")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the tables into benchmarks/vision_profile.md; the text above the tables is kept",
    )
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = "\n".join(
        [
            "## A step, microseconds of CPU time",
            "",
            *steps(arguments.repeats),
            "",
            "## Before the first step",
            "",
            *imports(5),
            "",
            *provenance(load),
            "",
        ]
    )
    print(measured)
    if arguments.write:
        path = HERE / "vision_profile.md"
        kept = (
            path.read_text().partition("## A step")[0]
            if path.exists()
            else "# How the time of a training step on MNIST is spent\n\n"
        )
        path.write_text(kept + measured)


if __name__ == "__main__":
    main()
