"""Faster training steps on a GPU: networks in side-by-side streams, and steps that are recorded as CUDA graphs.

A training step of a small network is hundreds of short operations. A GPU computes each of them faster than Python can
start the next one. A CUDA graph is a recording of such operations that the GPU starts as one (`GraphedGradient`).
Networks that do not depend on each other are computed at the same time if they are in different streams
(`SideStreams`); a graph records the streams, too.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from vision.networks.stack import LossGradient, Stack

NUM_STREAMS = 4
"""Number of networks that a GPU computes at the same time. Their activations are in memory at the same time."""
WARM_UPS = 3
"""Number of steps before a graph is recorded, in which libraries allocate their memory and choose their kernels."""


class SideStreams:
    """Lets a GPU compute independent parts of a step at the same time. On a CPU, it changes nothing.

    Args:
        device: the device that computes.
        num_parts: number of parts. A single part is computed in the current stream.
    """

    def __init__(self, device: torch.device, num_parts: int):
        is_used = device.type == "cuda" and num_parts > 1
        self._streams = _streams(device)[:num_parts] if is_used else []

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Let the streams wait for the operations before this context; let later operations wait for the streams."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        yield
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def of_part(self, number: int) -> AbstractContextManager[object]:
        """Return a context in which the operations of one part are started, inside of `forked`."""
        return torch.cuda.stream(self._streams[number % len(self._streams)]) if self._streams else nullcontext()


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the same streams in each call, because each new stream would reserve memory of its own."""
    return [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)]


class GraphedGradient:
    """Computes `Stack.compute_gradient` by CUDA graphs, one for each shape of a batch.

    The first call with a new shape records a graph. Later calls copy the batch to the tensors that the graph reads,
    and start the graph. A graph reads and writes the stack's own tensors, so the stack must keep its structure.

    Args:
        stack: the networks. Their tensors are on a GPU.

    Raises:
        SettingError: if the stack has hard gates.
    """

    def __init__(self, stack: Stack):
        if not stack.can_be_graphed:
            raise SettingError(
                "cuda_graphs=true cannot be used with hard gates, because their random numbers are drawn on the CPU in "
                "each training step: give cuda_graphs=false"
            )
        self._stack = stack
        self._recorded: dict[tuple[torch.Size, torch.Size], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, one_hot_UbC: Tensor, loss: LossGradient, unit: int) -> None:
        """See `Stack.compute_gradient`. `loss` and `unit` must be the same in each call.

        Raises:
            SettingError: if the step cannot be recorded as a graph.
        """
        key = (x.shape, one_hot_UbC.shape)
        if key not in self._recorded:
            try:
                self._recorded[key] = self._record(x.clone(), one_hot_UbC.clone(), loss, unit)
            except RuntimeError as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
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
        with torch.cuda.graph(graph):
            self._stack.compute_gradient(x, one_hot_UbC, loss, unit)
        if self._stack.has_replaced_buffers:
            raise RuntimeError("a buffer was replaced by a new tensor")
        for tensors, flat in zip(self._stack.tensors, before, strict=True):
            tensors.flat.copy_(flat)
        torch.cuda.set_rng_state(random_state, x.device)
        return graph, x, one_hot_UbC
