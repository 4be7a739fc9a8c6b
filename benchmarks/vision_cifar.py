"""Compare the speed of the VGG's training steps with a plain PyTorch loop, and of Ens-5 with five runs of SM.

    python benchmarks/vision_cifar.py --data-root DATA [--device cuda] [--write]

A step takes a batch of 128 images from a stage of 1152 images of CIFAR-10, with new random crops and flips, and does
a forward pass, a backward pass and an SGD update. The plain loop is what a careful user writes: torchvision's dataset
and transforms in a DataLoader (in this process), torch's modules, torch.optim. The alternatives take turns. Times are
CPU seconds of one thread. On a GPU, they are wall seconds until the GPU has finished.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from _common import provenance, ratio_columns, table, verdict

from fairseq_alma.core.allocator import keep_freed_memory
from vision.backbones import VGG
from vision.batches import Batches, Rows, StageData
from vision.datasets import Dataset, load_dataset
from vision.inputs import Images
from vision.networks import Stack
from vision.optimizers import SGD
from vision.seeds import generator
from vision.training import OwnLoss

HERE = Path(__file__).resolve().parent
EXAMPLES, BATCH = 1152, 128
RECIPE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


def forever(epoch: Callable[[], Iterator]) -> Iterator:
    """Return an iterator over the batches of one epoch after another, without end."""
    return chain.from_iterable(epoch() for _ in count())


def ours(
    dataset: Dataset, members: int, width: int, device: torch.device, precision: torch.dtype
) -> Callable[[], None]:
    """Return a function that does one training step of an ensemble with this software.

    Args:
        dataset: CIFAR-10.
        members: number of networks in the ensemble.
        width: number of channels of each convolution.
        device: device of the networks and the images.
        precision: dtype of the convolutions.
    """
    inputs = Images(dataset.pixels, dataset.image_shape)
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
    """Return a function that does one training step of a plain PyTorch loop with a DataLoader."""
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
        x, y = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def repeat_five_times(step: Callable[[], None]) -> None:
    """Call `step` five times, to measure what five separate runs would need."""
    for _ in range(5):
        step()


def interleaved(
    steps_of: dict[str, Callable[[], object]], repeats: int, num_steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds per step of each alternative, one number per repeat. The alternatives take turns."""

    def clock() -> float:
        """Return the CPU time. On a GPU, wait until it has finished and return the wall time."""
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    for step in steps_of.values():
        step()  # a warm-up
    seconds: dict[str, list[float]] = {name: [] for name in steps_of}
    for _ in range(repeats):
        for name, step in steps_of.items():
            start = clock()
            for _ in range(num_steps):
                step()
            seconds[name].append((clock() - start) / num_steps)
    return seconds


def report(device: torch.device, singles: list[list], ensembles: list[list], load: float) -> str:
    """Return the text of vision_cifar.md."""
    return "\n".join(
        [
            "# Speed of the VGG's steps on CIFAR-10",
            "",
            f"Written by `benchmarks/vision_cifar.py --write`. Device: {device}.",
            "Milliseconds per step, the smallest of the repeats. Ratios are medians of the ratios of measurements that",
            "are neighbours in time.",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--bfloat16", action="store_true", help="also measure ours in bfloat16, for hardware that supports it"
    )
    parser.add_argument("--repeats", type=int, default=9, help="number of measurements (default: 9)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/vision_cifar.md")
    arguments = parser.parse_args()
    load, device = os.getloadavg()[0], torch.device(arguments.device)
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset = load_dataset("cifar10", arguments.data_root)
    targets = {4: 3.0, 16: 2.0} if device.type == "cpu" else {32: 5.0}
    singles, ensembles = [], []
    for width in (4, 16, 64) if device.type == "cpu" else (4, 16, 32, 64):
        steps = max(1, 18 // max(1, width // 4))
        alternatives: dict[str, Callable[[], object]] = {
            "ours": ours(dataset, 1, width, device, torch.float32),
            "plain": plain(arguments.data_root, width, device),
        }
        if arguments.bfloat16:
            alternatives["bfloat16"] = ours(dataset, 1, width, device, torch.bfloat16)
        seconds = interleaved(alternatives, arguments.repeats, steps, device)
        ratio, target = ratio_columns(seconds["plain"], seconds["ours"])[1], targets.get(width)
        bfloat16_ratio = ""
        if arguments.bfloat16:
            bfloat16_ratio = f"{ratio_columns(seconds['plain'], seconds['bfloat16'])[1]:.1f}"
        shown = [f"{1000 * min(seconds[name]):.1f}" for name in ("ours", "plain")]
        singles.append(
            [width, *shown, f"{ratio:.2f}", bfloat16_ratio, verdict(ratio, target, at_most=False) if target else ""]
        )
        single, ensemble = (ours(dataset, members, width, device, torch.float32) for members in (1, 5))
        alternatives = {"five SM": partial(repeat_five_times, single), "Ens-5": ensemble}
        seconds = interleaved(alternatives, max(3, arguments.repeats // 3), max(1, steps // 3), device)
        ensembles.append([width, *(f"{1000 * min(seconds[name]):.1f}" for name in ("Ens-5", "five SM")),
                          f"{ratio_columns(seconds['five SM'], seconds['Ens-5'])[1]:.2f}"])  # fmt: skip
    text = report(device, singles, ensembles, load)
    print(text)
    if arguments.write:
        (HERE / "vision_cifar.md").write_text(text)


if __name__ == "__main__":
    main()
