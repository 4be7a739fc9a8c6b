"""Compare the speed of the VGG's training steps with plain PyTorch, and of stacks of networks with separate runs.

    python benchmarks/vision_cifar.py --data-root DATA [--device cuda] [--write]

A step takes a batch of 128 images from a stage of 1152 images of CIFAR-10, with new random crops and flips, and does
a forward pass, a backward pass and an SGD update. The alternatives take turns. Times are CPU seconds of one thread. On
a GPU, they are wall seconds until the GPU has finished. The alternatives are:

plain loop     what a careful user writes: torchvision's dataset and transforms in a DataLoader (in this process),
               torch's modules, torch.optim
CUDA graph     ours with cuda_graphs=true: each step is one CUDA graph, on a GPU only (in longer stages, the default)
plain modules  the same modules in channels_last with torch.optim's foreach SGD, on the batches that ours reads, so
               that loading costs the same: what is left is the network
vmap           five networks as one, by torch.func (functional_call, vmap)
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from _common import interleaved, provenance, ratio_columns, table, verdict, write_part

from fairseq_alma.core.allocator import keep_freed_memory
from vision.batches import Batches, Rows, StageData
from vision.cuda_graphs import GraphedGradient
from vision.datasets import Dataset, load_dataset
from vision.inputs import Images
from vision.networks import GatedModuleStack, ModuleStack, Stack, Structure
from vision.optimizers import SGD
from vision.seeds import generator
from vision.training import OwnLoss

PARTS = {
    "On cpu": "benchmarks/vision_cifar.py --data-root DATA",
    "On cuda": "benchmarks/vision_cifar.py --data-root DATA --device cuda --bfloat16",
}
"""Part of the report -> the command that fills it."""
INTRODUCTION = """# Speed of the VGG's steps on CIFAR-10

Written by `benchmarks/vision_cifar.py --write`.
Milliseconds per step, the smallest of the repeats. Ratios are medians of the ratios of measurements that
are neighbours in time. A ratio above 1 means that ours is faster. Targets on a GPU, at c = 32: one network at least 5x
the plain loop, Ens-5 with 3 seeds at least 8x fifteen runs one after another, a mixture of ten experts within 3x of a
dense network of the same FLOPs."""
EXAMPLES, BATCH = 1152, 128
RECIPE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


def forever(epoch: Callable[[], Iterator]) -> Iterator:
    """Return an iterator over the batches of one epoch after another, without end."""
    return chain.from_iterable(epoch() for _ in count())


def batches_of(dataset: Dataset, members: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return an endless iterator over the batches of a stage: images [members, b, 32, 32, 3] and one-hot classes."""
    inputs = Images(dataset.pixels, dataset.image_shape)
    kept = inputs.to_storage(dataset.training.images[:EXAMPLES].to(device))
    y = dataset.training.labels[:EXAMPLES].to(device)
    rows = Rows(kept, y, torch.nn.functional.one_hot(y, 10).float(), 1, EXAMPLES, inputs)
    generators = [generator(number) for number in range(members)]
    return forever(Batches(StageData(rows, 0, rows), generators, BATCH).epoch)


def step_of(
    stack: Stack, dataset: Dataset, device: torch.device, precision: torch.dtype = torch.float32, graphs: bool = False
) -> Callable[[], None]:
    """Return a function that does one training step of a stack of networks.

    Args:
        stack: the networks.
        dataset: CIFAR-10.
        device: device of the networks and the images.
        precision: dtype in which the networks are computed.
        graphs: whether each step is a CUDA graph.
    """
    stack.set_compute_dtype(precision)
    batches = batches_of(dataset, len(stack), device)
    loss, optimizer = OwnLoss(1, len(stack)), SGD(stack.parameters.flat, **RECIPE)
    compute_gradient = GraphedGradient(stack) if graphs else stack.compute_gradient

    def step() -> None:
        x, one_hot = next(batches)
        compute_gradient(x, one_hot, loss.gradient, 1)
        optimizer.step(stack.gradient.flat)

    return step


def ours(
    dataset: Dataset,
    members: int,
    width: int,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    graphs: bool = False,
) -> Callable[[], None]:
    """Return a function that does one training step of an ensemble with this software."""
    structure = Structure("vgg", (3, 32, 32), 10, width)
    stack = ModuleStack.initialised(structure, [generator(number) for number in range(members)], device)
    return step_of(stack, dataset, device, precision, graphs)


def mixture_and_dense(
    dataset: Dataset, width: int, device: torch.device, graphs: bool = False
) -> tuple[Callable[[], None], float]:
    """Return a step of a mixture with ten experts, and the ratio of its FLOPs to those of the dense network."""
    structure, generators = Structure("vgg", (3, 32, 32), 10, width), [generator(0)]
    mixture = GatedModuleStack.of_experts(structure, 10, False, generators, device)
    dense = ModuleStack.initialised(structure, generators, device)
    return step_of(mixture, dataset, device, graphs=graphs), mixture.flops.training / dense.flops.training


def modules_of(width: int, device: torch.device) -> torch.nn.Sequential:
    """Return the VGG as plain torch modules."""
    modules: list[torch.nn.Module] = []
    num_in = 3
    for convolutions in (2, 2, 4, 4, 4):
        for _ in range(convolutions):
            modules += [torch.nn.Conv2d(num_in, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
            num_in = width
        modules.append(torch.nn.MaxPool2d(2))
    return torch.nn.Sequential(*modules, torch.nn.Flatten(), torch.nn.Linear(width, 10)).to(device)


def plain_modules(dataset: Dataset, width: int, device: torch.device) -> Callable[[], None]:
    """Return a function that does one training step of torch's modules in channels_last with a foreach optimizer."""
    model = modules_of(width, device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), **RECIPE, foreach=True)
    batches = batches_of(dataset, 1, device)

    def step() -> None:
        x, one_hot = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[0].permute(0, 3, 1, 2)), one_hot[0].argmax(-1)).backward()
        optimizer.step()

    return step


