"""Measure training on one and on several ranks, and experts over ranks beside data parallelism; project to clusters.

.venv/bin/python benchmarks/scaling.py                     2 ranks on the CPU, printed, in about twenty minutes
.venv/bin/python benchmarks/scaling.py --device cuda       all GPUs of this machine
.venv/bin/python benchmarks/scaling.py --write             also written to benchmarks/scaling.md

Each alternative is a whole training with fairseq-train. They take turns, and each runs `--rounds` times. The time of an
update is the median time that passes between two log lines. On a CPU, each rank has one thread.

A model predicts the measured times on several ranks from those on one rank and from the speed of the network. The same
model, with the assumed numbers of a GPU, projects the paper's large model to clusters.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from _common import ROOT, provenance, table, write_part
from _lm_stream import write_stream
from _plain_loop import ours

VOCABULARY, LENGTH, SKIPPED_UPDATES = 50_264, 512, 2
PARTS = {f"On {device}": f"benchmarks/scaling.py --device {device}" for device in ("cpu", "cuda")}
"""Part of the report -> the command that fills it."""


@dataclass(frozen=True)
class Layout:
    """How an update is divided among ranks."""

    name: str
    ranks: int
    sequences: int
    """Sequences in an update, on all ranks together."""
    experts: int
    expert_parallel: int = 1
    copies: int = 1
    """Number of independent trainings that run at the same time."""


@dataclass
class Measured:
    """What was measured for a layout, in all rounds."""

    seconds: list[float] = field(default_factory=list)
    """Time of each update."""
    gibibytes: list[float] = field(default_factory=list)
    """Largest memory of a process on a CPU, of a GPU otherwise; one entry for each round."""
    exchange: list[float] = field(default_factory=list)
    """Time of the all-to-all in each update."""

    @property
    def update(self) -> float:
        """The median time of an update."""
        return statistics.median(self.seconds)


def layouts(ranks: int, sequences: int, experts: Sequence[int]) -> list[Layout]:
    """Return the layouts to measure.

    Args:
        ranks: number of ranks of the layouts with several ranks.
        sequences: number of sequences of each rank in an update.
        experts: numbers of experts.
    """
    few, many = experts
    return [
        Layout("1 rank", 1, sequences, few),
        Layout(f"1 rank, {ranks} times the sequences", 1, ranks * sequences, few),
        Layout(f"{ranks} independent trainings side by side", 1, sequences, few, copies=ranks),
        Layout(f"{ranks} independent trainings side by side", 1, sequences, many, copies=ranks),
        *(
            Layout(f"{ranks} ranks, {name}", ranks, ranks * sequences, number, expert_parallel)
            for number in (few, many)
            for name, expert_parallel in (("data parallel", 1), ("experts over ranks", ranks))
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--arch", default="switch_lm_base", help="model (default: switch_lm_base)")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: 2 on a CPU, otherwise all GPUs)")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a rank in an update (default: 4)")
    parser.add_argument("--experts", type=int, nargs=2, default=[8, 64], help="numbers of experts (default: 8 64)")
    parser.add_argument("--updates", type=int, default=4, help="measured updates in a round (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (default: 2)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/scaling.md")
    options = parser.parse_args()
    load_at_start = os.getloadavg()[0]
    if options.device == "cuda":
        import torch

        options.ranks = options.ranks or torch.cuda.device_count()
    options.ranks = options.ranks or 2
    measured = {layout: Measured() for layout in layouts(options.ranks, options.sequences, options.experts)}
    with tempfile.TemporaryDirectory(prefix="scaling_") as scratch:
        stream = write_stream(Path(scratch) / "stream", VOCABULARY, tokens=400_000)
        network = measure_network(options)
        for _ in range(options.rounds):
            for layout, found in measured.items():
                print(f"measuring: {layout.name}, {layout.experts} experts", file=sys.stderr)
                run(layout, found, stream, options)
    lines = [*measured_lines(measured, options), "", *comparison_lines(measured, network, options), "",
             *cluster_lines(), "", *provenance(load_at_start)]  # fmt: skip
    print("\n".join(lines))
    if options.write:
        introduction = "# Several ranks\n\nWritten by `benchmarks/scaling.py --write`."
        write_part(introduction, PARTS, f"On {options.device}", lines)


def free_port() -> int:
    """Return a port that no program uses."""
    with socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(device: str) -> dict[str, str]:
    """Return the environment of a rank. On a CPU, it has one thread."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if device == "cpu" else {}
    return {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT), **threads}


