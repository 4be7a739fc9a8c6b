"""Compare our mixture layer with a dense feed-forward network of the same active size, and with other libraries.

.venv/bin/python benchmarks/lm_layer.py --device cpu            about an hour on one core, printed
.venv/bin/python benchmarks/lm_layer.py --device cuda --write   also written to benchmarks/lm_layer.md
.venv/bin/python benchmarks/lm_layer.py --peers FOLDER          with libraries from FOLDER (pip install --target FOLDER)
.venv/bin/python benchmarks/lm_layer.py --dims 512 --experts 4 8 --repeats 3

Each time is that of a forward and a backward pass. The layers take turns in random order. A cell of the tables is the
median of the ratios to the dense network's time in the same turn: CPU time with one thread on a CPU, time between two
events on a GPU. The exit status is 0 whether targets are met or not.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import provenance, table, write_part

INTRODUCTION = (
    "# Mixture layer against a dense feed-forward network of the same active size\n\n"
    "Written by `benchmarks/lm_layer.py --write`. A cell is the time of a forward and a backward pass, divided by "
    "that of a dense network with the size of one expert (median over turns). Each token is processed by one "
    "expert; by two in fairscale. With capacity 1, dropped tokens are not computed where the rows are split, which "
    "makes a layer look cheaper by their share. HF, fairscale and the einsum limit the capacity in each sequence "
    "of 512 tokens. The weights are float32, and bfloat16 is autocast."
)
PARTS = {f"On {device}": f"benchmarks/lm_layer.py --device {device} --peers FOLDER" for device in ("cpu", "cuda")}
"""Part of the report -> the command that fills it."""
TARGETS = {
    "cpu": {"bfloat16": {4: 1.10, 8: 1.30, 12: 1.40}, "float32": {4: 1.10, 8: 1.10, 12: 1.10}},
    "cuda": {"bfloat16": {4: 1.25, 8: 1.25, 12: 1.25, 64: 1.25}, "float32": {}},
}
"""Device -> precision -> number of experts -> largest ratio that is the target for "ours, capacity 1"."""
STEPS = {"cpu": 1, "cuda": 10}
"""Number of passes that are measured together."""


def main() -> None:
    options = _parse()
    from launch.local import SPIN

    os.environ |= SPIN  # as in a stage; OpenMP reads it when torch is loaded
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("lm_layer.py: there is no CUDA device here: give --device cpu")
    sys.path += options.peers  # at the end, so that packages of this environment come first
    torch.set_num_threads(1)
    load_at_start, lines = os.getloadavg()[0], []
    for precision in options.precisions:
        for model_dim in options.dims:
            for num_tokens in options.tokens:
                section = _section(options, precision, model_dim, num_tokens)
                print("\n".join(section), flush=True)
                lines += section
    machine = provenance(load_at_start)
    print("\n".join(machine))
    if options.write:
        write_part(INTRODUCTION, PARTS, f"On {options.device}", [*machine, "", *lines])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precisions", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--dims", type=int, nargs="+", default=[512, 768], help="model widths, D")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 12, 64], help="numbers of experts, E")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="numbers of tokens, multiples of 512 (default: 4096; cuda: and 32768)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="number of turns (default: 9)")
    parser.add_argument("--peers", nargs="+", default=[], metavar="FOLDER", help="folders with further libraries")
    parser.add_argument("--write", action="store_true", help="write the part of this device in benchmarks/lm_layer.md")
    options = parser.parse_args()
    options.tokens = options.tokens or ([4096] if options.device == "cpu" else [4096, 32768])
    if options.repeats < 1 or any(tokens % 512 for tokens in options.tokens):
        parser.error("--repeats must be at least 1, and --tokens multiples of 512")
    return options


def _section(options: argparse.Namespace, precision: str, model_dim: int, num_tokens: int) -> list[str]:
    """Measure one table and return its lines: a row for each layer, a column for each number of experts."""
    from _lm_layer import Case

    columns = {}
    for num_experts in options.experts:
        case = Case(options.device, precision, model_dim, num_experts, num_tokens)
        columns[num_experts] = _measure(case, options.repeats)
        gc.collect()
    targets = TARGETS[options.device][precision] if num_tokens == 4096 and model_dim == 512 else {}
    names = [name for name in columns[options.experts[0]] if name != "dense"]
    rows: list[tuple[str, ...]] = [("dense network, ms", *(columns[e]["dense"] for e in options.experts))]
    rows += [(name, *(columns[e][name] for e in options.experts)) for name in names]
    if targets:
        rows.append(
            (
                "target for ours, capacity 1: at most",
                *(f"{targets[e]:.2f}" if e in targets else "" for e in options.experts),
            )
        )
    return [
        f"### {precision}, d = {model_dim}, {num_tokens} tokens",
        "",
        *table(["time / time of the dense network", *(f"E = {e}" for e in options.experts)], rows),
        "",
    ]


def _measure(case: Any, repeats: int) -> dict[str, str]:
    """Return, for each layer, the ratio of its time to that of the dense network, or why there is none.

    The entry "dense" is the smallest time of the dense network in milliseconds.
    """
    import torch
    from _lm_layer import CUDA_LAYERS, LAYERS, dense

    torch.manual_seed(0)
    x_TD, grad_TD = torch.randn(2, case.num_tokens, case.model_dim, device=case.device)
    cells: dict[str, str] = {}
    layers: dict[str, Callable[[], float]] = {}
    for name, make in {"dense": dense, **LAYERS, **(CUDA_LAYERS if case.device == "cuda" else {})}.items():
        try:
            run, module = make(case)
            layers[name] = _timer(case, run, module.to(case.device), x_TD.detach().requires_grad_(), grad_TD)
            layers[name]()  # a warm-up
        except ImportError:
            cells[name] = "not installed"
            layers.pop(name, None)
        except Exception as error:  # a library that does not support the precision is a result, too
            cells[name] = f"fails ({type(error).__name__})"
            print(f"{name}, {case}: {str(error)[:200]}", file=sys.stderr)
            layers.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in layers}
    shuffled = random.Random(0)
    for _ in range(repeats):
        order = list(layers)
        shuffled.shuffle(order)
        for name in order:
            times[name].append(layers[name]())
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["dense"], strict=True)]
        cells[name] = f"{1000 * min(seconds):.1f}" if name == "dense" else f"{statistics.median(ratios):.2f}"
    return {name: cells[name] for name in ["dense", *LAYERS, *CUDA_LAYERS] if name in cells}


def _timer(case: Any, run: Callable, module: Any, x_TD: Any, grad_TD: Any) -> Callable[[], float]:
    """Return a function that makes forward and backward passes and returns the seconds of one pass."""
    import torch

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x_TD.grad = None
        with torch.autocast(case.device, dtype=torch.bfloat16, enabled=case.precision == "bfloat16"):
            y_TD, balance_loss = run(x_TD)
        outputs, gradients = [y_TD], [grad_TD.to(y_TD.dtype)]
        if balance_loss is not None:  # as in training, where the balance loss trains the router
            outputs, gradients = [*outputs, balance_loss], [*gradients, torch.full_like(balance_loss, 0.01)]
        torch.autograd.backward(outputs, gradients)

    def on_cpu() -> float:
        start = time.process_time()
        for _ in range(STEPS["cpu"]):
            step()
        return (time.process_time() - start) / STEPS["cpu"]

    def on_cuda() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS["cuda"]):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / STEPS["cuda"]

    return on_cpu if case.device == "cpu" else on_cuda


if __name__ == "__main__":
    main()