def vmapped(dataset: Dataset, members: int, width: int, device: torch.device) -> Callable[[], None]:
    """Return a function that does one training step of several networks as one, by torch.func."""
    models = [modules_of(width, device) for _ in range(members)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(parameters.values(), **RECIPE, foreach=True)
    batches = batches_of(dataset, members, device)

    def loss(p: dict, b: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(models[0], (p, b), (x,)), y)

    def step() -> None:
        x, one_hot = next(batches)
        optimizer.zero_grad()
        losses = torch.func.vmap(loss)(parameters, buffers, x.permute(0, 1, 4, 2, 3), one_hot.argmax(-1))
        losses.sum().backward()
        optimizer.step()

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
    model = modules_of(width, device)
    optimizer, batches = torch.optim.SGD(model.parameters(), **RECIPE), forever(lambda: iter(loader))

    def step() -> None:
        x, y = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def repeat(step: Callable[[], None], times: int) -> None:
    """Call `step` several times, to measure what so many separate runs would need."""
    for _ in range(times):
        step()


class Timer:
    """Measures alternatives that take turns.

    Args:
        device: device on which they compute.
        repeats: number of measurements of each alternative.
    """

    def __init__(self, device: torch.device, repeats: int):
        self._device, self._repeats = device, repeats

    def row(self, steps_of: dict[str, Callable[[], object]], num_steps: int) -> tuple[list[str], dict[str, float]]:
        """Return the milliseconds of each alternative, and the ratio of the first one's speed to each other one's."""
        seconds = interleaved(steps_of, self._repeats, num_steps, self._device.type == "cuda")
        first, *others = steps_of
        ratios = {name: ratio_columns(seconds[name], seconds[first])[1] for name in others}
        return [f"{1000 * min(values):.1f}" for values in seconds.values()], ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--bfloat16", action="store_true", help="also measure ours in bfloat16, for hardware that supports it"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="numbers of channels, c")
    parser.add_argument("--repeats", type=int, default=9, help="number of measurements (default: 9)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/vision_cifar.md")
    arguments = parser.parse_args()
    load, device = os.getloadavg()[0], torch.device(arguments.device)
    graphs = device.type == "cuda"
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset = load_dataset("cifar10", arguments.data_root)
    timer = Timer(device, arguments.repeats)
    targets = {4: 3.0, 16: 2.0} if device.type == "cpu" else {32: 5.0}
    singles, ensembles, mixtures = [], [], []
    for width in arguments.widths:
        steps = max(1, 18 // max(1, width // 4))
        alternatives: dict[str, Callable[[], object]] = {
            "ours": ours(dataset, 1, width, device),
            "plain loop": plain(arguments.data_root, width, device),
            "plain modules": plain_modules(dataset, width, device),
        }
        if arguments.bfloat16:
            alternatives["bfloat16"] = ours(dataset, 1, width, device, torch.bfloat16)
        if graphs:
            alternatives["CUDA graph"] = ours(dataset, 1, width, device, graphs=True)
        shown, ratio = timer.row(alternatives, steps)
        target = targets.get(width)
        singles.append(
            [width, *shown[:3], f"{ratio['plain loop']:.2f}",
             verdict(ratio["plain loop"], target, at_most=False) if target else "", f"{ratio['plain modules']:.2f}",
             *(f"{1 / ratio[name]:.2f}" if name in ratio else "" for name in ("bfloat16", "CUDA graph"))]
        )  # fmt: skip
        single, few = ours(dataset, 1, width, device), max(1, steps // 5)
        fifteen: dict[str, Callable[[], object]] = {
            "Ens-5, 3 seeds": ours(dataset, 15, width, device, graphs=graphs),
            "fifteen SM": partial(repeat, single, 15),
        }
        shown, ratio = timer.row(fifteen, 1)
        ensembles.append([width, *shown, f"{ratio['fifteen SM']:.2f}"])
        five: dict[str, Callable[[], object]] = {
            "Ens-5": ours(dataset, 5, width, device),
            "vmap": vmapped(dataset, 5, width, device),
        }
        shown, ratio = timer.row(five, few)
        ensembles[-1] += [*shown, f"{ratio['vmap']:.2f}"]
        mixture, flops = mixture_and_dense(dataset, width, device, graphs)
        shown, ratio = timer.row({"mixture": mixture, "dense": single}, few)
        mixtures.append([width, *shown, f"{flops:.1f}", f"{1 / ratio['dense'] / flops:.2f}"])
    tables = {
        "One network (against the plain loop, CPU: at least 3x at c = 4, 2x at c = 16; GPU: 5x at c = 32)": table(
            ["c", "ours", "plain loop", "plain modules", "to plain loop", "target", "to plain modules",
             "speed-up by bfloat16", "by CUDA graphs"], singles
        ),
        "Stacks of networks": table(
            ["c", "Ens-5, 3 seeds", "fifteen SM", "ratio", "Ens-5", "Ens-5 by vmap", "ratio to vmap"], ensembles
        ),
        "A mixture of ten experts against a dense network (time for the same FLOPs; 1 = equally fast)": table(
            ["c", "mixture", "dense", "FLOPs of the mixture / dense", "time for the same FLOPs"], mixtures
        ),
    }  # fmt: skip
    lines = [line for title, rows in tables.items() for line in (f"### {title}", "", *rows, "")]
    lines += provenance(load)
    print("\n".join(lines))
    if arguments.write:
        write_part(INTRODUCTION, PARTS, f"On {device.type}", lines)


if __name__ == "__main__":
    main()
