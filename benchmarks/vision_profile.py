"""Where a step on MNIST goes, piece by piece, beside the bare products that no way of writing it can avoid.

    python benchmarks/vision_profile.py [--write]

What vision_peers.py finds short of a target is explained here: one thread, a stage of wait 10 (1080 examples, batches
of 128), each piece timed alone on the same tensors, interleaved, the smallest of the repeats. And where the CPU time of
a process goes before it trains: imports, in processes of their own.
"""

import argparse
import copy
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import provenance, table
from torch import Tensor

from vision.batches import Batches, Rows, StageData
from vision.networks import MLPStack
from vision.optimizers import AdaDelta
from vision.seeds import generator
from vision.training import OwnLoss

HERE = Path(__file__).resolve().parent
BATCH, EXAMPLES = 128, 1080
PIECES = ("batch", "forward", "loss", "backward", "optimizer")


def rows(num_seeds: int, num_examples: int) -> Rows:
    """Random examples of S seeds."""
    count = num_seeds * num_examples
    labels = torch.randint(10, (count,))
    one_hot = torch.nn.functional.one_hot(labels, 10).float()
    return Rows(torch.randn(count, 784), labels, one_hot, num_seeds, num_examples)


def stacked(num_seeds: int, members: int, width: int) -> dict[str, Callable[[], object]]:
    """The pieces of our step, each to be called again and again."""
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
    """The pieces of a step with autograd and torch.optim, of one network."""
    data = rows(1, EXAMPLES)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    # Of a model of its own: what autograd has kept must not change under it.
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
        parameter.grad = other.grad.clone()
    return {
        "batch": batch,
        "forward": lambda: model(x),
        "loss": lambda: torch.nn.functional.cross_entropy(logits, y),
        "backward": backward,
        "optimizer": optimizer.step,
    }


def _whole(batches):
    """Without the last, smaller batch."""
    return itertools.islice(batches, EXAMPLES // BATCH)


def bare_products(networks: int, width: int) -> Callable[[], object]:
    """The eight matrix products of a step of M networks, on tensors that are ready, into tensors that are ready."""
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


def seconds_of(ways: dict[str, Callable[[], object]], repeats: int, calls: int = 60) -> dict[str, float]:
    """CPU seconds of one call of each, interleaved; the smallest of the repeats."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            way()
            began = time.process_time()
            for _ in range(calls):
                way()
            best[name] = min(best[name], (time.process_time() - began) / calls)
    return best


def steps(repeats: int) -> list[str]:
    """A line for each kind of stack and width."""
    lines = []
    for width in (4, 32, 64):
        kinds = {
            "SM": (1, stacked(1, 1, width)),
            "SM, torch.optim": (1, plain(width)),
            "Ens-5": (5, stacked(1, 5, width)),
            "3 seeds of SM": (3, stacked(3, 1, width)),
        }
        ways = {(kind, piece): way for kind, (_, pieces) in kinds.items() for piece, way in pieces.items()}
        ways |= {(kind, "bare"): bare_products(networks, width) for kind, (networks, _) in kinds.items()}
        seconds = seconds_of(ways, repeats)
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
    """CPU seconds of a process that imports."""
    statements = {
        "nothing": "pass",
        "numpy": "import numpy",
        "torch": "import torch",
        "vision.run (alma-vision: torch, Hydra, rich)": "import vision.run",
        "torch, torchvision.datasets (what a DataLoader's user imports)": "import torch, torchvision.datasets",
    }
    best = dict.fromkeys(statements, float("inf"))
    for _ in range(repeats):
        for name, statement in statements.items():
            before = os.times()
            subprocess.run([sys.executable, "-c", statement], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            after = os.times()
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            best[name] = min(best[name], spent)
    return table(["a process that imports", "CPU s"], [[name, f"{seconds:.2f}"] for name, seconds in best.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="into benchmarks/vision_profile.md, below its findings")
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
        kept = path.read_text().partition("## A step")[0] if path.exists() else "# Where a step on MNIST goes\n\n"
        path.write_text(kept + measured)


if __name__ == "__main__":
    main()
