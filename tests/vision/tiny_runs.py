"""Runs on scikit-learn's digits that take tenths of a second, and what can be said of them by hand.

B = 4 mega-batches of 360, 360, 359 and 359 of the 1438 training images; a tenth of each, rounded down, is its
validation data: 36, 36, 35 and 35. So 324 are left to train on in each: 6 batches of 64, and 18 updates in 3 epochs.
"""

import json
from pathlib import Path

import torch

from fairseq_alma.core.catalogue import takes
from fairseq_alma.core.ledger import LedgerRow
from vision.checkpoints import read_checkpoint
from vision.datasets import Dataset
from vision.networks import Stack
from vision.run import run
from vision.settings import VisionSettings

B = 4
EPOCHS = 3
TRAINED_ON = 324
VALIDATED_ON = (36, 36, 35, 35)
UPDATES = 18
TESTED_ON = 359

SMALL = {
    "dataset": "digits", "mega_batches": B, "width": 8, "epochs": EPOCHS, "batch_size": 64, "device": "cpu",
    "routing_examples": 20,
}  # fmt: skip
PARAMS = 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
"""Of a perceptron 64-8-8-10."""
FORWARD = 2 * (64 * 8 + 8 * 8 + 8 * 10)
TRAINING = 3 * FORWARD - 2 * 64 * 8
"""FLOPs of an update with one example: backward costs twice as much, but the input needs no gradient."""


def small_settings(out: Path, **changes) -> VisionSettings:
    return VisionSettings.from_mapping({"out": str(out), **SMALL, **changes})


def taken(learner: str, **values) -> dict:
    """Of these settings, those that mean something to a learner, and its name."""
    return {"learner": learner, **{name: value for name, value in values.items() if takes("vision", learner, name)}}


def small_run(out: Path, given: Dataset | None = None, **changes) -> list[list[LedgerRow]]:
    """The ledgers, one a seed."""
    return run(small_settings(out, **changes), given)


def as_arguments(**changes) -> list[str]:
    """The settings of a small run as a user types them."""
    return [f"{key}={value}" for key, value in {**SMALL, **changes}.items()]


def ledger(folder: Path) -> list[str]:
    """Its lines, without what may differ between equal runs."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [json.dumps({key: v for key, v in row.items() if not key.endswith("_seconds")}) for row in rows]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def networks(out: Path, stage: int, step: str = "train") -> Stack:
    """What a step left on disk."""
    return read_checkpoint(out / "stages" / f"stage_{stage:03d}" / step / "networks.pt", torch.device("cpu"))


def flat(stack: Stack) -> torch.Tensor:
    """All parameters."""
    return stack.parameters.flat


def mixture_params(num_experts: int, num_branches: int) -> int:
    """Of a perceptron 64-8-8-10 whose two hidden layers have so many experts, and gates of so many branches."""
    return (64 + 1) * (8 * num_experts + num_branches) + (8 + 1) * (8 * num_experts + num_branches) + (8 + 1) * 10


def mixture_training_flops(num_experts: int, num_branches: int) -> int:
    """As TRAINING."""
    first, second = 2 * 64 * (8 * num_experts + num_branches), 2 * 8 * (8 * num_experts + num_branches)
    return 3 * (first + second + 2 * 8 * 10) - first
