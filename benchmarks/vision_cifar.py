"""Speed of the VGG's steps on CIFAR-10 against the plain PyTorch loop, and of Ens-5 against five runs.

    python benchmarks/vision_cifar.py --data-root DATA [--device cuda] [--write]

A step is a batch of 128 images out of a stage of 1152, cropped and flipped anew, forward, backward and SGD. The plain
loop is what a careful user writes: torchvision's dataset and transforms in a DataLoader (in this process), torch's
modules, torch.optim. What is compared takes turns, CPU seconds of one thread (of a GPU: seconds until it is done).
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path

import torch
from _common import provenance, ratio_columns, table, verdict

from vision.backbones import VGG
from vision.batches import Batches, Rows, StageData
from vision.datasets import Dataset, load_dataset
from vision.inputs import Images
from vision.networks import Stack
from vision.optimizers import SGD
from vision.process import keep_freed_memory
from vision.seeds import generator
from vision.training import OwnLoss

HERE = Path(__file__).resolve().parent
EXAMPLES, BATCH = 1152, 128
RECIPE = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


def forever(epoch: Callable[[], Iterator]) -> Iterator:
    """Epoch after epoch."""
    return chain.from_iterable(epoch() for _ in count())


def ours(
    dataset: Dataset, members: int, width: int, device: torch.device, precision: torch.dtype
) -> Callable[[], None]:
    """A step of an ensemble."""
    inputs = Images(dataset.pixels, 3, 32)
    kept = inputs.to_storage(dataset.training.images[:EXAMPLES].to(device))
    y = dataset.training.labels[:EXAMPLES].to(device)
    rows = Rows(kept, y, torch.nn.functional.one_hot(y, 10).float(), 1, EXAMPLES, inputs)
    generators = [generator(number) for number in range(members)]
    stack: Stack = VGG(3, width, 10).network(generators, device)
    stack.set_compute_dtype(precision)
    batches = forever(Batches(StageData(rows, 0, rows), generators, BATCH).epoch)
    loss, optimizer = OwnLoss(1, members), SGD(stack.parameters.flat, **RECIPE)

    def step() -> None:
        x, one_hot = next(batches)
        stack.backward(loss.gradient(stack.logits(x, training=True), one_hot))
        optimizer.step(stack.gradient.flat)

    return step


def plain(data_root: str, width: int, device: torch.device) -> Callable[[], None]:
    """A step of the plain loop."""
    from torch.utils.data import DataLoader, Subset
    from torchvision import transforms as t
    from torchvision.datasets import CIFAR10

    steps = [t.RandomCrop(32, padding=4), t.RandomHorizontalFlip(), t.ToTensor(),
             t.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]  # fmt: skip
    training = Subset(CIFAR10(data_root, train=True, transform=t.Compose(steps)), range(EXAMPLES))
    loader = DataLoader(training, batch_size=BATCH, shuffle=True)
    modules: list[torch.nn.Module] = []
    num_in = 3
    for convolutions in (2, 2, 4, 4, 4):
        for _ in range(convolutions):
            modules += [torch.nn.Conv2d(num_in, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
            num_in = width
        modules.append(torch.nn.MaxPool2d(2))
    model = torch.nn.Sequential(*modules, torch.nn.Flatten(), torch.nn.Linear(width, 10)).to(device)
    optimizer, batches = torch.optim.SGD(model.parameters(), **RECIPE), forever(lambda: iter(loader))

    def step() -> None:
        x, y = (one.to(device) for one in next(batches))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def interleaved(
    ways: dict[str, Callable[[], None]], repeats: int, steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds a step, way after way, again and again."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = clock()
            for _ in range(steps):
                way()
            seconds[name].append((clock() - began) / steps)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="ours, too: for hardware that has it")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="into benchmarks/vision_cifar.md")
    arguments = parser.parse_args()
    load, device = os.getloadavg()[0], torch.device(arguments.device)
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset = load_dataset("cifar10", arguments.data_root)
    targets = {4: 3.0, 16: 2.0} if device.type == "cpu" else {32: 5.0}
    singles, ensembles = [], []
    for width in (4, 16, 64) if device.type == "cpu" else (4, 16, 32, 64):
        steps = max(1, 18 // max(1, width // 4))
        ways = {
            "ours": ours(dataset, 1, width, device, torch.float32),
            "plain": plain(arguments.data_root, width, device),
        }
        if arguments.bfloat16:
            ways["bfloat16"] = ours(dataset, 1, width, device, torch.bfloat16)
        seconds = interleaved(ways, arguments.repeats, steps, device)
        ratio, target = ratio_columns(seconds["plain"], seconds["ours"])[1], targets.get(width)
        half = ""
        if arguments.bfloat16:
            half = f"{ratio_columns(seconds['plain'], seconds['bfloat16'])[1]:.1f}"
        shown = [f"{1000 * min(seconds[name]):.1f}" for name in ("ours", "plain")]
        singles.append([width, *shown, f"{ratio:.2f}", half, verdict(ratio, target, at_most=False) if target else ""])
        one, five = ours(dataset, 1, width, device, torch.float32), ours(dataset, 5, width, device, torch.float32)
        ways = {"one": lambda one=one: [one() for _ in range(5)], "five": five}
        seconds = interleaved(ways, max(3, arguments.repeats // 3), max(1, steps // 3), device)
        ensembles.append([width, *(f"{1000 * min(seconds[name]):.1f}" for name in ("five", "one")),
                          f"{ratio_columns(seconds['one'], seconds['five'])[1]:.2f}"])  # fmt: skip
    text = "\n".join(
        [
            "# Speed of the VGG's steps on CIFAR-10",
            "",
            f"Written by `benchmarks/vision_cifar.py --write`; not edited. Device: {device}.",
            "Milliseconds a step, the smallest of the repeats; ratios are medians over neighbours in time.",
            "",
            "## Against the plain loop (CPU: at least 3x at c = 4, 2x at c = 16; GPU: 5x at c = 32)",
            "",
            *table(["c", "ours", "plain loop", "ratio", "ratio, ours in bfloat16", "target"], singles),
            "",
            "## Ens-5 against five runs",
            "",
            *table(["c", "Ens-5", "five SM", "ratio"], ensembles),
            "",
            *provenance(load),
            "",
        ]
    )
    print(text)
    if arguments.write:
        (HERE / "vision_cifar.md").write_text(text)


if __name__ == "__main__":
    main()
