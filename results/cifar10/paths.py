"""Compare the fast implementations with plain PyTorch: SM of c = 4 on the first 5000 images of CIFAR-10, 10 epochs.

    .venv/bin/python results/cifar10/paths.py --data-root DATA [--seeds 20] [--half-seeds 5] [--device cuda] [--write]

Each seed is trained from the same initialisation, with the same order and crops, in five ways:

plain      torch's modules, autograd and torch.optim.SGD
torch      our explicit gradients on torch's convolutions
narrow     our explicit gradients on narrow.c (CPU only)
stacked    our explicit gradients, all seeds in one stack
bfloat16   our explicit gradients, with products in bfloat16

The epoch with the lowest validation loss is kept, and its test error is written to paths.md. Different rounding makes
the networks of two implementations differ soon, even with the same seed, and the test errors of such small networks
then differ by some percent. Therefore the mean errors over many seeds are compared, not the errors of single seeds.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _common import provenance, table

from fairseq_alma.core.allocator import keep_freed_memory
from fairseq_alma.core.stream import MegaBatch
from vision.batches import Batches, Memory, StageData
from vision.datasets import Dataset, load_dataset
from vision.inputs import Images
from vision.networks import ModuleStack, Structure, narrow
from vision.optimizers import SGD
from vision.seeds import generator
from vision.stream import partition
from vision.training import OwnLoss, train_stage

WIDTH, EPOCHS, WAIT, MEGA_BATCHES, BATCH = 4, 10, 10, 100, 128
NETWORK = Structure("vgg", (3, 32, 32), 10, WIDTH)
RECIPE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


def data_of(dataset: Dataset, seeds: Sequence[int], device: torch.device) -> StageData:
    """Return the data of the first stage for all given seeds."""
    parts = [partition(dataset, MEGA_BATCHES, 0.1, seed)[:WAIT] for seed in seeds]
    new = [MegaBatch(t, str(t), [part[t - 1] for part in parts]) for t in range(1, WAIT + 1)]
    return Memory(Images(dataset.pixels, dataset.image_shape), 10, len(seeds), device).stage_data(new, [], False)


def generators_of(seeds: Sequence[int], purpose: str) -> list[torch.Generator]:
    """Return one random generator per seed. `purpose` is part of what seeds the generator."""
    return [generator(seed, purpose) for seed in seeds]


def ours(data: StageData, x: Tensor, y: Tensor, seeds: Sequence[int], precision: torch.dtype) -> list[float]:
    """Train one network per seed, all in one stack, with this software. Return the test error of each seed.

    Args:
        data: data of the stage, for the same seeds.
        x: test images.
        y: labels of the test images.
        seeds: the seeds.
        precision: dtype of the convolutions.
    """
    stack = ModuleStack.initialised(NETWORK, generators_of(seeds, "initialisation"), x.device)
    stack.set_compute_dtype(precision)
    batches, optimizer = Batches(data, generators_of(seeds, "order"), BATCH), SGD(stack.parameters.flat, **RECIPE)
    train_stage(stack, batches, data.validation, OwnLoss(len(seeds), 1), optimizer, EPOCHS, "validation_loss")
    return (stack.logits_of_many(x[None]).argmax(-1) != y).double().mean(1).tolist()


def plain(data: StageData, x: Tensor, y: Tensor, seed: int) -> float:
    """Train one network with torch's modules and torch.optim. Return its test error.

    Args:
        data: data of the stage, for this seed only.
        x: test images.
        y: labels of the test images.
        seed: the seed.
    """
    model = ModuleStack.initialised(NETWORK, generators_of([seed], "initialisation"), x.device).to_module(0)
    optimizer, batches = (
        torch.optim.SGD(model.parameters(), **RECIPE),
        Batches(data, generators_of([seed], "order"), BATCH),
    )
    x_valid, y_valid = data.validation.examples[0].movedim(-1, 1), data.validation.labels[0]
    best, error = float("inf"), 1.0
    for _ in range(EPOCHS):
        model.train()
        for images, one_hot in batches.epoch():
            optimizer.zero_grad()
            F.cross_entropy(model(images[0].movedim(-1, 1)), one_hot[0].argmax(1)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x_valid), y_valid))
            if loss < best:
                best = loss
                predicted = torch.cat([model(part.movedim(-1, 1)).argmax(1) for part in x.split(1000)])
                error = float((predicted != y).double().mean())
    return error


def report(
    arguments: argparse.Namespace, rows: list[list[str]], errors: dict[str, list[float]], load_at_start: float
) -> str:
    """Return the text of paths.md."""
    return "\n".join(
        [
            "# Fast paths against the plain one: test error after a stage",
            "",
            f"Written by `paths.py --seeds {arguments.seeds} --half-seeds {arguments.half_seeds} --write` on "
            f"{torch.device(arguments.device).type}.",
            "SM of c = 4, the first 10 of 100 mega-batches of CIFAR-10, 10 epochs. Errors in %, mean and",
            "standard error over seeds; the difference to plain with the combined standard error.",
            "",
            *table(["path", "seeds", "test error", "less plain's", "CPU seconds a seed"], rows),
            "",
            "Errors seed by seed:",
            "",
            *(f"- {name}: {' '.join(f'{error:.1f}' for error in of_name)}" for name, of_name in errors.items()),
            "",
            *provenance(load_at_start),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder of the datasets")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds (default: 20)")
    parser.add_argument(
        "--half-seeds",
        type=int,
        default=5,
        help="number of seeds in bfloat16, which is slow without hardware support (default: 5)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--write", action="store_true", help="write paths.md")
    arguments = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    torch.set_num_threads(1)
    keep_freed_memory()
    device, seeds = torch.device(arguments.device), list(range(arguments.seeds))
    half = seeds[: arguments.half_seeds]
    dataset = load_dataset("cifar10", arguments.data_root)
    inputs = Images(dataset.pixels, dataset.image_shape)
    x, y = inputs.to_input(inputs.to_storage(dataset.test.images.to(device))), dataset.test.labels.to(device)
    alone = [data_of(dataset, [seed], device) for seed in seeds]
    ways = {
        "plain": lambda: [plain(alone[seed], x, y, seed) for seed in seeds],
        "torch": lambda: [ours(alone[seed], x, y, [seed], torch.float32)[0] for seed in seeds],
        "narrow": lambda: [ours(alone[seed], x, y, [seed], torch.float32)[0] for seed in seeds],
        "stacked": lambda: ours(data_of(dataset, seeds, device), x, y, seeds, torch.float32),
        "bfloat16": lambda: [ours(alone[seed], x, y, [seed], torch.bfloat16)[0] for seed in half],
    }
    if device.type != "cpu":
        del ways["narrow"]
    usual_limit, rows = narrow.MAX_CHANNELS, []
    errors: dict[str, list[float]] = {}
    for name, train in ways.items():
        narrow.MAX_CHANNELS = 0 if name == "torch" else usual_limit
        start = time.process_time()
        errors[name] = [100 * error for error in train()]
        count, plain_count = len(errors[name]), len(errors["plain"])
        mean, stderr = statistics.mean(errors[name]), statistics.stdev(errors[name]) / count**0.5
        difference = mean - statistics.mean(errors["plain"])
        combined = (stderr**2 + statistics.variance(errors["plain"]) / plain_count) ** 0.5
        against_plain = f"{difference:+.2f} +- {combined:.2f}" if name != "plain" else ""
        seconds = f"{(time.process_time() - start) / count:.0f}"
        rows.append([name, str(count), f"{mean:.2f} +- {stderr:.2f}", against_plain, seconds])
        print(rows[-1], flush=True)
    text = report(arguments, rows, errors, load_at_start)
    print(text)
    if arguments.write:
        Path(__file__).with_name("paths.md").write_text(text)


if __name__ == "__main__":
    main()
