"""Average the parameters of a stack of networks over stages or updates (`fairseq_alma.core.averaging`).

Shapes: M networks, b examples per batch.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_alma.core.averaging import AverageSettings
from vision.batches import Batches
from vision.checkpoints import read_checkpoint
from vision.learners.files import AVERAGED, NETWORKS, StackFile, file_of_run
from vision.networks import GatedStack, Stack

STATISTICS_BATCHES = 60
"""Largest number of batches from which the statistics of batch normalisation are computed."""


class AveragedPredictor:
    """The stack with which a learner predicts. Its parameters are an average of those of the trained stack.

    If the trained stack changes its shape (a learner that grows), the average begins again.

    Args:
        settings: what is averaged, and with which weights.
        out: folder that contains the folders of the stages.
        backbone: name of the network in the settings of the run.
    """

    def __init__(self, settings: AverageSettings, out: Path, backbone: str):
        self._settings, self._out, self._file, self._backbone = settings, out, StackFile(backbone), backbone
        self._stack: Stack | None = None
        self._read: Callable[[], None] | None = None
        """After `load`: function that reads the networks from their files. A run that continues calls `load` for each
        finished step, and the files of old steps do not exist any more, so they are read when they are needed."""
        self.count = 0
        """Number of parameters that were averaged so far: of stages, or of updates."""
        self.num_examples = 0
        """Number of examples that each network has processed after the last stage, to finish the average."""
        self._window: deque[Tensor] = deque(maxlen=settings.average_window)
        """With `average_window`: the parameters of the last stages."""

    @property
    def stack(self) -> Stack | None:
        """The averaged networks. None before the first stage."""
        if self._read is not None:
            read, self._read = self._read, None
            read()
        return self._stack

    @property
    def of_updates(self) -> bool:
        """Whether the parameters after each update are averaged. Otherwise, those after each stage."""
        return self._settings.average_every == "update"

    @property
    def window(self) -> int:
        """Number of last stages whose parameters are needed, or 0 if the average itself is enough."""
        return self._settings.average_window or 0

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
        self._window.clear()
        if "averaged_networks" not in state:
            return
        self._file.current = file_of_run(self._out, state["averaged_networks"])

        def read() -> None:
            self._stack = prepared(self._file.read(device))
            files = self.window_files(state["stage"])
            if len(files) == self.window:
                files = files[1:]  # it leaves the window with the next stage, and its file may be deleted
            for path in files:
                trained = read_checkpoint(path, device, self._backbone)
                if have_same_shape(trained, self._stack):
                    self._window.append(trained.parameters.flat)

        self._read = read

    def window_files(self, last: int) -> list[Path]:
        """Return the files with the trained networks of the stages that the average still needs, oldest first.

        Without `average_window`, it needs none.

        Args:
            last: index of the last trained stage.
        """
        first = max(1, last + 1 - self.window)
        stages = range(first, last + 1) if self.window else []
        return [self._out / "stages" / f"stage_{index:03d}" / "train" / NETWORKS for index in stages]

    def begin_stage(self, trained: Stack, prepared: Callable[[Stack], Stack], is_new: bool = False) -> None:
        """Take note of the networks that will be trained next. If they have a new shape, begin a new average.

        Args:
            trained: the networks before the stage.
            prepared: function that is called with the networks of a new average, and returns them.
            is_new: whether the networks have new random parameters, so that a new average begins in any case.
        """
        if is_new or self.stack is None or not have_same_shape(self.stack, trained):
            self._read, self._stack, self.count = None, prepared(copy_of(trained)), 0
            self._window.clear()
        self._file.current = None  # the training changes the averaged networks in place

    def add(self, trained: Stack) -> None:
        """Add the current parameters of the trained networks to the average."""
        assert self.stack is not None, "begin_stage() must be called before add()"
        self.count += 1
        average, newest = self.stack.parameters.flat, trained.parameters.flat
        if self.window:
            self._window.append(newest.clone())
            average.copy_(torch.stack(tuple(self._window)).mean(0))
        else:
            average.lerp_(newest, self._settings.weight_of_newest(self.count))

    def end_stage(self, trained: Stack, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Finish the predictor after a stage. This sets `num_examples`.

        If the average is one over stages, the stage is added. Then the statistics of batch normalisation are computed
        for the averaged parameters; those of the trained networks do not fit them.

        Args:
            trained: the networks after the stage.
            batches: batches of training examples, as `vision.batches.Batches.epoch` returns them.
        """
        if not self.of_updates:
            self.add(trained)
        assert self.stack is not None
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
        """Begin the average of a network again if it is not finite, because the training of the network diverged.

        The trained network has then the parameters from before the stage (see `train_stage`).
        """
        tensors = [average.parameters[name].flatten(1) for name in average.parameters.shapes]
        is_finite_M = torch.stack([tensor.isfinite().all(1) for tensor in tensors]).all(0)
        if not bool(is_finite_M.all()):
            average.parameters.copy_networks(trained.parameters, ~is_finite_M)


@contextmanager
def average_of(
    average: AveragedPredictor | None,
    trained: Stack,
    batches: Batches,
    prepared: Callable[[Stack], Stack],
    is_new: bool,
) -> Iterator[Callable[[], None] | None]:
    """Average the networks that are trained in the `with` block.

    Args:
        average: the average; None for no average.
        trained: the networks.
        batches: the batches of the stage.
        prepared, is_new: see `AveragedPredictor.begin_stage`.

    Yields:
        The function that must be called after each update; None if there is nothing to do.
    """
    if average is None:
        yield None
        return
    average.begin_stage(trained, prepared, is_new)
    yield partial(average.add, trained) if average.of_updates else None
    average.end_stage(trained, batches.epoch())


def copy_of(stack: Stack) -> Stack:
    """Return a stack with copies of all tensors of `stack`, on the same device."""
    return type(stack).from_state(stack.state(), stack.parameters.device)


def have_same_shape(first: Stack, second: Stack) -> bool:
    """Return True if the parameters of two stacks have the same names and shapes, and belong to as many networks."""
    return (
        type(first) is type(second)
        and first.parameters.shapes == second.parameters.shapes
        and len(first) == len(second)
    )
