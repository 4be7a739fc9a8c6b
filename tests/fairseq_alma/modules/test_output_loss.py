import pytest
import torch
from torch.nn import functional as F

from fairseq_alma.modules.output_loss import summed_nll

PAD = 1


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients_equal_the_plain_steps(kind, tolerance):
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 16, generator=random).to(kind).requires_grad_() for rows in (300, 1001))
    target = torch.randint(0, 1001, (300,), generator=random)
    target[:20] = PAD
    loss = summed_nll(x, weight, target, PAD)
    loss.backward()
    gradients = [p.grad.float() for p in (x, weight)]
    x_64, weight_64 = (p.detach().double().requires_grad_() for p in (x, weight))
    expected = F.cross_entropy(F.linear(x_64, weight_64)[20:], target[20:], reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=min(tolerance, 1e-3))
    for gradient, expected_gradient in zip(gradients, (x_64.grad, weight_64.grad), strict=True):
        assert (gradient - expected_gradient).abs().max() < tolerance * expected_gradient.abs().max()


def test_nothing_but_padding_has_no_loss():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss = summed_nll(x, weight, torch.full((4,), PAD), PAD)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_under_autocast_the_sum_stays_float32():
    x, weight = torch.randn(64, 8), torch.randn(200, 8)
    target = torch.randint(2, 200, (64,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_nll(x, weight, target, PAD)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(x @ weight.t(), target, reduction="sum").item(), rel=1e-2)
