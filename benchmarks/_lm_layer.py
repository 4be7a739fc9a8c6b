"""Part (a) of lm_quick.py: compare a mixture layer with a dense feed-forward network of the same active size."""

import os
import random
import time
from collections.abc import Sequence

from _common import ratio_columns, table, verdict

MODEL_DIM, FFN_DIM, NUM_TOKENS = 512, 2048, 4096
NUM_EXPERTS = (4, 8, 12)
TARGET = 1.2
"""Largest ratio of CPU times (mixture layer / dense network) that passes, with 4 experts."""


def measure_layer(repeats: int, threads: Sequence[int]) -> list[str]:
    """Measure forward and backward passes, and return the lines of part (a) of the report.

    Args:
        repeats: number of measurements.
        threads: numbers of threads to measure with.
    """
    from launch.local import SPIN

    os.environ |= SPIN  # as in a stage; set it before the import, because OpenMP reads it when torch is loaded
    import torch
    from torch import nn

    from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward

    torch.manual_seed(0)
    x_TD = torch.randn(NUM_TOKENS, MODEL_DIM, requires_grad=True)
    grad_TD = torch.randn(NUM_TOKENS, MODEL_DIM)
    dense = nn.Sequential(nn.Linear(MODEL_DIM, FFN_DIM), nn.ReLU(), nn.Linear(FFN_DIM, MODEL_DIM))
    mixtures = {
        (num_experts, factor): SwitchFeedForward(MODEL_DIM, FFN_DIM, num_experts, capacity_factor=factor)
        for num_experts in NUM_EXPERTS
        for factor in (0.0, 1.0)
    }

    def seconds_of(module: nn.Module) -> tuple[float, float]:
        """Return (CPU seconds, wall seconds) of a forward and backward pass."""
        module.zero_grad(set_to_none=True)
        x_TD.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        output = module(x_TD)
        if module is dense:
            output.backward(grad_TD)
        else:  # as in training, where the balance loss trains the router
            torch.autograd.backward([output.y_TD, output.routing.balance_loss], [grad_TD, torch.tensor(0.01)])
        return time.process_time() - cpu, time.perf_counter() - wall

    shuffled, rows = random.Random(0), []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        times: dict = {key: [] for key in ["dense", *mixtures]}
        for repeat in range(-1, repeats):  # number -1 is a warm-up
            order = list(times)
            shuffled.shuffle(order)
            for key in order:
                seconds = seconds_of(dense if key == "dense" else mixtures[key])
                if repeat >= 0:
                    times[key].append(seconds)
        for (num_experts, factor), mixture in mixtures.items():
            with torch.no_grad():
                dropped = mixture(x_TD).num_dropped / NUM_TOKENS
            name = "none: dropless" if factor == 0 else f"{factor:g}"
            columns = _columns(times[num_experts, factor], times["dense"], num_experts)
            rows.append((name, num_experts, num_threads, f"{dropped:.1%}", *columns))
    return _section(rows, repeats)


def _columns(
    mixture: Sequence[tuple[float, float]], dense: Sequence[tuple[float, float]], num_experts: int
) -> list[str]:
    """Return the table columns with times and ratios, from the (CPU seconds, wall seconds) of each round."""
    (cpu, wall), (cpu_dense, wall_dense) = zip(*mixture, strict=True), zip(*dense, strict=True)
    best, median, _ = ratio_columns(cpu, cpu_dense)
    return [
        f"{1000 * min(cpu_dense):.0f}",
        f"{1000 * min(cpu):.0f}",
        f"{best:.2f}",
        f"{median:.2f}",
        f"{ratio_columns(wall, wall_dense)[1]:.2f}",
        verdict(median, TARGET, at_most=True) if num_experts == 4 else "",
    ]


def _section(rows: list[tuple], repeats: int) -> list[str]:
    """Return the lines of the report, from the rows of its table and the number of rounds."""
    from launch.local import SPIN

    rows.sort(key=lambda row: (row[2], row[0] == "1"))
    header = ["capacity factor", "E", "threads", "tokens dropped", "dense CPU ms", "mixture CPU ms"]
    header += ("CPU ratio of minima", "CPU ratio, median", "wall ratio, median", f"at E = 4 at most {TARGET}")
    return [
        "## (a) Mixture layer against a dense feed-forward network of the same active size",
        "",
        f"Forward and backward, {NUM_TOKENS} tokens, d = {MODEL_DIM}, ffn = {FFN_DIM}, fp32, gradients of input and "
        f"weights, router and balance loss included; {repeats} rounds in random order; waiting threads spin as briefly "
        f"as in a stage ({', '.join(f'{name}={value}' for name, value in SPIN.items())}). Compare the dropless rows: "
        "at capacity factor 1 dropped tokens are not computed, which makes the layer look cheaper by their share.",
        "",
        *table(header, rows),
    ]
