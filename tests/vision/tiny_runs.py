"""Runs on scikit-learn's digits that take tenths of a second, and their expected counts, computed by hand.

The 1438 training images are cut into B = 4 mega-batches of 360, 360, 359 and 359 images. A tenth of each, rounded down,
is its validation data: 36, 36, 35 and 35 images. The other 324 images of each mega-batch are its training data. They
make 6 batches of at most 64 examples, so 3 epochs have 18 updates.
"""

import json
from pathlib import Path

import torch

from fairseq_alma.core.catalogue import takes
from fairseq_alma.core.ledger import LedgerRow
from vision.checkpoints import read_checkpoint
from vision.datasets import Dataset
from vision.networks import Stack
from vision.runs import run_learner
from vision.settings import VisionSettings

B = 4
EPOCHS = 3
TRAINED_ON = 324
VALIDATED_ON = (36, 36, 35, 35)
UPDATES = 18
TESTED_ON = 359

SMALL = {
    "dataset": "digits", "mega_batches": B, "width": 8, "epochs": EPOCHS, "batch_size": 64, "device": "cpu",
    
}  # fmt: skip
PARAMS = 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
"""Number of parameters of a multilayer perceptron (MLP) with 64 inputs, two hidden layers of 8 units and 10 classes."""
FORWARD = 2 * (64 * 8 + 8 * 8 + 8 * 10)
"""FLOPs of a forward pass of this MLP for one example."""
TRAINING = 3 * FORWARD - 2 * 64 * 8
"""FLOPs of an update of this MLP for one example. The backward pass takes twice as many FLOPs as the forward pass,
except that the input needs no gradient."""


def small_settings(out: Path, **changes) -> VisionSettings:
    """Return the settings of a small run in the folder `out`, with some settings changed."""
    return VisionSettings.from_mapping({"out": str(out), **SMALL, **changes})


def taken(learner: str, **values) -> dict:
    """Return the settings among `values` that a learner accepts, with `learner` set to its name."""
    return {"learner": learner, **{name: value for name, value in values.items() if takes("vision", learner, name)}}


def small_run(out: Path, given: Dataset | None = None, **changes) -> list[list[LedgerRow]]:
    """Run a small run and return the ledger of each seed. `given` is the dataset; by default it is digits."""
    return run_learner(small_settings(out, **changes), given)


def as_arguments(**changes) -> list[str]:
    """Return the settings of a small run as command-line arguments KEY=VALUE, with some settings changed."""
    return [f"{key}={value}" for key, value in {**SMALL, **changes}.items()]


def ledger(folder: Path) -> list[str]:
    """Return the lines of a run's ledger without the durations, which differ between equal runs."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [json.dumps({key: v for key, v in row.items() if not key.endswith("_seconds")}) for row in rows]


def summary(folder: Path) -> dict:
    """Return the content of a run's summary.json."""
    return json.loads((folder / "summary.json").read_text())


def networks(out: Path, stage: int, step: str = "train") -> Stack:
    """Read the networks that a step of a stage wrote."""
    return read_checkpoint(out / "stages" / f"stage_{stage:03d}" / step / "networks.pt", torch.device("cpu"))


def flat(stack: Stack) -> torch.Tensor:
    """Return all parameters of a stack as one flat tensor."""
    return stack.parameters.flat


def mixture_params(num_experts: int, num_branches: int) -> int:
    """Return the number of parameters of an MLP like that of PARAMS whose two hidden layers are mixtures.

    Args:
        num_experts: number of experts in each mixture.
        num_branches: number of branches of all gates in each mixture.
    """
    return (64 + 1) * (8 * num_experts + num_branches) + (8 + 1) * (8 * num_experts + num_branches) + (8 + 1) * 10


def mixture_training_flops(num_experts: int, num_branches: int) -> int:
    """Return the FLOPs of an update for one example, as TRAINING, for the MLP of `mixture_params`."""
    first, second = 2 * 64 * (8 * num_experts + num_branches), 2 * 8 * (8 * num_experts + num_branches)
    return 3 * (first + second + 2 * 8 * 10) - first
