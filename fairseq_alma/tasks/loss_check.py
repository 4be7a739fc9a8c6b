"""Check that losses are finite, without making the host wait for the device."""

from collections import deque

import torch
from torch import Tensor

MAX_WAITING = 16
"""Maximum number of losses that are being copied to the host and are not checked yet.

If there are more, `LossCheck.add` waits until the oldest loss has arrived, and checks it."""


class LossCheck:
    """Checks that each loss of a training is finite.

    A loss on a CPU is checked at once. Reading a loss from a CUDA device would make the host wait for all work that
    it has queued. Therefore the loss is copied to the host in the background, and checked when the copy has arrived:
    usually one update later, and at the latest in `finish`.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, loss: Tensor, update: int) -> None:
        """Add a loss, a scalar, and check all losses that have arrived at the host. One on a CPU is checked at once.

        If a checked loss is not finite, raise a FloatingPointError that names its update.
        """
        loss, arrived = loss.detach(), None
        if loss.device.type == "cuda":
            on_host = torch.empty_like(loss, device="cpu", pin_memory=True)
            on_host.copy_(loss, non_blocking=True)
            loss, arrived = on_host, torch.cuda.Event()
            arrived.record()
        self._waiting.append((update, loss, arrived))
        while self._waiting and (len(self._waiting) > MAX_WAITING or _has_arrived(self._waiting[0][2])):
            self._check_oldest()

    def finish(self) -> None:
        """Check all losses that are not checked yet, when they have arrived at the host. For the error, see `add`."""
        while self._waiting:
            self._check_oldest()

    def _check_oldest(self) -> None:
        update, loss, arrived = self._waiting.popleft()
        if arrived is not None:
            arrived.synchronize()
        if not torch.isfinite(loss):
            # Discard the losses that are not checked yet. While fairseq handles the error that is raised here, it may
            # call the task again, and the task calls `finish`. `finish` would then raise a second error.
            self._waiting.clear()
            raise FloatingPointError(
                f"the loss is {loss.item()} at update {update}: lower the learning rate, lengthen the warm-up or clip "
                f"the gradient (--clip-norm). Earlier checkpoints are not affected."
            )


def _has_arrived(event: torch.cuda.Event | None) -> bool:
    """Return True if the copy of a loss has arrived at the host, or if it needed no copy, and so has no event."""
    return event is None or event.query()
