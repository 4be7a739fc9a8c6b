import math

import pytest
import torch

from fairseq_alma.tasks import loss_check
from fairseq_alma.tasks.loss_check import LossCheck


def test_a_loss_on_the_cpu_is_checked_at_once():
    check = LossCheck()
    check.add(torch.tensor(3.0), 1)
    for loss in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match=f"the loss is {loss} at update 2"):
            check.add(torch.tensor(loss), 2)
    check.finish()  # a loss is reported once


class Event:
    """The end of a copy from a device that takes its time."""

    done = False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


def late(check, losses):
    """Add losses as if they were on a device, and return their events."""
    events = [Event() for _ in losses]
    for update, (loss, event) in enumerate(zip(losses, events, strict=True), start=1):
        check._waiting.append((update, torch.tensor(loss), event))
    return events


def test_a_late_loss_is_found_when_its_copy_arrives():
    check = LossCheck()
    events = late(check, [1.0, math.nan])
    events[0].done = True
    check.add(torch.tensor(1.0), 3)
    events[1].done = True
    with pytest.raises(FloatingPointError, match="update 2"):
        check.add(torch.tensor(1.0), 4)


def test_the_end_waits_for_all_losses():
    check = LossCheck()
    late(check, [1.0, 1.0, math.inf])
    with pytest.raises(FloatingPointError, match="update 3"):
        check.finish()


def test_only_so_many_losses_wait(monkeypatch):
    monkeypatch.setattr(loss_check, "MAX_WAITING", 2)
    check = LossCheck()
    late(check, [math.nan, 1.0])
    with pytest.raises(FloatingPointError, match="update 1"):
        check.add(torch.tensor(1.0), 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu")
def test_a_loss_on_a_cuda_device_is_found_without_a_wait():
    check = LossCheck()
    loss = torch.tensor(math.nan, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(FloatingPointError, match="update 1"):
            check.add(loss, 1)
            check.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
