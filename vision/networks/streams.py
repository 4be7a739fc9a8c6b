"""Compute networks that do not depend on each other at the same time on a GPU, in side-by-side streams."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch

NUM_STREAMS = 4
"""Number of networks that a GPU computes at the same time. Their activations are in memory at the same time."""


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
