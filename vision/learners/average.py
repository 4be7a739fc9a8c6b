"""Average the parameters of a stack of networks over stages (`fairseq_alma.core.averaging`).

Shapes: M networks, b examples per batch.
"""

import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_alma.core.averaging import AverageWeights
from vision.learners.files import AVERAGED, StackFile, file_of_run
from vision.networks import GatedStack, Stack

STATISTICS_BATCHES = 60
"""Largest number of batches from which the statistics of batch normalisation are computed."""


class AveragedPredictor:
    """The stack with which a learner predicts. Its parameters are an average of those of the trained stack.

    If the trained stack changes its shape (a learner that grows), the average begins again.

    Args:
        weights: the weights of the average.
        out: folder that contains the folders of the stages.
        backbone: name of the network in the settings of the run.
    """

    def __init__(self, weights: AverageWeights, out: Path, backbone: str):
        self._weights, self._out, self._file = weights, out, StackFile(backbone)
        self._stack: Stack | None = None
        self._read: Callable[[], None] | None = None
        """After `load`: function that reads the networks from their files. A run that continues calls `load` for each
        finished step, and the files of old steps do not exist any more, so they are read when they are needed."""
        self.count = 0
        """Number of stages whose parameters were averaged so far."""
        self.num_examples = 0
        """Number of examples that each network has processed after the last stage, to finish the average."""

    @property
    def stack(self) -> Stack | None:
        """The averaged networks. None before the first stage."""
        if self._read is not None:
            read, self._read = self._read, None
            read()
        return self._stack

    @property
    def file(self) -> Path | None:
        """File with the averaged networks. None if there is no such file yet."""
        return self._file.current

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the averaged networks to `folder`, and return what `load` needs, for learner.json."""
        if self.stack is None:
            return {}
        self._file.write(self.stack, folder / AVERAGED)
        assert self.file is not None
        return {"averaged_networks": os.path.relpath(self.file, self._out), "num_averaged": self.count}

    def load(self, state: dict[str, Any], device: torch.device, prepared: Callable[[Stack], Stack]) -> None:
        """Restore the average that `save` wrote.

        Args:
            state: the content of learner.json.
            device: device on which the networks are placed.
            prepared: function that is called with each network stack that was read, and returns it.
        """
        self._stack, self._read, self.count = None, None, state.get("num_averaged", 0)
        if "averaged_networks" not in state:
            return
        self._file.current = file_of_run(self._out, state["averaged_networks"])

        def read() -> None:
            self._stack = prepared(self._file.read(device))

        self._read = read

    def begin_stage(self, trained: Stack, prepared: Callable[[Stack], Stack]) -> None:
        """Take note of the networks that will be trained next. If they have a new shape, begin a new average.

        Args:
            trained: the networks before the stage.
            prepared: function that is called with the networks of a new average, and returns them.
        """
        if self.stack is None or not have_same_shape(self.stack, trained):
            self._stack, self.count = prepared(type(trained).from_state(trained.state(), trained.parameters.device)), 0
        self._file.current = None  # the average will change in place

    def end_stage(self, trained: Stack, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the parameters after a stage to the average. This sets `num_examples`.

        Then the statistics of batch normalisation are computed for the averaged parameters; those of the trained
        networks do not fit them.

        Args:
            trained: the networks after the stage.
            batches: batches of training examples, as `vision.batches.Batches.epoch` returns them.
        """
        assert self.stack is not None, "begin_stage() must be called before end_stage()"
        self.count += 1
        self.stack.parameters.flat.lerp_(trained.parameters.flat, self._weights.weight_of_newest(self.count))
        self._replace_infinite(self.stack, trained)
        if (
            isinstance(self.stack, GatedStack)
            and isinstance(trained, GatedStack)
            and trained.gates[0].noise is not None
        ):
            self.stack.set_gate_noise(trained.gates[0].noise)
        self.num_examples = self.stack.recompute_statistics(x for x, _ in islice(batches, STATISTICS_BATCHES))
        self.stack.free_activations()

    @staticmethod
    def _replace_infinite(average: Stack, trained: Stack) -> None:
        """Begin the average of a network again if it is not finite, because the training of the network diverged."""
        tensors = [average.parameters[name].flatten(1) for name in average.parameters.shapes]
        is_finite_M = torch.stack([tensor.isfinite().all(1) for tensor in tensors]).all(0)
        if not bool(is_finite_M.all()):
            average.parameters.copy_networks(trained.parameters, ~is_finite_M)


def have_same_shape(first: Stack, second: Stack) -> bool:
    """Return True if the parameters of two stacks have the same names and shapes, and belong to as many networks."""
    return (
        type(first) is type(second)
        and first.parameters.shapes == second.parameters.shapes
        and len(first) == len(second)
    )
