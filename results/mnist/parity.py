"""Parity with the original code (facebookresearch/alma), run beside ours on the same partition of MNIST.

    git clone https://github.com/facebookresearch/alma /elsewhere/alma
    pip install --target /elsewhere/extra fvcore
    python results/mnist/parity.py --original /elsewhere/alma --extra /elsewhere/extra --data-root DATA

Both train B / w stages of MNIST (B = 500) with `preset=original_code`: AdaDelta, batch 128, the epoch with the best
validation accuracy kept. Of the original's stages the first few are run; a stage depends on those before it alone.
Writes parity.json and parity.md beside this file. The original is imported from where it lies, in processes of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
LEARNERS = ("sm", "ens", "umix", "gens", "gmoe")
WIDTHS = (4, 32)
NUM_MEGA_BATCHES = 500
PLANS = {2: (5, 100), 10: (4, 20)}
"""wait: (stages, epochs of each). At wait 1 the original's Ens and UMix divide by zero: an epoch is one batch."""


def ours(learner: str, width: int, wait: int, seeds: int, data_root: str, out: Path) -> list[list[float]]:
    """Test error after each of the first stages, seed after seed."""
    sys.path.insert(0, str(HERE.parents[1]))
    from vision.run import run
    from vision.settings import VisionSettings

    num_stages, epochs = PLANS[wait]
    settings = VisionSettings(
        out=str(out / f"ours_{seeds}" / f"{learner}_h{width}_w{wait}"), dataset="mnist", data_root=data_root,
        learner=learner, width=width, wait=wait, epochs=epochs, seeds=seeds, preset="original_code",
        select_by="validation_accuracy", arrivals=num_stages * wait, umix="sum", new_members_from="copy",
        gens_combine="logit", experts=2, split_by="gate_mass",
    )  # fmt: skip
    ledgers = run(settings)
    return [[rows[k * wait].scores.error_rate for k in range(1, num_stages + 1)] for rows in ledgers]


