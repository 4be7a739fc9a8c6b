"""Speed of `alma-vision` on MNIST against its peers, in one run.

.venv/bin/python benchmarks/vision_peers.py --data-root DATA --original CHECKOUT --write

Peers run in an environment of their own, which the benchmark makes below runs/ (Continuum, Avalanche; torch is ours).
CHECKOUT is one of facebookresearch/alma; without it the original is left out. Everything has one thread. What is
compared takes turns, and times are CPU times of whole processes: imports, reading, training, testing, files.
A benchmark judges nothing: the exit status is 0 whether targets are met or not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import ROOT, provenance, ratio_columns, table, verdict

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


def peers_environment(folder: Path) -> Path:
    """The interpreter of an environment with the peers, made where missing. torch is this environment's."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = Path(sys.prefix) / "lib" / version / "site-packages"
        (folder / "lib" / version / "site-packages" / "project.pth").write_text(f"{packages}\n")
        names = ["continuum==1.2.7", "avalanche-lib==0.6.0", "fvcore==0.1.5.post20221221", "six"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *names], check=True)
        (folder / "ready").touch()
    return python


def run_peer(peer: str, stages: int, arguments: argparse.Namespace) -> dict:
    """What a peer printed of its work: errors, CPU seconds of imports and of all."""
    python = peers_environment(ROOT / "runs" / "benchmarks" / "vision_peers")
    data_root = Path(arguments.data_root).absolute()
    with tempfile.TemporaryDirectory() as folder:
        # torchvision and Continuum name a folder after the class that reads it.
        for name in ("MNIST", "CachedMNIST"):
            (Path(folder) / name).symlink_to(data_root / "MNIST")
        command = [python, "-W", "ignore", ROOT / "benchmarks" / "_vision_peers.py", peer, "--data-root", folder,
                   "--stages", stages, "--epochs", EPOCHS, "--width", WIDTH]  # fmt: skip
        path = str(Path(arguments.original).absolute()) if arguments.original else ""
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
    if done.returncode:
        raise RuntimeError(f"{peer} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def run_ours(stages: int, arguments: argparse.Namespace) -> dict:
    """The same of the command alma-vision."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(sys.prefix) / "bin" / "alma-vision"
        command = [program, "dataset=mnist", f"data_root={arguments.data_root}", "wait=10",
                   f"width={WIDTH}", f"epochs={EPOCHS}", f"arrivals={10 * stages}", f"out={folder}/run"]  # fmt: skip
        before = os.times()
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        after = os.times()
        if done.returncode:
            raise RuntimeError(f"alma-vision failed:\n{done.stderr[-3000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "ledger.jsonl").read_text().splitlines()]
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    probe = [sys.executable, "-W", "ignore", "-c", "import time, hydra, vision.run; print(time.process_time())"]
    imports = float(subprocess.run(probe, capture_output=True, text=True, check=True).stdout)
    return {"errors": [row["error_rate"] for row in rows if row["updated"]], "imports": imports, "all": seconds}


def whole_runs(stages: int, repeats: int, target: float, arguments: argparse.Namespace) -> list[str]:
    """The table of one length of run."""
    peers = [peer for peer in PEERS if peer != "original" or arguments.original]
    results: dict[str, list[dict]] = {name: [] for name in ("ours", *peers)}
    for repeat in range(repeats):
        for name in results:
            print(f"{stages} stages, repeat {repeat + 1}: {name}", file=sys.stderr, flush=True)
            results[name].append(run_ours(stages, arguments) if name == "ours" else run_peer(name, stages, arguments))
    rows = []
    ours_all = [one["all"] for one in results["ours"]]
    ours_work = min(one["all"] - one["imports"] for one in results["ours"])
    for name, runs in results.items():
        spent, work = [one["all"] for one in runs], min(one["all"] - one["imports"] for one in runs)
        _, ratio, _ = ratio_columns(spent, ours_all)
        wanted = {"ours": None, "tensors": None, "original": 4.0}.get(name, target)
        rows.append(
            [
                NAMES[name], f"{100 * runs[0]['errors'][-1]:.1f}", f"{min(spent):.1f}", f"{min(work, min(spent)):.1f}",
                f"{ratio:.1f}", f"{work / ours_work:.1f}", verdict(ratio, wanted, at_most=False) if wanted else "",
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


def interleaved(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each way, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    return seconds


def stacks(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Tables of ensembles and of seeds: a stage of wait 10, steps alone."""
    sys.path.insert(0, str(ROOT))
    import torch

    from vision.batches import Batches, Rows, StageData
    from vision.networks import MLPStack
    from vision.optimizers import AdaDelta
    from vision.seeds import generator
    from vision.training import OwnLoss, train_stage

    torch.set_num_threads(1)
    torch.manual_seed(0)
    epochs = 5

    def rows(num_seeds: int, num_examples: int) -> Rows:
        x, y = torch.randn(num_seeds * num_examples, 784), torch.randint(10, (num_seeds * num_examples,))
        return Rows(x, y, torch.nn.functional.one_hot(y, 10).float(), num_seeds, num_examples)

    def ours(num_seeds: int, members: int, width: int) -> Callable[[], None]:
        data = StageData(rows(num_seeds, 1080), 0, rows(num_seeds, 120))
        generators = [generator(number) for number in range(num_seeds * members)]
        stack = MLPStack.initialised((784, width, width, 10), generators, torch.device("cpu"))

        def way() -> None:
            batches = Batches(data, generators, 128)
            optimizer = AdaDelta(stack.parameters.flat)
            train_stage(
                stack, batches, data.validation, OwnLoss(num_seeds, members), optimizer, epochs, "validation_loss"
            )

        return way

    def plain(members: int, width: int) -> Callable[[], None]:
        training, validation = rows(1, 1080), rows(1, 120)

        def way() -> None:
            for _ in range(members):
                model = torch.nn.Sequential(
                    torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
                    torch.nn.Linear(width, 10),
                )  # fmt: skip
                optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
                for _ in range(epochs):
                    for index in torch.randperm(1080).split(128):
                        optimizer.zero_grad()
                        torch.nn.functional.cross_entropy(model(training.x[index]), training.y[index]).backward()
                        optimizer.step()
                    with torch.no_grad():
                        torch.nn.functional.cross_entropy(model(validation.x), validation.y)

        return way

    def five_of_ours(width: int) -> Callable[[], None]:
        one = ours(1, 1, width)
        return lambda: [one() for _ in range(5)]

    steps, ensembles, seeds = epochs * 9, [], []
    for width in (4, 32, 64):
        ways = {"ens": ours(1, 5, width), "five": five_of_ours(width), "plain": plain(5, width)}
        seconds = interleaved(ways, arguments.repeats)
        against = {name: ratio_columns(seconds[name], seconds["ens"])[1] for name in ("plain", "five")}
        ensembles.append(
            [
                width, *(f"{1000 * min(seconds[name]) / steps:.2f}" for name in ("ens", "five", "plain")),
                f"{against['plain']:.1f}", verdict(against["plain"], 4.0, at_most=False),
                f"{against['five']:.2f}", verdict(against["five"], 1.3, at_most=False),
            ]
        )  # fmt: skip
        ways = {"one": ours(1, 1, width), "three": ours(3, 1, width)}
        seconds = interleaved(ways, arguments.repeats)
        ratio = ratio_columns(seconds["three"], seconds["one"])[1]
        target = {4: 1.6, 32: 2.4}.get(width)
        seeds.append(
            [
                width, *(f"{1000 * min(seconds[name]) / steps:.2f}" for name in ways), f"{ratio:.2f}",
                verdict(ratio, target, at_most=True) if target else "",
            ]
        )  # fmt: skip
    return (
        table(["width", "Ens-5, ms a step", "five SM", "five torch.optim", "five torch.optim / Ens-5", "at least 4",
               "five SM / Ens-5", "at least 1.3"], ensembles),
        table(["width", "one seed, ms a step", "three seeds stacked", "ratio", "target"], seeds),
    )  # fmt: skip


def all_in_seeds(arguments: argparse.Namespace) -> list[str]:
    """3 seeds against 1, whole processes."""
    rows = []
    for width, target in ((4, 1.6), (32, 2.4)):
        seconds: dict[int, list[float]] = {1: [], 3: []}
        for _ in range(arguments.repeats_whole):
            for seeds in seconds:
                with tempfile.TemporaryDirectory() as folder:
                    command = [Path(sys.prefix) / "bin" / "alma-vision", "dataset=mnist", "wait=10", f"width={width}",
                               f"data_root={arguments.data_root}", f"epochs={EPOCHS}", f"seeds={seeds}",
                               f"out={folder}/run"]  # fmt: skip
                    before = os.times()
                    subprocess.run(list(map(str, command)), capture_output=True, check=True)
                    after = os.times()
                spent = after.children_user + after.children_system - before.children_user - before.children_system
                seconds[seeds].append(spent)
        ratio = ratio_columns(seconds[3], seconds[1])[1]
        rows.append([width, *(f"{statistics.median(seconds[s]):.1f}" for s in seconds), f"{ratio:.2f}",
                     verdict(ratio, target, at_most=True)])  # fmt: skip
    return table(["width", "one seed, CPU s", "three seeds", "ratio", "target"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--original", help="a checkout of facebookresearch/alma")
    parser.add_argument("--repeats", type=int, default=9, help="of parts that take less than a second")
    parser.add_argument("--repeats-whole", type=int, default=3, help="of whole processes")
    parser.add_argument("--write", action="store_true", help="into benchmarks/vision_peers.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    ensembles, seeds = stacks(arguments)
    lines = [
        "# Speed of alma-vision on MNIST",
        "",
        "Written by `benchmarks/vision_peers.py --write`; not edited.",
        "",
        "MNIST, B = 500, wait 10, SM of two hidden layers of width 32, AdaDelta, batch 128, one thread. CPU seconds of",
        "whole processes, the smallest of the repeats; ratios are medians over neighbours in time.",
        "",
        f"## A slice: 5 stages of {EPOCHS} epochs (at least 10x; 4x against the original)",
        "",
        *whole_runs(5, arguments.repeats_whole, 10.0, arguments),
        "",
        f"## The whole of wait 10: 50 stages of {EPOCHS} epochs (at least 15x; 4x against the original)",
        "",
        *whole_runs(50, 1, 15.0, arguments),
        "",
        "## Ensembles: one stage of wait 10, steps alone, in one process",
        "",
        *ensembles,
        "",
        "## Seeds: one stage of wait 10, steps alone, in one process",
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
