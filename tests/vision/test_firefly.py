"""Firefly: what a growth leaves unchanged, its scores, and which candidates are added. In double precision."""

from dataclasses import replace
from itertools import chain as concatenated

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError
from tests.vision.networks.vggs import vgg as small_vgg
from vision.firefly.chain import chain_from_stack, stack_from_chain
from vision.firefly.width import (
    NUM_CANDIDATES,
    WidthCandidates,
    count_by_num_params,
    count_by_width_ratio,
    grow_width,
    rank,
)
from vision.networks import MixtureStack, MLPStack, ModuleStack, Structure
from vision.seeds import generator

CPU = torch.device("cpu")
K = 4
WIDTHS = (3, 5, 4, 6, 3, 4)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def vgg():
    """Return a small VGG whose norms differ from those of an untrained network."""
    stack = small_vgg(widths=WIDTHS, draw=[generator(0)])
    noise = generator("norms")
    for name in stack.parameters.shapes:
        if ".norm_" in name:
            stack.parameters[name].add_(0.3 * torch.randn(stack.parameters[name].shape, generator=noise))
    for number in range(3):
        stack.logits(torch.randn(1, 20, 32, 32, 3, generator=generator(number)), training=True)
    return stack


def perceptron():
    return MLPStack.initialised((12, 6, 5, 10), [generator(0)], CPU)


STACKS = {"vgg": vgg, "perceptron": perceptron}
KINDS = pytest.mark.parametrize("kind", STACKS)


def batches_for(kind, count=3, size=8):
    """Return a batch source with the same batches in every epoch."""
    shape = (3, 32, 32) if kind == "vgg" else (12,)
    numbers = generator("batches")
    batches = [(torch.randn(size, *shape, generator=numbers), torch.randint(10, (size,), generator=numbers))
               for _ in range(count)]  # fmt: skip
    return lambda: batches


def candidates_of(chain):
    noise = generator("noise")
    return WidthCandidates(
        chain, K, lambda shape: torch.rand(shape, generator=noise), lambda shape: torch.randn(shape, generator=noise)
    )


def everything(chain):
    return [torch.arange(width) for width in chain.widths], [torch.arange(K) for _ in chain.widths]


def nothing(chain):
    return [[torch.empty(0, dtype=torch.long) for _ in chain.widths] for _ in range(2)]


@KINDS
def test_a_chain_computes_what_its_stack_does(kind):
    stack = STACKS[kind]()
    chain, (x, _) = chain_from_stack(stack), batches_for(kind)()[0]
    ours = x.movedim(1, -1) if kind == "vgg" else x
    torch.testing.assert_close(chain.logits(x), stack.logits(ours[None])[0])
    again = stack_from_chain(chain, stack)
    assert type(again) is type(stack)
    assert again.state().keys() == stack.state().keys()
    assert torch.equal(again.logits(ours[None]), stack.logits(ours[None]))
    assert chain.num_params() == stack.num_params


def test_mixtures_do_not_grow_by_firefly():
    with pytest.raises(SettingError, match="cannot grow a MixtureStack"):
        chain_from_stack(MixtureStack.initialised((4, 3, 3, 2), 2, False, [generator(0)], CPU))


def convolution(inputs=3, **options):
    return nn.Conv2d(inputs, 4, 3, **{"padding": 1, "bias": False, **options})


