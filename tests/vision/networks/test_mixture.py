"""Stacks of mixtures compared with torch modules after every update, and splits that keep the outputs."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.nn import functional as F

from tests.vision.networks.following import Noise, compare_gradients, follow, some_batches
from vision.networks import MixtureStack
from vision.optimizers import SGD, AdaDelta
from vision.seeds import generator
from vision.training import JointLoss, OwnLoss

SIZES = (6, 5, 4, 3)
CPU = torch.device("cpu")

SPLITS = ([[0] * 4] * 2, [[0, 1, 0, 1], [1, 0, 1, 0]], [[2, 0, 1, 0], [0, 2, 2, 1]])
"""Per growth and layer, the split expert of each of 4 networks. All networks grow different trees."""

adadelta_of_torch = partial(torch.optim.Adadelta, lr=1.0)


def generators(num_networks, purpose="test"):
    return [generator(number, purpose) for number in range(num_networks)]


def untrained(num_networks, num_experts=1, hard=False):
    return MixtureStack.initialised(SIZES, num_experts, hard, generators(num_networks), CPU)


def grown(num_networks, hard=False, num_experts=1, splits=SPLITS):
    """Return a stack after three growths. Each network has its own tree."""
    stack = untrained(num_networks, num_experts, hard)
    for number, experts in enumerate(splits):
        stack = stack.split(
            [layer_experts[:num_networks] for layer_experts in experts], generators(num_networks, f"g{number}")
        )
    return stack


def trained(stack, num_updates=20):
    """Train a stack for some updates and return it. No two of its experts are equal then."""
    loss, optimizer = OwnLoss(len(stack), 1), SGD(stack.parameters.flat, lr=0.3, momentum=0.9)
    stack.set_gate_noise(Noise(len(stack)))
    for x, y in some_batches(num_updates, len(stack), 8, SIZES, seed=1):
        stack.backward(loss.gradient(stack.logits(x, training=True), F.one_hot(y, SIZES[-1]).float()))
        optimizer.step(stack.gradient.flat)
    return stack


def some_x(num_examples=200):
    return torch.randn(1, num_examples, SIZES[0], generator=torch.Generator().manual_seed(9))


def losses(stack):
    """Return the loss of each network on examples that it was not trained on."""
    ((x, y),) = some_batches(1, 1, 203, SIZES, seed=2)
    return torch.stack([F.cross_entropy(logits, y[0]) for logits in stack.logits(x)])


def test_all_networks_of_these_tests_grow_different_trees():
    trees = list(zip(*(gates.splits for gates in grown(4).gates), strict=True))
    assert trees[0] == ([0, 0, 2], [0, 1, 0])
    assert all(trees.count(tree) == 1 for tree in trees)


# ---- Compared with torch modules.


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("num_networks", "groups"), [(1, 1), (3, 3), (3, 1), (4, 2)])
def test_gradients_equal_those_of_autograd(num_networks, groups, hard):
    compare_gradients(trained(grown(num_networks, hard)), groups, draws=hard)


@pytest.mark.parametrize("num_networks", [1, 3])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_gradients_of_ungrown_mixtures_equal_those_of_autograd(num_networks, num_experts):
    compare_gradients(untrained(num_networks, num_experts), groups=1)


@pytest.mark.parametrize("num_networks", [1, 3])
def test_gradients_equal_those_of_autograd_under_a_root_and_splits(num_networks):
    compare_gradients(grown(num_networks, num_experts=3, splits=SPLITS[:2]), groups=1)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("num_networks", [1, 3])
def test_50_updates_of_trees(num_networks, hard):
    stack = grown(num_networks, hard)
    noise = Noise(num_networks) if hard else None
    follow(stack, OwnLoss(num_networks, 1), AdaDelta(stack.parameters.flat), adadelta_of_torch, noise=noise)


@pytest.mark.parametrize(("num_networks", "hard"), [(1, True), (3, False)])
def test_50_updates_under_a_flat_root(num_networks, hard):
    stack = untrained(num_networks, 3, hard).split(
        [[0] * num_networks] * 2, generators(num_networks, "flat"), flat=True
    )
    noise = Noise(num_networks) if hard else None
    follow(stack, OwnLoss(num_networks, 1), AdaDelta(stack.parameters.flat), adadelta_of_torch, noise=noise)


def test_50_updates_under_a_root_and_splits():
    stack = grown(2, hard=True, num_experts=2, splits=SPLITS[:2])
    follow(stack, OwnLoss(2, 1), AdaDelta(stack.parameters.flat), adadelta_of_torch, noise=Noise(2))


def test_50_updates_with_sgd():
    stack, settings = grown(2), {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    optimizer = SGD(stack.parameters.flat, **settings)
    follow(stack, OwnLoss(2, 1), optimizer, partial(torch.optim.SGD, **settings))


def test_50_updates_of_2_mixtures_trained_as_one():
    stack = grown(4, splits=SPLITS[:2])
    follow(stack, JointLoss(2, 2, mean=True), AdaDelta(stack.parameters.flat), adadelta_of_torch, together=2)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("num_networks", [1, 3])
def test_a_prediction_between_forward_and_backward_changes_nothing(num_networks, hard):
    stack = trained(grown(num_networks, hard))
    x, d_logits = torch.randn(num_networks, 4, 6), torch.randn(num_networks, 4, 3)
    stack.set_gate_noise(Noise(num_networks))
    stack.logits(x, training=True)
    stack.backward(d_logits)
    expected = stack.gradient.flat.clone()
    stack.set_gate_noise(Noise(num_networks))
    stack.logits(x, training=True)
    stack.logits(torch.randn(num_networks, 9, 6))
    stack.backward(d_logits)
    assert torch.equal(stack.gradient.flat, expected)


@pytest.mark.parametrize("hard", [False, True])
def test_a_module_has_the_logits_and_expert_weights_of_its_stack(hard):
    stack, x = trained(grown(3, hard)), some_x()
    logits = stack.logits(x)
    for number in range(3):
        module = stack.to_module(number).eval()
        torch.testing.assert_close(module(x[0]).detach(), logits[number], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module.layers[0].weights(x[0]).detach(), stack.expert_weights[0][number])


# ---- Splitting an expert.


@pytest.mark.parametrize("num_networks", [1, 3])
@pytest.mark.parametrize("hard", [False, True])
def test_splitting_keeps_the_loss_of_trained_networks_growth_after_growth(num_networks, hard):
    stack = trained(untrained(num_networks, hard=hard))
    for number, experts in enumerate(SPLITS):
        before = losses(stack)
        here = [layer_experts[:num_networks] for layer_experts in experts]
        stack = stack.split(here, generators(num_networks, f"g{number}"))
        torch.testing.assert_close(losses(stack), before, rtol=0, atol=1e-6)
        stack = trained(stack)
        assert (losses(stack) - before).abs().min() > 1e-3  # training changed the network before the next split


def test_splitting_many_times_in_a_row_keeps_the_loss():
    stack = trained(untrained(3, num_experts=2))
    before = losses(stack)
    for number in range(8):
        stack = stack.split([[number % 3] * 3, [0, number, 1]], generators(3, f"g{number}"))
        torch.testing.assert_close(losses(stack), before, rtol=0, atol=1e-6)
    assert stack.num_experts == 10


@pytest.mark.parametrize("num_experts", [1, 3])
def test_splitting_under_hard_gates_keeps_every_output(num_experts):
    stack = trained(untrained(3, num_experts, hard=True))
    for number, experts in enumerate(SPLITS):
        before = stack.logits(some_x())
        stack = stack.split([layer_experts[:3] for layer_experts in experts], generators(3, f"g{number}"))
        # The chosen expert is unchanged; only the order of additions in a larger product may differ.
        torch.testing.assert_close(stack.logits(some_x()), before, rtol=1e-6, atol=1e-6)
        stack = trained(stack)


def test_an_argmax_over_all_experts_would_change_outputs():
    stack = trained(untrained(3, 3, hard=True)).split([[0, 1, 2], [2, 1, 0]], generators(3, "g"))
    stack.logits(some_x())
    hard_weights = stack.expert_weights[0]
    state = stack.state()
    state["hard"] = False
    soft = MixtureStack.from_state(state, CPU)
    soft.logits(some_x())
    chosen, over_all = hard_weights.argmax(-1), soft.expert_weights[0].argmax(-1)
    assert (chosen != over_all).any()


def test_a_split_does_not_change_the_old_stack():
    stack = trained(untrained(3, 2))
    parameters, splits, logits = stack.parameters.flat.clone(), [g.splits for g in stack.gates], stack.logits(some_x())
    new = stack.split([[0, 1, 0], [1, 1, 0]], generators(3, "g"))
    trained(new)
    assert torch.equal(stack.parameters.flat, parameters)
    assert [g.splits for g in stack.gates] == splits == [[[], [], []]] * 2
    assert torch.equal(stack.logits(some_x()), logits)
    assert (stack.num_experts, new.num_experts) == (2, 3)


def test_a_twin_is_an_equal_last_expert_under_a_random_gate():
    stack = trained(untrained(2, 2))
    new = stack.split([[0, 1], [1, 1]], generators(2, "g"))
    for number, (expert, splits) in enumerate([(0, [0]), (1, [1])]):
        old_layer, layer = stack.to_module(number).layers[0], new.to_module(number).layers[0]
        assert new.gates[0].splits[number] == splits
        for kept in range(2):
            assert torch.equal(layer.experts[kept].weight, old_layer.experts[kept].weight)
        assert torch.equal(layer.experts[2].weight, old_layer.experts[expert].weight)
        assert torch.equal(layer.experts[2].bias, old_layer.experts[expert].bias)
        num_old = old_layer.num_branches
        assert torch.equal(layer.gate.weight[:num_old], old_layer.gate.weight)
        new_rows = layer.gate.weight[num_old:]
        assert len(new_rows) == 2
        assert not torch.equal(new_rows[0], new_rows[1])
        assert new_rows.abs().max() <= SIZES[0] ** -0.5
    assert torch.equal(new.to_module(0).head.weight, stack.to_module(0).head.weight)


def test_twins_become_different_in_training():
    stack = trained(untrained(1)).split([[0], [0]], generators(1, "g"))
    first, twin = stack.to_module(0).layers[0].experts
    assert torch.equal(first.weight, twin.weight)
    first, twin = trained(stack).to_module(0).layers[0].experts
    assert (first.weight - twin.weight).abs().max() > 1e-3


def test_the_same_split_of_a_network_alone_and_in_a_stack():
    together = untrained(3).split([[0] * 3] * 2, generators(3, "g"))
    alone = MixtureStack.initialised(SIZES, 1, False, [generator(2, "test")], CPU).split([[0]] * 2, [generator(2, "g")])
    for name in alone.parameters.shapes:
        assert torch.equal(together.parameters[name][2], alone.parameters[name][0])


def test_parameters_after_each_growth():
    # A layer with i inputs and width h begins with h (i + 1) parameters. A growth adds an expert, h (i + 1) parameters,
    # and a gate of two branches, 2 (i + 1). After k growths there are (i + 1) (h + k (h + 2)), and those of the head.
    counts = [7 * (5 + k * (5 + 2)) + 6 * (4 + k * (4 + 2)) + 5 * 3 for k in range(4)]
    assert counts == [74, 159, 244, 329]
    stacks = list(
        accumulate(SPLITS, lambda stack, experts: stack.split(experts, generators(4, "g")), initial=untrained(4))
    )
    assert [stack.num_params for stack in stacks] == counts
    assert [sum(p.numel() for p in stack.to_module(3).parameters()) for stack in stacks] == counts
    assert [stack.num_experts for stack in stacks] == [1, 2, 3, 4]


def test_parameters_under_a_flat_root_after_each_growth():
    # A flat gate has one branch per expert, and none for a single expert: (i + 1) (E h + E) parameters for E > 1.
    stack, counts = untrained(2), []
    for number in range(3):
        counts.append(stack.num_params)
        stack = stack.split([[0, 0], [number, 0]], generators(2, "g"), flat=True)
    assert counts == [74, 7 * 12 + 6 * 10 + 15, 7 * 18 + 6 * 15 + 15]
    assert (stack.gates[0].root, stack.gates[0].splits) == (4, [[], []])


def test_a_flat_split_changes_outputs_and_a_tree_split_does_not():
    stack = trained(untrained(3, 3))
    before, experts = stack.logits(some_x()), [[0, 1, 2], [2, 1, 0]]
    tree, flat = stack.split(experts, generators(3, "g")), stack.split(experts, generators(3, "g"), flat=True)
    torch.testing.assert_close(tree.logits(some_x()), before, rtol=1e-5, atol=1e-5)
    assert (flat.logits(some_x()) - before).abs().amax((1, 2)).min() > 0.1  # in each of the networks
    assert (
        flat.expert_weights[0][0, :, 1] < stack.expert_weights[0][0, :, 1]
    ).all()  # this expert was not split, but has less weight


def test_the_first_flat_split_of_a_single_expert_keeps_outputs():
    stack = trained(untrained(2))
    new = stack.split([[0, 0], [0, 0]], generators(2, "g"), flat=True)
    torch.testing.assert_close(new.logits(some_x()), stack.logits(some_x()), rtol=1e-5, atol=1e-5)


def test_a_flat_split_cannot_follow_a_tree_split():
    with pytest.raises(ValueError, match="flat"):
        grown(1).split([[0], [0]], generators(1, "g"), flat=True)


# ---- State and initialisation.


@pytest.mark.parametrize("hard", [False, True])
def test_a_state_restores_the_stack(hard):
    stack = trained(grown(3, hard))
    expected, state = stack.logits(some_x()), stack.state()
    back = MixtureStack.from_state(state, CPU)
    assert torch.equal(back.logits(some_x()), expected)
    assert [g.splits for g in back.gates] == [g.splits for g in stack.gates]
    assert back.gates[0].hard == hard


def test_reset_parameters_keeps_the_trees():
    stack = grown(2)
    splits, before = [gates.splits for gates in stack.gates], stack.parameters.flat.clone()
    stack.reset_parameters(generators(2, "anew"))
    assert [gates.splits for gates in stack.gates] == splits
    assert not torch.isclose(stack.parameters.flat, before).any()


def test_one_expert_is_a_perceptron():
    stack = untrained(1)
    module, x = stack.to_module(0), some_x()
    first, second = (layer.experts[0] for layer in module.layers)
    expected = module.head(second(first(x[0]).relu()).relu())
    torch.testing.assert_close(stack.logits(x)[0], expected.detach(), rtol=1e-5, atol=1e-5)
    assert stack.expert_weights[0].tolist() == [[[1]] * 200]
