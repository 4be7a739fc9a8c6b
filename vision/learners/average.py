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
        prepared: function that is called with each new stack, and returns it.
    """

    def __init__(
        self,
        weights: AverageWeights,
        out: Path,
        backbone: str,
        device: torch.device,
        prepared: Callable[[Stack], Stack],
    ):
        self._weights, self._out, self._file = weights, out, StackFile(backbone)
        self._device, self._prepared = device, prepared
        self._stack: Stack | None = None
        self.count = 0
        """Number of stages whose parameters were averaged so far."""
        self.num_examples = 0
        """Number of examples that each network has processed after the last stage, to finish the average."""

    @property
    def stack(self) -> Stack | None:
        """The averaged networks. None before the first stage. After `load`, the first access reads them from a file."""
        if self._stack is None and self._file.current is not None:
            self._stack = self._prepared(self._file.read(self._device))
        return self._stack

    @property
    def file(self) -> Path | None:
        """File with the averaged networks. None if there is no such file yet."""
        return self._file.current

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the averaged networks to `folder`, and return what `load` needs, for learner.json."""
        if self.stack is None:
            return {}
        path = self._file.write(self.stack, folder / AVERAGED)
        return {"averaged_networks": os.path.relpath(path, self._out), "num_averaged": self.count}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the average that `save` wrote, from the content of learner.json."""
        self._stack, self.count = None, state.get("num_averaged", 0)
        name = state.get("averaged_networks")
        self._file.current = None if name is None else file_of_run(self._out, name)

    def begin_stage(self, trained: Stack) -> None:
        """Take note of the networks that will be trained next. If they have a new shape, begin a new average."""
        if self.stack is None or not have_same_shape(self.stack, trained):
            self._stack, self.count = self._prepared(type(trained).from_state(trained.state(), self._device)), 0
        self._file.current = None  # the average will change in place

    def end_stage(self, trained: Stack, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the parameters after a stage to the average. This sets `num_examples`.

        Then the statistics of batch normalisation are computed for the averaged parameters; those of the trained
        networks do not fit them.

        Args:
            trained: the networks after the stage.
            batches: batches of training examples, as `vision.batches.Batches.epoch` returns them.
        """
        average = self.stack
        assert average is not None, "begin_stage() must be called before end_stage()"
        self.count += 1
        average.parameters.flat.lerp_(trained.parameters.flat, self._weights.weight_of_newest(self.count))
        self._replace_infinite(average, trained)
        if isinstance(average, GatedStack) and isinstance(trained, GatedStack) and trained.gates[0].noise is not None:
            average.set_gate_noise(trained.gates[0].noise)
        self.num_examples = average.recompute_statistics(x for x, _ in islice(batches, STATISTICS_BATCHES))

    @staticmethod
    def _replace_infinite(average: Stack, trained: Stack) -> None:
        """Begin the average of a network again if it is not finite, because the training of the network diverged."""
        tensors = [average.parameters[name].reshape(len(average), -1) for name in average.parameters.shapes]
        is_finite_M = torch.stack([tensor.isfinite().all(1) for tensor in tensors]).all(0)
        if not bool(is_finite_M.all()):
            average.parameters.copy_networks(trained.parameters, ~is_finite_M)


def have_same_shape(first: Stack, second: Stack) -> bool:
    """Return True if the parameters of two stacks have the same names and shapes, and belong to as many networks."""
    is_same = type(first) is type(second) and first.parameters.shapes == second.parameters.shapes
    return is_same and len(first) == len(second)