BLOCK = (convolution, lambda: nn.BatchNorm2d(4), nn.ReLU)
HEAD = (lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten, lambda: nn.Linear(4, 10))
POOL = (lambda: nn.MaxPool2d(2),)


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ((*BLOCK[:2], *POOL, nn.ReLU, *HEAD), "MaxPool2d"),  # between a convolution and its ReLU
        ((*BLOCK, lambda: convolution(4), *BLOCK[1:2], *POOL, nn.ReLU, *HEAD), "MaxPool2d"),
        ((*BLOCK, *POOL, *POOL, *HEAD), "MaxPool2d"),
        ((*BLOCK, lambda: nn.MaxPool2d(2, stride=1), *HEAD), "MaxPool2d"),
        ((*BLOCK, lambda: nn.MaxPool2d(2, ceil_mode=True), *HEAD), "MaxPool2d"),
        ((BLOCK[0], lambda: nn.BatchNorm2d(4, eps=1e-3), nn.ReLU, *HEAD), "BatchNorm2d"),
        ((BLOCK[0], lambda: nn.BatchNorm2d(4, momentum=0.5), nn.ReLU, *HEAD), "BatchNorm2d"),
        ((lambda: convolution().requires_grad_(False), *BLOCK[1:], *HEAD), "Conv2d"),  # a frozen layer
        ((*BLOCK[:2], *BLOCK[1:], *HEAD), "BatchNorm2d"),  # two norms
        ((lambda: convolution(padding_mode="reflect"), *BLOCK[1:], *HEAD), "Conv2d"),
        ((*BLOCK, lambda: nn.AdaptiveAvgPool2d(2), nn.Flatten, lambda: nn.Linear(16, 10)), "AdaptiveAvgPool2d"),
        ((*BLOCK, HEAD[0], lambda: convolution(4), *BLOCK[1:], *HEAD), "Conv2d"),
        ((*BLOCK, nn.Flatten, lambda: nn.Linear(4 * 64, 10)), "Flatten"),
        ((*BLOCK, *HEAD, nn.ReLU), "ReLU"),
    ],
)
def test_a_module_that_a_chain_would_compute_differently_is_refused(parts, wrong):
    stack = ModuleStack([nn.Sequential(*(make() for make in parts))], Structure("mine", (3, 8, 8), 10, 4), CPU)
    with pytest.raises(SettingError, match=f"In backbone=mine, this layer does not fit: {wrong}"):
        chain_from_stack(stack)


def test_a_module_that_fits_computes_the_same_as_a_chain():
    module = nn.Sequential(nn.Sequential(*(make() for make in (*BLOCK, *POOL))), *(make() for make in HEAD))
    stack = ModuleStack([module], Structure("mine", (3, 8, 8), 10, 4), CPU)
    x = torch.randn(5, 3, 8, 8, generator=generator("images"))
    torch.testing.assert_close(chain_from_stack(stack).logits(x), module.eval()(x))


@KINDS
def test_a_split_without_noise_changes_nothing(kind):
    chain = chain_from_stack(STACKS[kind]())
    candidates, (x, _) = candidates_of(chain), batches_for(kind)()[0]
    for tensor in concatenated(candidates.splits, candidates.new_units):
        tensor.data.zero_()
    for tensor in (*candidates.weights_on_new, candidates.head_weight_on_new):
        if tensor is not None:
            tensor.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(candidates.logits(x), chain.logits(x), rtol=0, atol=1e-9)
        for splits, new in ((everything(chain)[0], nothing(chain)[1]), everything(chain)):
            grown = candidates.grown_chain(splits, new)
            torch.testing.assert_close(grown.logits(x), chain.logits(x), rtol=0, atol=1e-9)
    assert grown.widths == [2 * width + K for width in chain.widths]


@KINDS
def test_the_network_with_all_candidates_is_the_one_that_was_ranked(kind):
    """Noise included. Pooling is turned off, because the passes pool the mean of two halves and the grown network pools
    each half.
    """
    chain = chain_from_stack(STACKS[kind]())
    chain = replace(chain, layers=[replace(layer, is_pooled=False) for layer in chain.layers])
    candidates, (x, _) = candidates_of(chain), batches_for(kind)()[0]
    x = x[:, :, :1, :1] if kind == "vgg" else x
    with torch.no_grad():
        complete = candidates.grown_chain(*everything(chain))
        torch.testing.assert_close(complete.logits(x), candidates.logits(x), atol=1e-9, rtol=0)
        assert (candidates.logits(x) - chain.logits(x)).abs().max() > 1e-3
        torch.testing.assert_close(
            candidates.grown_chain(*nothing(chain)).logits(x), chain.logits(x), atol=1e-9, rtol=0
        )


