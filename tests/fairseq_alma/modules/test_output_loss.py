import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.modules.output_loss import LOGITS_PER_CHUNK, summed_nll, token_nll

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


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens_per_chunk", [1, 7, 300, 1000])
@torch.inference_mode()
def test_the_loss_of_each_token_does_not_depend_on_the_chunks(monkeypatch, kind, tolerance, tokens_per_chunk):
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", tokens_per_chunk * 1001)
    x, weight, target = torch.randn(300, 16), torch.randn(1001, 16), torch.randint(0, 1001, (300,))
    target[:20] = PAD
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
        nll_T = token_nll(x, weight, target, PAD)
    expected = F.cross_entropy(x.double() @ weight.double().t(), target, ignore_index=PAD, reduction="none")
    assert (nll_T.dtype, nll_T.shape) == (torch.float32, (300,))
    assert (nll_T - expected).abs().max() < tolerance * expected.max()
    assert nll_T[:20].abs().max() == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_no_more_logits_than_one_chunk_exist(monkeypatch, autocast):
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 10 * 1001)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (result if isinstance(result, tuple) else [result]) if torch.is_tensor(t))
            return result

    x, weight, target = torch.randn(100, 4), torch.randn(1001, 4), torch.randint(2, 1001, (100,))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), Sizes():
        token_nll(x, weight, target, PAD)
    assert max(sizes) == 10 * 1001