def commands_of(layout: Layout, stream: Path, options: argparse.Namespace) -> list[list[str]]:
    """Return the command of each process of a layout. Those of the first rank of each training come first."""
    per_rank = layout.sequences // layout.ranks
    batch_size = min(per_rank, options.sequences)
    words = [
        sys.executable, "-m", "fairseq_cli.train", stream, "--user-dir", ROOT / "fairseq_alma", "--task", "alma_lm",
        "--arch", options.arch, "--criterion", "switch_lm", "--optimizer", "fused_adam", "--precision", "bfloat16",
        "--num-experts", layout.experts, "--expert-parallel", layout.expert_parallel, "--tokens-per-sample", LENGTH,
        "--batch-size", batch_size, "--update-freq", per_rank // batch_size, "--sample-break-mode", "none",
        "--lr", 5e-4, "--clip-norm", 1.0, "--max-update", 10**6, "--seed", 0, "--num-workers", 0,
        "--log-format", "json", "--log-interval", 1, "--no-save", "--disable-validation",
        "--distributed-world-size", layout.ranks,
    ]  # fmt: skip
    words += ["--cpu"] if options.device == "cpu" else []
    # fairseq writes a file to the folder for checkpoints, also if it saves none. So each training has its own folder.
    folders = [stream.parent / f"training_{number}" for number in range(layout.copies)]
    if options.device == "cuda" or layout.ranks == 1:  # on GPUs, fairseq starts the ranks
        return [[*map(str, words), "--save-dir", str(folder)] for folder in folders]
    words += ["--save-dir", folders[0]]
    words += ["--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-no-spawn",
              "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--distributed-rank"]  # fmt: skip
    return [[*map(str, words), str(rank)] for rank in range(layout.ranks)]


def run(layout: Layout, found: Measured, stream: Path, options: argparse.Namespace) -> None:
    """Run the trainings of a layout for some updates, and add what was measured to `found`."""
    processes = []
    for number, command in enumerate(commands_of(layout, stream, options)):
        own = environment(options.device)
        if options.device == "cuda" and layout.copies > 1:
            own["CUDA_VISIBLE_DEVICES"] = str(number)
        processes.append(
            subprocess.Popen(command, env=own, stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                             stderr=subprocess.STDOUT, text=True)
        )  # fmt: skip
    try:
        times: list[float] = []
        lines: list[str] = []
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            lines.append(line)
            if "| train_inner |" not in line:
                continue
            times.append(time.perf_counter())
            if len(times) > SKIPPED_UPDATES:
                record = json.loads(line[line.index("{") :])
                passes = max(1, layout.sequences // layout.ranks // options.sequences)
                found.exchange.append(float(record.get("all_to_all_seconds", 0)) * passes)
            if len(times) == SKIPPED_UPDATES + options.updates:
                break
        else:
            raise RuntimeError(f"{layout} ended before it printed all updates:\n{''.join(lines[-30:])}")
        found.seconds += [end - begin for begin, end in itertools.pairwise(times)][SKIPPED_UPDATES - 1 :]
        found.gibibytes.append(_memory(processes, lines[-1], options.device))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _memory(processes: Sequence[subprocess.Popen[str]], line: str, device: str) -> float:
    """Return the largest memory in GiB: of a process on a CPU, of the first GPU otherwise."""
    if device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        return total - float(json.loads(line[line.index("{") :]).get("gb_free", "nan"))
    peaks = [Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0] for process in processes]
    return max(map(int, peaks)) / 2**20