@KINDS
def test_a_growth_leaves_the_other_units_unchanged(kind):
    chain = chain_from_stack(STACKS[kind]())
    candidates = candidates_of(chain)
    splits, new = nothing(chain)
    splits[1], new[0] = torch.tensor([2]), torch.tensor([1, 3])
    grown = candidates.grown_chain(splits, new)
    first, second = grown.layers[0], grown.layers[1]
    assert grown.widths[:2] == [chain.widths[0] + 2, chain.widths[1] + 1]
    assert torch.equal(first.weight[:-2], chain.layers[0].weight)
    assert torch.equal(first.weight[-2:], candidates.new_units[0][[1, 3]])
    old, v = chain.layers[1].weight, candidates.splits[1]
    inputs = chain.widths[0]
    torch.testing.assert_close(second.weight[2, :inputs] + second.weight[-1, :inputs], 2 * old[2])
    torch.testing.assert_close(second.weight[2, :inputs] - second.weight[-1, :inputs], 2 * v[2])
    kept = [unit for unit in range(chain.widths[1]) if unit != 2]
    assert torch.equal(second.weight[kept, :inputs], old[kept])
    assert torch.equal(second.weight[0, inputs:], candidates.weights_on_new[1][0, [1, 3]])
    # The next layer reads both halves with half the weight.
    third = grown.layers[2].weight if len(grown.layers) > 2 else grown.head_weight
    before = chain.layers[2].weight if len(grown.layers) > 2 else chain.head_weight
    torch.testing.assert_close(third[:, 2], before[:, 2] / 2)
    torch.testing.assert_close(third[:, -1], before[:, 2] / 2)
    if first.norm is not None:
        assert first.norm.scale[-2:].tolist() == [1, 1]
        assert first.norm.mean[-2:].tolist() == [0, 0]
        assert second.norm.mean[-1] == second.norm.mean[2]
    assert torch.equal(grown.head_bias, chain.head_bias)


@KINDS
def test_a_score_is_the_derivative_of_the_loss_along_the_noise_of_its_candidate(kind):
    """By finite differences, after the epoch in which the noise is trained."""
    chain, batches = chain_from_stack(STACKS[kind]()), batches_for(kind)
    candidates = candidates_of(chain)
    before = [variable.detach().clone() for variable in candidates.variables]
    scores, flops, *_ = rank(candidates, batches)
    assert all(not torch.equal(a, b) for a, b in zip(before, candidates.variables, strict=True))
    assert [len(layer_scores) for layer_scores in scores] == [width + K for width in chain.widths]
    assert flops > 0

    def loss(gates):
        with torch.no_grad():
            return sum(float(F.cross_entropy(candidates.logits(x, gates), y)) for x, y in batches()) / len(batches())

    # A gate scales the noise of its own candidate only, not the weights that read it.
    for layer, unit in ((0, 1), (1, 0), (1, chain.widths[1] + 2), (len(chain.widths) - 1, chain.widths[-1] + K - 1)):
        step, sides = 1e-6, []
        for sign in (1, -1):
            gates = candidates.gates()
            gates[layer].data[unit] = sign * step
            sides.append(loss(gates))
        torch.testing.assert_close(float(scores[layer][unit]), (sides[0] - sides[1]) / (2 * step), rtol=1e-3, atol=1e-7)


@KINDS
def test_the_best_candidates_of_all_layers_together_are_added(kind):
    chain, batches = chain_from_stack(STACKS[kind]()), batches_for(kind)
    seen = []

    def count_rule(order):
        seen.extend(order)
        return 5

    grown = grow_width(chain, batches, count_rule, generator("growth"), K)
    again = WidthCandidates(chain, K, *_draws_of("growth"))
    scores, flops, *_ = rank(again, batches)
    ranked = sorted(
        (float(score), layer, unit)
        for layer, layer_scores in enumerate(scores)
        for unit, score in enumerate(layer_scores)
    )
    expected = list(chain.widths)
    for _, layer, _ in ranked[:5]:
        expected[layer] += 1
    assert grown.chain.widths == expected
    assert seen[:5] == [(layer, unit >= chain.widths[layer]) for _, layer, unit in ranked[:5]]
    assert grown.flops == flops


def _draws_of(name):
    noise = generator(name)
    return lambda shape: torch.rand(shape, generator=noise), lambda shape: torch.randn(shape, generator=noise)


