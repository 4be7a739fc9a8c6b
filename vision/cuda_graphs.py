"""Record the training steps of networks as CUDA graphs.

A training step of a small network is hundreds of short operations. A GPU computes each of them faster than Python can
start the next one. A CUDA graph is a recording of such operations that the GPU starts as one. It records side-by-side
streams (`vision.networks.module_stack`), too.
"""

from typing import Literal

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from vision.networks import GatedStack, ModuleStack, Stack
from vision.networks.stack import LossGradient

WARM_UPS = 3
"""Number of steps before a graph is recorded, in which libraries allocate their memory and choose their kernels."""

RECORDABLE = ("vgg", "resnet20")
"""Names of the backbones whose training steps are known to be recordable. Other networks may read values of the GPU."""
MIN_UPDATES = 100
"""With cuda_graphs=auto, steps are recorded in stages of at least this many updates.

Recording a graph needs the time of WARM_UPS + 1 steps, for each of at most two shapes of a batch."""


def are_used(setting: Literal["auto"] | bool, stack: Stack, num_updates: int, device: torch.device) -> bool:
    """Return whether the training steps of a stage are recorded. The same settings always give the same answer.

    Args:
        setting: the setting `cuda_graphs`.
        stack: the networks to train.
        num_updates: number of updates of the stage.
        device: the device that trains them.
    """
    if setting != "auto":
        return setting
    return (
        device.type == "cuda"
        and isinstance(stack, ModuleStack)
        and stack.structure.backbone in RECORDABLE
        and not _has_hard_gates(stack)
        and num_updates >= MIN_UPDATES
    )


def _has_hard_gates(stack: Stack) -> bool:
    return isinstance(stack, GatedStack) and stack.gates[0].hard


class GraphedGradient:
    """Computes `Stack.compute_gradient` by CUDA graphs, one for each shape of a batch.

    The first call with a new shape records a graph. Later calls copy the batch to the tensors that the graph reads,
    and start the graph. A graph reads and writes the stack's own tensors, so the stack must keep its structure.

    Raise SettingError if the stack, whose tensors are on a GPU, has hard gates.
    """

    def __init__(self, stack: Stack):
        assert isinstance(stack, ModuleStack)  # the settings allow no other
        if _has_hard_gates(stack):
            raise SettingError(
                "cuda_graphs=true cannot be used with hard gates, because their random numbers are drawn on the CPU in "
                "each training step: give cuda_graphs=false"
            )
        self._stack = stack
        self._recorded: dict[tuple[torch.Size, torch.Size], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, one_hot_UbC: Tensor, loss: LossGradient, unit: int) -> None:
        """See `Stack.compute_gradient`. `loss` and `unit` must be the same in each call.

        Raise SettingError if the step cannot be recorded as a graph.
        """
        key = (x.shape, one_hot_UbC.shape)
        if key not in self._recorded:
            try:
                self._recorded[key] = self._record(x.clone(), one_hot_UbC.clone(), loss, unit)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise SettingError(
                    f"cuda_graphs=true: a training step of this network cannot be recorded as a CUDA graph, because it "
                    f"copies values to the CPU or replaces its buffers ({error}): give cuda_graphs=false"
                ) from error
        graph, x_read, one_hot_read = self._recorded[key]
        x_read.copy_(x)
        one_hot_read.copy_(one_hot_UbC)
        graph.replay()

    def _record(
        self, x: Tensor, one_hot_UbC: Tensor, loss: LossGradient, unit: int
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Return a graph of a step, and the two tensors that it reads."""
        # A warm-up changes the running statistics of batch normalisation and the random state. Restore both, so that
        # the results do not depend on how often a graph is recorded.
        before = [tensors.flat.clone() for tensors in self._stack.tensors]
        random_state = torch.cuda.get_rng_state(x.device)
        current, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._stack.compute_gradient(x, one_hot_UbC, loss, unit)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(x.device), torch.cuda.graph(graph, stream=torch.cuda.Stream(x.device)):
            self._stack.compute_gradient(x, one_hot_UbC, loss, unit)
        if self._stack.has_replaced_buffers:
            raise RuntimeError("a buffer was replaced by a new tensor")
        for tensors, flat in zip(self._stack.tensors, before, strict=True):
            tensors.flat.copy_(flat)
        torch.cuda.set_rng_state(random_state, x.device)
        return graph, x, one_hot_UbC