def measure_network(options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes per second of a sum over the ranks (all_reduce) and of an exchange (all_to_all)."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    words = [sys.executable, str(ROOT / "benchmarks" / "_collectives.py")]
    rest, own = [str(options.ranks), str(free_port()), backend], environment(options.device)
    others = [subprocess.Popen([*words, str(rank), *rest], env=own) for rank in range(1, options.ranks)]
    first = subprocess.run([*words, "0", *rest], env=own, capture_output=True, text=True, check=True)
    for other in others:
        other.wait()
    return json.loads(first.stdout.splitlines()[-1])


def measured_lines(measured: dict[Layout, Measured], options: argparse.Namespace) -> list[str]:
    """Return the lines of the report about what was measured."""
    one = next(iter(measured.values())).update / options.sequences  # seconds for each sequence
    rows = []
    for layout, found in measured.items():
        rate = layout.sequences * layout.copies / found.update
        spread = (max(found.seconds) - min(found.seconds)) / found.update
        exchange = f"{statistics.median(found.exchange):.2f}" if layout.expert_parallel > 1 else ""
        rows.append([layout.name, layout.experts, layout.sequences * layout.copies, f"{found.update:.2f}",
                     f"{spread:.0%}", f"{rate * LENGTH:,.0f}", f"{rate * one:.2f}", exchange,
                     f"{max(found.gibibytes):.1f}"])  # fmt: skip
    by_name = {(layout.name, layout.experts): found.update for layout, found in measured.items()}
    few, many = options.experts
    n, strong = options.ranks, f"1 rank, {options.ranks} times the sequences"
    parallel, spread_out = f"{n} ranks, data parallel", f"{n} ranks, experts over ranks"
    ratios = {
        f"strong scaling: {n} ranks against 1 rank with the same update": by_name[strong, few] / by_name[parallel, few],
        f"weak scaling: {n} ranks against 1 rank with 1/{n} of the update": by_name["1 rank", few]
        / by_name[parallel, few],
        f"weak scaling without what the machine itself loses: {n} ranks against {n} independent trainings": by_name[
            f"{n} independent trainings side by side", few
        ]
        / by_name[parallel, few],
        f"experts over ranks against data parallel, {few} experts": by_name[parallel, few] / by_name[spread_out, few],
        f"experts over ranks against data parallel, {many} experts": by_name[parallel, many]
        / by_name[spread_out, many],
    }
    header = ["", "experts", "sequences", "s an update, median", "spread", "tokens/s", "of 1 rank's rate",
              "of these, s in all-to-all", "GiB of a rank"]  # fmt: skip
    what = "CPU ranks with one thread each" if options.device == "cpu" else "GPUs"
    return [
        f"{options.arch}, bfloat16, {options.sequences} sequences of {LENGTH} random tokens on each rank; {what}. Peak "
        f"memory is that of the largest rank. Spread: (largest - smallest) / median of {options.rounds} rounds of "
        f"{options.updates} updates.",
        "",
        *table(header, rows),
        "",
        *(f"- {name}: {ratio:.2f} of its rate" for name, ratio in ratios.items()),
    ]


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model, and its cost."""

    shared: int
    per_expert: int
    """Parameters of one expert of every mixture."""
    mixtures: int
    dim: int
    flops: float
    """FLOPs of the training on one sequence."""

    @classmethod
    def of(cls, arch: str) -> "Sizes":
        """Return the sizes of an architecture."""
        from fairseq_alma.evaluation.flops import count_training_flops

        options = Namespace(arch=arch, vocabulary=VOCABULARY, experts=1, length=LENGTH, precision="float32",
                            capacity_factor=1.0)  # fmt: skip
        model: Any = ours(options)[0]
        experts = sum(p.numel() for m in model.mixtures for n, p in m.named_parameters() if n.startswith("fc"))
        # The router has one row for each expert.
        dim = model.decoder.embed_positions.embedding_dim
        rows = len(model.mixtures) * dim
        shared = sum(p.numel() for p in model.parameters()) - experts - rows
        flops = float(count_training_flops(model).of_row(LENGTH))
        return cls(shared, experts + rows, len(model.mixtures), dim, flops)

    def on_rank(self, experts: int, expert_parallel: int) -> int:
        """Return the number of parameters that a rank has."""
        return self.shared + self.per_expert * experts // expert_parallel

    def exchanged(self, sequences: int) -> int:
        """Return the bytes that a rank sends in the all-to-all of an update, those for itself included.

        In each mixture, a row of each token is sent and returned, in the forward and in the backward pass, in bfloat16.
        """
        return 4 * self.mixtures * sequences * LENGTH * self.dim * 2


def comparison_lines(
    measured: dict[Layout, Measured], network: dict[str, float], options: argparse.Namespace
) -> list[str]:
    """Return the lines that compare the prediction of the model with what was measured on several ranks."""
    sizes, (few, many) = Sizes.of(options.arch), options.experts
    alone = {layout.experts: found.update for layout, found in measured.items() if layout.copies > 1}
    # More experts cost time because Adam updates their weights. This gives the cost of a parameter.
    per_parameter = (alone[many] - alone[few]) / (sizes.on_rank(many, 1) - sizes.on_rank(few, 1))
    rows = []
    for layout, found in measured.items():
        if layout.ranks == 1:
            continue
        n = layout.expert_parallel
        own = sizes.on_rank(layout.experts, n)
        seconds = alone[few] + per_parameter * (own - sizes.on_rank(few, 1))
        reduced = sizes.shared if n > 1 else own
        seconds += 4 * reduced / network["all_reduce"]
        if n > 1:
            seconds += sizes.exchanged(options.sequences) / network["all_to_all"]
        rows.append([layout.name, layout.experts, f"{seconds:.2f}", f"{found.update:.2f}",
                     f"{seconds / found.update:.2f}"])  # fmt: skip
    return [
        "The model: an update takes the time of a training alone, while others run beside it; plus the time to sum the "
        "gradients over the ranks (of all parameters, or of those that are not spread), and of the all-to-all, at the "
        f"measured speed of the network ({network['all_reduce'] / 1e9:.2f} and {network['all_to_all'] / 1e9:.2f} "
        "GB/s). "
        f"A parameter costs {per_parameter * 1e9:.1f} ns in each update (Adam, clipping), from the two trainings "
        "alone. Nothing overlaps.",
        "",
        *table(["", "experts", "predicted s", "measured s", "predicted / measured"], rows),
    ]


TFLOPS, MEMORY_RATE, IN_NODE, BETWEEN_NODES = 300.0, 2.5e12, 250e9, 40e9
"""Assumed for a GPU such as the H100: sustained TFLOP/s in bfloat16, bytes/s of its memory, and the bytes/s it sends
to the GPUs of its node and to other nodes. None of them was measured here."""
GPUS_PER_NODE = 8
BYTES_OF_ADAM = 7 * 4
"""Bytes that Adam reads and writes for each parameter: it reads four numbers, and writes all but the gradient."""


def cluster_lines() -> list[str]:
    """Return the lines that project the paper's large model to clusters."""
    sizes, sequences, rows = Sizes.of("switch_lm_large"), 192, []
    for experts in (12, 128):
        for gpus, expert_parallel in ((8, 1), (8, 8), (64, 1), (64, 8), (64, 64)):
            if experts < expert_parallel:
                continue
            own = sizes.on_rank(experts, expert_parallel)
            parts = {
                "compute": sequences / gpus * sizes.flops / (TFLOPS * 1e12),
                "Adam": own * BYTES_OF_ADAM / MEMORY_RATE,
                "gradients": _all_reduce(sizes.shared, gpus, gpus)
                + _all_reduce(own - sizes.shared, gpus // expert_parallel, gpus),
                "all-to-all": _all_to_all(sizes.exchanged(sequences // gpus), expert_parallel),
            }
            seconds = sum(parts.values())
            rows.append([
                f"{gpus} GPUs, {experts} experts", expert_parallel,
                *(f"{1000 * part:.1f}" for part in parts.values()), f"{1000 * seconds:.0f}",
                f"{sequences * LENGTH / seconds / 1e6:.2f}", f"{parts['compute'] / seconds:.0%}",
                f"{16 * own / 2**30:.1f}",
            ])  # fmt: skip
    header = ["switch_lm_large", "`expert_parallel`", "compute, ms", "Adam", "gradients", "all-to-all", "update, ms",
              "million tokens/s", "computing", "GiB of weights and Adam"]  # fmt: skip
    return [
        "The same model for clusters. **These are assumptions, not measurements**: "
        f"{TFLOPS:.0f} TFLOP/s of a GPU in bfloat16, {MEMORY_RATE / 1e12:.1f} TB/s of its memory, {IN_NODE / 1e9:.0f} "
        f"GB/s to the GPUs of its node ({GPUS_PER_NODE} GPUs), {BETWEEN_NODES / 1e9:.0f} GB/s to other nodes; nothing "
        f"overlaps, the load of the experts is even, and an update has the paper's {sequences} sequences of {LENGTH} "
        "tokens.",
        "",
        *table(header, rows),
    ]


def _all_reduce(parameters: int, ranks: int, gpus: int) -> float:
    """Return the seconds to sum float32 gradients over `ranks` of the `gpus` in a ring."""
    if ranks == 1:
        return 0.0
    rate = IN_NODE if gpus <= GPUS_PER_NODE else BETWEEN_NODES
    return 4 * parameters * 2 * (ranks - 1) / ranks / rate


def _all_to_all(sent: int, ranks: int) -> float:
    """Return the seconds in which each of `ranks` GPUs sends `sent` bytes, divided evenly among all of them."""
    if ranks == 1:
        return 0.0
    if ranks <= GPUS_PER_NODE:
        return sent * (ranks - 1) / ranks / IN_NODE
    return sent * (ranks - GPUS_PER_NODE) / ranks / BETWEEN_NODES


if __name__ == "__main__":
    main()