def test_the_number_of_added_candidates(caplog):
    chain = chain_from_stack(perceptron())  # 12-6-5-10
    order = [(0, False), (1, True), (1, False), (0, True)]
    now = 12 * 6 + 6 + 6 * 5 + 5 + 5 * 10 + 10
    assert chain.num_params() == now
    one_more = now + 12 + 1 + 5  # with one more unit in the first layer
    assert count_by_num_params(chain, one_more)(order) == 1
    assert count_by_num_params(chain, one_more + 1)(order) == 2
    assert chain.num_params([7, 6]) == one_more + 7 + 1 + 10
    assert count_by_num_params(chain, 10**9)(order) == 4
    assert count_by_num_params(chain, now)(order) == 0
    assert count_by_width_ratio(chain, 0.3)(order) == 3  # 0.3 x 11 units, rounded down
    assert count_by_width_ratio(chain, 0.05)(order) == 0
    caplog.clear()
    assert count_by_width_ratio(chain, 0.5)(order) == 4
    assert "4 candidates are too few to add 5 units" in caplog.text


def test_the_flops_of_both_passes_by_hand():
    """A perceptron 12-6-5-10 with K candidates per layer, 24 examples."""
    chain, batches = chain_from_stack(perceptron()), batches_for("perceptron")
    _, flops = rank(candidates_of(chain), batches)
    products = [(12, 6 + 6 + K), (6, 5 + 5 + K), (K, 5 + K), (5, 10), (K, 10)]  # inputs, outputs
    forward = [2 * num_in * num_out for num_in, num_out in products]
    # The first pass computes gradients of all weights except those of the head, and of all inputs except the first
    # layer's.
    first = sum(forward) + (sum(forward) - forward[3]) + (sum(forward) - forward[0])
    # The second pass computes gradients of inputs only.
    second = sum(forward) + sum(forward) - forward[0]
    assert flops == 24 * (first + second)


@KINDS
def test_candidates_are_initialised_as_by_the_authors(kind):
    """Splits from U(-0.1, 0.1), new units from N(0, 0.1), weights on new units from U(-0.01, 0.01)."""
    chain = chain_from_stack(STACKS[kind]())
    noise = generator("many")
    candidates = WidthCandidates(
        chain, 200, lambda s: torch.rand(s, generator=noise), lambda s: torch.randn(s, generator=noise)
    )

    def check_uniform(tensors, bound):
        values = torch.cat([tensor.detach().flatten() for tensor in tensors])
        assert values.abs().max() <= bound
        assert values.min() < -0.8 * bound
        assert values.max() > 0.8 * bound
        torch.testing.assert_close(float(values.std()), bound / 3**0.5, rtol=0.2, atol=0)

    check_uniform(candidates.splits, 0.1)
    check_uniform([weight for weight in candidates.weights_on_new if weight is not None], 0.01)
    check_uniform([candidates.head_weight_on_new], 0.01)
    new = torch.cat([weight.detach().flatten() for weight in candidates.new_units])
    assert new.abs().max() > 0.25  # so the distribution is not uniform
    torch.testing.assert_close(float(new.std()), 0.1, rtol=0.05, atol=0)
    assert NUM_CANDIDATES == 70


@KINDS
def test_noise_is_trained_with_the_authors_settings(kind, monkeypatch):
    """RMSprop(lr 1e-3, momentum 0.1, alpha 0.9), one epoch of cross-entropy plus 1e-2 (|v|^2 + 1e-2 |vno|^2)."""
    chain, batches = chain_from_stack(STACKS[kind]()), batches_for(kind)
    ours, theirs = candidates_of(chain), candidates_of(chain)
    rank(ours, batches)
    squares = [torch.zeros_like(variable) for variable in theirs.variables]
    moving = [torch.zeros_like(variable) for variable in theirs.variables]
    for x, y in batches():
        loss = F.cross_entropy(theirs.logits(x), y)
        for v in theirs.splits:
            loss = loss + 1e-2 * (v**2).sum()
        for vno in theirs.new_units:
            loss = loss + 1e-2 * 1e-2 * (vno**2).sum()
        gradients = torch.autograd.grad(loss, theirs.variables)
        with torch.no_grad():
            for value, gradient, square, move in zip(theirs.variables, gradients, squares, moving, strict=True):
                square.mul_(0.9).add_(0.1 * gradient**2)
                move.mul_(0.1).add_(gradient / (square.sqrt() + 1e-8))
                value.sub_(1e-3 * move)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
