import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.lm.compilation import cost_so_far
from fairseq_alma.modules import output_loss
from fairseq_alma.modules.output_loss import summed_nll, token_nll

PAD = 1
NUM_TOKENS, DIM, NUM_WORDS = 300, 16, 1001


@pytest.fixture(autouse=True)
def chunks_that_do_not_divide_the_tokens(monkeypatch):
    monkeypatch.setattr(output_loss, "TOKENS_PER_CHUNK", {"cpu": 128})
    monkeypatch.setattr(output_loss, "LOGITS_PER_CHUNK", {"cpu": 50 * NUM_WORDS})


def draw(kind=torch.float32):
    x, weight = (torch.randn(rows, DIM).to(kind).requires_grad_() for rows in (NUM_TOKENS, NUM_WORDS))
    target = torch.randint(0, NUM_WORDS, (NUM_TOKENS,))
    target[:20] = target[-7:] = PAD
    return x, weight, target


def float64_steps(x, weight, target):
    """Return the loss in float64 and the gradients of x and weight."""
    x, weight = (p.detach().double().requires_grad_() for p in (x, weight))
    loss = F.cross_entropy(x @ weight.t(), target, ignore_index=PAD, reduction="sum")
    loss.backward()
    return loss.item(), (x.grad, weight.grad)


# Logits reach 16, where bfloat16 rounds to multiples of 1/8: a probability can be wrong by 1/16.
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1 / 16)])
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_equal_the_plain_steps(kind, tolerance, autocast):
    x, weight, target = draw(torch.float32 if autocast else kind)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and kind == torch.bfloat16):
        loss = summed_nll(x, weight, target, PAD)
    loss.backward()
    expected, gradients = float64_steps(x, weight, target)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=min(tolerance, 1e-3))
    for p, gradient in zip((x, weight), gradients, strict=True):
        assert p.grad.dtype == p.dtype
        assert (p.grad - gradient).abs().max() < tolerance * gradient.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_compiled_loss_and_gradients_are_the_same_but_for_rounding(kind):
    found, before = [], cost_so_far()[0]
    for compiled in (False, True):
        torch.manual_seed(3)
        x, weight, target = draw(kind)
        loss = summed_nll(x, weight, target, PAD, compiled=compiled)
        loss.backward()
        found.append((loss.detach(), x.grad, weight.grad))
    assert cost_so_far()[0] > before
    tolerance = 1e-5 if kind == torch.float32 else 1e-2
    for plain, compiled in zip(*found, strict=True):
        assert (plain - compiled).abs().max() <= tolerance * plain.abs().max()
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)


def test_the_sum_is_exact_for_the_logits_that_bfloat16_gives():
    x, weight, target = draw(torch.bfloat16)
    logits = (x @ weight.t()).detach().double()
    expected = F.cross_entropy(logits, target, ignore_index=PAD, reduction="sum").item()
    assert summed_nll(x, weight, target, PAD).item() == pytest.approx(expected, rel=1e-5)


def test_without_a_gradient_the_loss_is_the_same():
    x, weight, target = draw()
    with torch.no_grad():
        nll = summed_nll(x, weight, target, PAD)
    torch.testing.assert_close(nll, summed_nll(x, weight, target, PAD).detach())


def test_a_weight_that_is_used_twice_gets_both_gradients_and_a_factor_scales_them():
    x, weight, target = draw()
    loss = summed_nll(x, weight, target, PAD) + 3 * summed_nll(x * 2, weight, target, PAD) + weight.square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    loss.backward()
    x_64, weight_64 = (p.detach().double().requires_grad_() for p in (x, weight))
    nll = [F.cross_entropy(f * x_64 @ weight_64.t(), target, ignore_index=PAD, reduction="sum") for f in (1, 2)]
    (nll[0] + 3 * nll[1] + weight_64.square().sum()).backward()
    for p, first, p_64 in zip((x, weight), once, (x_64, weight_64), strict=True):
        torch.testing.assert_close(first.double(), p_64.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(p.grad, 2 * first)


class LargestTensors(TorchDispatchMode):
    """Records the largest number of elements that any operation returns, by type."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, torch.Tensor):
                self.largest[t.dtype] = max(self.largest.get(t.dtype, 0), t.numel())
        return result


def test_the_logits_of_all_tokens_are_never_stored():
    x, weight, target = draw()
    with LargestTensors() as seen, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        token_nll(x, weight, target, PAD)
    assert seen.largest[torch.bfloat16] == 128 * NUM_WORDS
    assert seen.largest[torch.float32] == 50 * NUM_WORDS
    with LargestTensors() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        summed_nll(x, weight, target, PAD).backward()
    assert seen.largest[torch.bfloat16] == 128 * NUM_WORDS
    assert seen.largest[torch.float32] == 50 * NUM_WORDS  # more than the weights, 16 * NUM_WORDS


def test_nothing_but_padding_has_no_loss():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss = summed_nll(x, weight, torch.full((4,), -100), -100)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_no_token_has_no_loss():
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss = summed_nll(x, weight, torch.zeros(0, dtype=torch.long), PAD)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.abs().sum() == 0


# Logits reach 16, where bfloat16 rounds to multiples of 1/8: a probability can be wrong by 1/16.
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1 / 16)])
@pytest.mark.parametrize("tokens_per_chunk", [1, 7, 300, 1000])
@torch.inference_mode()
def test_the_loss_of_each_token_does_not_depend_on_the_chunks(monkeypatch, kind, tolerance, tokens_per_chunk):
    monkeypatch.setitem(output_loss.LOGITS_PER_CHUNK, "cpu", tokens_per_chunk * 1001)
    x, weight, target = torch.randn(300, 16), torch.randn(1001, 16), torch.randint(0, 1001, (300,))
    target[:20] = PAD
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
        nll_T = token_nll(x, weight, target, PAD)
    expected = F.cross_entropy(x.double() @ weight.double().t(), target, ignore_index=PAD, reduction="none")
    assert (nll_T.dtype, nll_T.shape) == (torch.float32, (300,))
    assert (nll_T - expected).abs().max() < tolerance * expected.max()
    assert nll_T[:20].abs().max() == 0