def original(learner: str, width: int, wait: int, seed: int, data_root: str) -> list[float]:
    """Test error after each of the first stages, by the original's own classes (in this process)."""
    from importlib import import_module

    import torch
    from omegaconf import OmegaConf

    num_stages, epochs = PLANS[wait]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    name = {
        "sm": "finetune.Finetune",
        "ens": "k_ensemble.KEnsemble",
        "umix": "agg_ensemble.AggEnsemble",
        "gens": "ensemble.Ensemble",
        "gmoe": "finetune_grow.Finetune_Grow",
    }[learner]
    model = {"class_name": "crlapi.sl.architectures.mlp.MLP", "size_layers": width, "n_layers": 2}
    if learner == "gmoe":
        model |= {"class_name": "crlapi.sl.architectures.mlp.MoE_MLP_UsageGrow", "n_experts": 2, "is_hard": False}
        model["n_experts_to_split"] = 2
    config = OmegaConf.create(
        {
            "k": 5, "vote": False, "init_from_scratch": False, "grow_every": 1,
            "training_batch_size": 128, "training_num_workers": 0,
            "validation_proportion": 0.1, "validation_batch_size": 512, "validation_num_workers": 0,
            "train_replay_proportion": 0.0, "validation_replay_proportion": 0.0,
            "max_epochs": epochs, "device": "cpu", "patience": 100, "patience_delta": 0,
            "optim": {"class_name": "torch.optim.Adadelta", "lr": 1.0}, "model": model, "kornia_augs": None,
        }
    )  # fmt: skip
    streams = import_module("crlapi.sl.streams.mnist")
    train = streams.MNISTTrainAnytimeStream(NUM_MEGA_BATCHES // wait, seed, data_root)
    test = streams.MNISTEvaluationAnytimeStream(1, seed, data_root)[0]
    module, class_name = name.split(".")
    learner_object = getattr(import_module(f"crlapi.sl.clmodels.{module}"), class_name)(train, config)
    errors = []
    for stage in range(num_stages):
        learner_object = learner_object.update(train[stage], _Silent())
        result = learner_object.evaluate(test, _Silent(), {"batch_size": 512, "num_workers": 0, "device": "cpu"})
        errors.append(1 - result["accuracy"])
    return errors


class _Silent:
    """In place of the original's logger."""

    def message(self, *_):
        pass

    debug = add_scalar = message


def compare(ours_errors: list[list[float]], original_errors: list[list[float]]) -> list[dict[str, float]]:
    """Per stage: means, standard errors, and the difference in combined standard errors."""

    def moments(values: list[float]) -> tuple[float, float]:
        mean = sum(values) / len(values)
        return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5

    stages = []
    for a, b in zip(zip(*ours_errors, strict=True), zip(*original_errors, strict=True), strict=True):
        (mean_a, stderr_a), (mean_b, stderr_b) = moments(list(a)), moments(list(b))
        combined = (stderr_a**2 + stderr_b**2) ** 0.5
        stages.append(
            {
                "ours": mean_a, "ours_stderr": stderr_a, "original": mean_b, "original_stderr": stderr_b,
                "combined": combined, "z": (mean_a - mean_b) / combined,
            }
        )  # fmt: skip
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", type=Path, required=True, help="a checkout of facebookresearch/alma")
    parser.add_argument("--extra", type=Path, help="a folder with fvcore, which the original imports")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    parser.add_argument("--seeds", default="3", help="for all learners, or 10,umix=20")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # learner width wait seed: one run of the original
    arguments = parser.parse_args()
    if arguments.one:
        learner, width, wait, seed = arguments.one
        with redirect_stdout(sys.stderr):  # the original prints a lot
            errors = original(learner, int(width), int(wait), int(seed), arguments.data_root)
        print(json.dumps(errors))
        return
    seeds = _seeds(arguments.seeds)
    path = arguments.out / "original.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    paths = [str(path.absolute()) for path in (arguments.original, arguments.extra) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # torchvision names the folder after the class, and the original has one of its own.
    original_data = arguments.out / "original_data"
    original_data.mkdir(exist_ok=True)
    if not (original_data / "CachedMNIST").is_symlink():
        (original_data / "CachedMNIST").symlink_to(Path(arguments.data_root).absolute() / "MNIST")
    keys = (
        f"{learner} {width} {wait} {seed}"
        for learner, width, wait in product(LEARNERS, WIDTHS, PLANS)
        for seed in range(seeds[learner])
    )
    for key in keys:
        if key in known:
            continue
        began = time.monotonic()
        command = [sys.executable, "-W", "ignore", __file__, "--original", str(arguments.original), "--data-root",
                   str(original_data), "--one", *key.split()]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the original failed on {key}:\n{done.stderr[-3000:]}")
        known[key] = json.loads(done.stdout)
        path.write_text(json.dumps(known, indent=1))
        print(f"original {key}: {known[key][-1]:.4f} at the end, {time.monotonic() - began:.0f} s", flush=True)
    table = {}
    for learner, width, wait in product(LEARNERS, WIDTHS, PLANS):
        our_errors = ours(learner, width, wait, seeds[learner], arguments.data_root, arguments.out)
        their_errors = [known[f"{learner} {width} {wait} {seed}"] for seed in range(seeds[learner])]
        table[f"{learner} {width} {wait}"] = compare(our_errors, their_errors)
    (HERE / "parity.json").write_text(json.dumps(table, indent=1) + "\n")
    (HERE / "parity.md").write_text(written_up(table, seeds))
    print((HERE / "parity.md").read_text())


def _seeds(told: str) -> dict[str, int]:
    """How many for each learner: 10,umix=20."""
    common, *others = told.split(",")
    return {learner: int(common) for learner in LEARNERS} | {
        name: int(count) for name, _, count in (one.partition("=") for one in others)
    }


def written_up(table: dict[str, list[dict[str, float]]], seeds: dict[str, int]) -> str:
    """The table and what it says."""
    stages = [stage for row in table.values() for stage in row]
    above = [abs(stage["z"]) for stage in stages if abs(stage["z"]) >= 3]
    lines = [
        "# Parity with the original code on MNIST",
        "",
        "Test error in % (mean +- standard error over seeds), ours with `preset=original_code` against it,",
        "and their difference in combined standard errors (z). B = 500, the first stages. Command: `parity.py`.",
        "",
        "| learner | width | wait | epochs | seeds | stage | ours | original | z |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in table.items():
        learner, width, wait = key.split()
        for number, stage in enumerate(row, start=1):
            lines.append(
                f"| {learner} | {width} | {wait} | {PLANS[int(wait)][1]} | {seeds[learner]} | {number} "
                f"| {100 * stage['ours']:.2f} +- {100 * stage['ours_stderr']:.2f} "
                f"| {100 * stage['original']:.2f} +- {100 * stage['original_stderr']:.2f} | {stage['z']:+.2f} |"
            )
    mean = sum(stage["z"] for stage in stages) / len(stages)
    summary = f"{len(stages)} comparisons, {len(above)} at 3 combined standard errors or more; mean z {mean:+.2f}."
    lines += ["", summary, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
