"""Compare the speed of `alma-vision` on MNIST with other libraries.

.venv/bin/python benchmarks/vision_peers.py --data-root DATA --original CHECKOUT --write

The alternatives to alma-vision are: a PyTorch DataLoader with transforms, Continuum, Avalanche, the authors' code, and
torch.optim on tensors. They run in a separate environment, which the benchmark creates below runs/. It uses the torch
of the environment in which this script runs. CHECKOUT is a checkout of facebookresearch/alma; without it the authors'
code is skipped. Everything uses one thread. The alternatives take turns. Times are CPU times of complete processes,
including imports, reading, training, testing and writing files. The exit status is 0 whether targets are met or not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import ROOT, cpu_seconds_of, environment_of, provenance, ratio_columns, table, verdict
from _vision_stacks import stack_tables

PEERS = ("plain", "continuum", "avalanche", "original", "tensors")
NAMES = {
    "ours": "alma-vision",
    "plain": "PyTorch DataLoader + transforms",
    "continuum": "Continuum's ALMA scenario + DataLoader",
    "avalanche": "Avalanche, Naive",
    "original": "the original code, tensors in a DataLoader",
    "tensors": "tensors, torch.optim, no loader",
}
WIDTH, EPOCHS = 32, 20
PACKAGES = ("continuum==1.2.7", "avalanche-lib==0.6.0", "fvcore==0.1.5.post20221221", "six")


def run_peer(peer: str, stages: int, arguments: argparse.Namespace) -> dict:
    """Run one of the alternatives to alma-vision.

    Return a dictionary with its test errors ("errors"), and the CPU seconds of its imports ("imports") and of the
    complete process ("all").
    """
    python = environment_of("vision_peers", PACKAGES, sees_ours=True)
    data_root = Path(arguments.data_root).absolute()
    with tempfile.TemporaryDirectory() as folder:
        # torchvision and Continuum name the data folder after the class that reads it.
        for name in ("MNIST", "CachedMNIST"):
            (Path(folder) / name).symlink_to(data_root / "MNIST")
        command = [python, "-W", "ignore", ROOT / "benchmarks" / "_vision_peers.py", peer, "--data-root", folder,
                   "--stages", stages, "--epochs", EPOCHS, "--width", WIDTH]  # fmt: skip
        path = str(Path(arguments.original).absolute()) if arguments.original else ""
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
    if result.returncode:
        raise RuntimeError(f"{peer} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout)


def run_ours(stages: int, arguments: argparse.Namespace) -> dict:
    """Run alma-vision, and return a dictionary with the same entries as `run_peer`."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(sys.prefix) / "bin" / "alma-vision"
        command = [program, "dataset=mnist", f"data_root={arguments.data_root}", "wait=10",
                   f"width={WIDTH}", f"epochs={EPOCHS}", f"arrivals={10 * stages}", f"out={folder}/run"]  # fmt: skip
        seconds, _ = cpu_seconds_of(list(map(str, command)))
        rows = [json.loads(line) for line in (Path(folder) / "run" / "ledger.jsonl").read_text().splitlines()]
    probe = [sys.executable, "-W", "ignore", "-c", "import time, hydra, vision.cli; print(time.process_time())"]
    imports = float(subprocess.run(probe, capture_output=True, text=True, check=True).stdout)
    return {"errors": [row["error_rate"] for row in rows if row["updated"]], "imports": imports, "all": seconds}


