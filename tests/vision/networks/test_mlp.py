"""Stacks of perceptrons compared with torch modules after every update."""

from functools import partial

import pytest
import torch

from tests.vision.networks.following import compare_gradients, follow
from vision.networks import MLPStack
from vision.networks.parameters import Parameters
from vision.optimizers import SGD, AdaDelta
from vision.seeds import generator
from vision.training import JointLoss, OwnLoss

SIZES = (6, 5, 4, 3)
CPU = torch.device("cpu")

adadelta_of_torch = partial(torch.optim.Adadelta, lr=1.0)


def untrained(num_networks, sizes=SIZES):
    return MLPStack.initialised(sizes, [generator(number, "test") for number in range(num_networks)], CPU)


def test_logits_worked_out_by_hand():
    stack = untrained(2, sizes=(2, 1, 1, 2))
    for name, value in {
        "weight_1": [[[1, 2]], [[1, 2]]],
        "bias_1": [[1], [-9]],
        "weight_2": [[[3]], [[3]]],
        "bias_2": [[-2], [5]],
        "weight_3": [[[1], [-1]], [[2], [-2]]],
        "bias_3": [[0, 10], [0, 1]],
    }.items():
        stack.parameters[name].copy_(torch.tensor(value))
    # First network: 1 + 2 x 2 + 1 = 6, then 3 x 6 - 2 = 16. Second: max(0, 5 - 9) = 0, then 5.
    assert stack.logits(torch.tensor([[[1.0, 2.0]]])).tolist() == [[[16, -6]], [[10, -9]]]


@pytest.mark.parametrize(("num_networks", "groups"), [(1, 1), (3, 3), (3, 1), (4, 2)])
def test_gradients_equal_those_of_autograd(num_networks, groups):
    compare_gradients(untrained(num_networks), groups)


@pytest.mark.parametrize("sizes", [(6, 3), (6, 4, 3), (6, 5, 4, 5, 3), (1, 1, 1, 2)])
@pytest.mark.parametrize("num_networks", [1, 3])
def test_gradients_equal_those_of_autograd_at_any_depth(sizes, num_networks):
    compare_gradients(untrained(num_networks, sizes), groups=1)


@pytest.mark.parametrize("num_networks", [1, 3])
def test_50_updates_with_adadelta(num_networks):
    stack = untrained(num_networks)
    follow(stack, OwnLoss(num_networks, 1), AdaDelta(stack.parameters.flat), adadelta_of_torch)


@pytest.mark.parametrize("num_networks", [1, 3])
def test_50_updates_with_sgd(num_networks):
    stack, settings = untrained(num_networks), {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    optimizer = SGD(stack.parameters.flat, **settings)
    follow(stack, OwnLoss(num_networks, 1), optimizer, partial(torch.optim.SGD, **settings))


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_50_updates_of_3_networks_trained_as_one(num_seeds, mean):
    stack = untrained(3 * num_seeds)
    loss = JointLoss(num_seeds, 3, mean)
    follow(stack, loss, AdaDelta(stack.parameters.flat), adadelta_of_torch, together=3, mean=mean)


@pytest.mark.parametrize("num_networks", [1, 3])
def test_a_prediction_between_forward_and_backward_changes_nothing(num_networks):
    stack = untrained(num_networks)
    x, d_logits = torch.randn(num_networks, 4, 6), torch.randn(num_networks, 4, 3)
    stack.logits(x, training=True)
    stack.backward(d_logits)
    expected = stack.gradient.flat.clone()
    stack.logits(x, training=True)
    stack.logits(torch.randn(num_networks, 9, 6))
    stack.backward(d_logits)
    assert torch.equal(stack.gradient.flat, expected)


def test_a_network_is_initialised_the_same_in_a_stack_and_alone():
    alone = MLPStack.initialised(SIZES, [generator(1, "test")], CPU)
    for name in alone.parameters.shapes:
        assert torch.equal(untrained(3).parameters[name][1], alone.parameters[name][0])


def test_reset_parameters_repeats_the_initialisation():
    stack = untrained(2)
    first = stack.parameters.flat.clone()
    stack.parameters.flat.zero_()
    stack.reset_parameters([generator(number, "test") for number in range(2)])
    assert torch.equal(stack.parameters.flat, first)


def test_a_state_restores_the_stack():
    stack = untrained(3)
    x = torch.randn(3, 4, 6)
    expected = stack.logits(x)
    state = stack.state()
    stack.parameters.flat.zero_()
    back = MLPStack.from_state(state, CPU)
    assert back.sizes == SIZES
    assert torch.equal(back.logits(x), expected)


def test_the_number_of_parameters():
    stack = untrained(3)
    assert len(stack) == 3
    assert stack.num_params == 7 * 5 + 6 * 4 + 5 * 3 == sum(p.numel() for p in stack.to_module(0).parameters())
    assert stack.num_experts is None


def test_a_module_is_a_copy():
    stack = untrained(2)
    module, x = stack.to_module(1), torch.randn(1, 4, 6)
    expected = stack.logits(x)[1]
    stack.parameters.flat.zero_()
    torch.testing.assert_close(module(x[0]).detach(), expected, rtol=1e-5, atol=1e-6)


def test_a_stack_can_be_made_from_parameters():
    parameters = Parameters(untrained(2).parameters.shapes, 2)
    assert MLPStack(SIZES, parameters).logits(torch.ones(1, 4, 6)).tolist() == [[[0] * 3] * 4] * 2
