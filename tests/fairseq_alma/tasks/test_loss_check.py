import math

import pytest
import torch

from fairseq_alma.tasks.loss_check import LossCheck


def test_a_loss_on_the_cpu_is_checked_at_once():
    check = LossCheck()
    check.add(torch.tensor(3.0), 1)
    for loss in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match=f"the loss is {loss} at update 2"):
            check.add(torch.tensor(loss), 2)
    check.finish()  # a loss is reported once


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