def whole_runs(stages: int, repeats: int, target: float, arguments: argparse.Namespace) -> list[str]:
    """Measure runs of alma-vision and of all alternatives, and return a Markdown table that compares them.

    Args:
        stages: number of stages of each run.
        repeats: number of runs of each alternative.
        target: smallest ratio (CPU seconds of an alternative / CPU seconds of alma-vision) that passes.
        arguments: the arguments of the command line.
    """
    peers = [peer for peer in PEERS if peer != "original" or arguments.original]
    results: dict[str, list[dict]] = {name: [] for name in ("ours", *peers)}
    for repeat in range(repeats):
        for name in results:
            print(f"{stages} stages, repeat {repeat + 1}: {name}", file=sys.stderr, flush=True)
            results[name].append(run_ours(stages, arguments) if name == "ours" else run_peer(name, stages, arguments))
    rows = []
    ours_all = [result["all"] for result in results["ours"]]
    ours_work = min(result["all"] - result["imports"] for result in results["ours"])
    for name, runs in results.items():
        spent, work = [run["all"] for run in runs], min(run["all"] - run["imports"] for run in runs)
        _, ratio, _ = ratio_columns(spent, ours_all)
        goal = {"ours": None, "tensors": None, "original": 4.0}.get(name, target)
        rows.append(
            [
                NAMES[name], f"{100 * runs[0]['errors'][-1]:.1f}", f"{min(spent):.1f}", f"{min(work, min(spent)):.1f}",
                f"{ratio:.1f}", f"{work / ours_work:.1f}", verdict(ratio, goal, at_most=False) if goal else "",
            ]
        )  # fmt: skip
    header = [
        "way",
        "test error at the end, %",
        "CPU s",
        "without imports",
        "against ours",
        "without imports",
        "target",
    ]
    return table(header, rows)


def all_in_seeds(arguments: argparse.Namespace) -> list[str]:
    """Measure alma-vision processes with 1 seed and with 3 seeds. Return a Markdown table of their CPU seconds."""
    rows = []
    for width, target in ((4, 1.6), (32, 2.4)):
        seconds: dict[int, list[float]] = {1: [], 3: []}
        for _ in range(arguments.repeats_whole):
            for seeds in seconds:
                with tempfile.TemporaryDirectory() as folder:
                    command = [Path(sys.prefix) / "bin" / "alma-vision", "dataset=mnist", "wait=10", f"width={width}",
                               f"data_root={arguments.data_root}", f"epochs={EPOCHS}", f"seeds={seeds}",
                               f"out={folder}/run"]  # fmt: skip
                    seconds[seeds].append(cpu_seconds_of(list(map(str, command)))[0])
        ratio = ratio_columns(seconds[3], seconds[1])[1]
        rows.append([width, *(f"{statistics.median(seconds[s]):.1f}" for s in seconds), f"{ratio:.2f}",
                     verdict(ratio, target, at_most=True)])  # fmt: skip
    return table(["width", "one seed, CPU s", "three seeds", "ratio", "target"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder that contains MNIST/")
    parser.add_argument("--original", help="a checkout of facebookresearch/alma")
    parser.add_argument("--repeats", type=int, default=9, help="number of measurements of training steps (default: 9)")
    parser.add_argument(
        "--repeats-whole", type=int, default=3, help="number of measurements of complete processes (default: 3)"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/vision_peers.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    ensembles, seeds = stack_tables(arguments.repeats)
    lines = [
        "# Speed of alma-vision on MNIST",
        "",
        "Written by `benchmarks/vision_peers.py --write`.",
        "",
        "MNIST, B = 500, wait 10, SM of two hidden layers of width 32, AdaDelta, batch 128, one thread. CPU seconds of",
        "whole processes, the smallest of the repeats. Ratios are medians of the ratios of measurements that are",
        "neighbours in time.",
        "",
        f"## A slice: 5 stages of {EPOCHS} epochs (at least 10x; 4x against the original)",
        "",
        *whole_runs(5, arguments.repeats_whole, 10.0, arguments),
        "",
        f"## The whole of wait 10: 50 stages of {EPOCHS} epochs (at least 15x; 4x against the original)",
        "",
        *whole_runs(50, 1, 15.0, arguments),
        "",
        "## Ensembles: one stage of wait 10, training steps only, in one process",
        "",
        *ensembles,
        "",
        "## Seeds: one stage of wait 10, training steps only, in one process",
        "",
        *seeds,
        "",
        f"## Seeds: the whole of wait 10, {EPOCHS} epochs, whole processes",
        "",
        *all_in_seeds(arguments),
        "",
        *provenance(load),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        (ROOT / "benchmarks" / "vision_peers.md").write_text(text)


if __name__ == "__main__":
    main()
