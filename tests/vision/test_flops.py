"""FLOPs of networks: closed forms worked out by hand, torch's counter, and the operations of stacks."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vision.flops import Flops, count_flops, linear_flops
from vision.networks import MixtureStack, MLPStack
from vision.seeds import generator

CPU = torch.device("cpu")


def mlp(sizes, num_networks=1):
    return MLPStack.initialised(sizes, [generator(number) for number in range(num_networks)], CPU)


def mixture(num_experts=1, num_splits=0, num_flat_splits=0, hard=False, sizes=(5, 4, 3, 2)):
    """Return a stack of two networks, which split different experts."""
    generators = [generator(number) for number in range(2)]
    stack = MixtureStack.initialised(sizes, num_experts, hard, generators, CPU)
    for number in range(num_splits):
        stack = stack.split([[0, number], [number, 0]], generators)
    for _ in range(num_flat_splits):
        stack = stack.split([[0, 0], [0, 0]], generators, flat=True)
    return stack


def test_a_perceptron_by_hand():
    # Forward 2 x (4 x 3 + 3 x 3 + 3 x 2) = 54. Backward 54 for the weights and 2 x (3 x 3 + 3 x 2) = 30 for inputs.
    assert mlp((4, 3, 3, 2)).flops == Flops(forward=54, training=54 + 54 + 30, prediction=54)


def test_the_perceptron_of_the_paper():
    # 784-32-32-10.
    forward = 2 * (784 * 32 + 32 * 32 + 32 * 10)
    assert mlp((784, 32, 32, 10)).flops == Flops(forward, 3 * forward - 2 * 784 * 32, forward)


@pytest.mark.parametrize("sizes", [(4, 2), (7, 5, 3), (64, 8, 8, 10), (784, 32, 32, 10), (9, 8, 7, 6, 5)])
def test_the_closed_form_of_a_perceptron_equals_torchs_count(sizes):
    stack = mlp(sizes)
    assert stack.flops == count_flops(stack.to_module(0), (sizes[0],))


@pytest.mark.parametrize(("num_networks", "groups"), [(1, 1), (3, 3), (4, 2), (3, 1)])
def test_a_stack_of_perceptrons_computes_the_flops_that_it_is_charged(num_networks, groups):
    stack, num_examples = mlp((16, 8, 8, 4), num_networks), 5
    with FlopCounterMode(display=False) as counted:
        logits = stack.logits(torch.zeros(groups, num_examples, 16), training=True)
    assert counted.get_total_flops() == stack.flops.forward * num_networks * num_examples
    with FlopCounterMode(display=False) as counted:
        stack.backward(logits)
    backward = stack.flops.training - stack.flops.forward
    assert counted.get_total_flops() == backward * num_networks * num_examples


def test_a_mixture_after_two_splits_by_hand():
    # The first layer has 5 inputs, 3 experts of width 4 and two gates of 2 branches, 16 rows in all. The second has 4
    # inputs and 3 x 3 + 4 = 13 rows.
    first, second, head = 2 * 5 * 16, 2 * 4 * 13, 2 * 3 * 2
    forward = first + second + head
    expected = Flops(forward, training=2 * first + 3 * second + 3 * head, prediction=forward)
    assert mixture(num_splits=2).flops == expected


def test_hard_gates_predict_with_one_expert_per_layer_and_train_with_all():
    # Two of three experts are not computed: 2 x 5 x 4 FLOPs each in the first layer, 2 x 4 x 3 in the second. All gates
    # are computed.
    soft, hard = mixture(num_splits=2).flops, mixture(num_splits=2, hard=True).flops
    assert hard == Flops(soft.forward, soft.training, prediction=soft.forward - 2 * (40 + 24))
    assert hard.prediction == 2 * 5 * (4 + 4) + 2 * 4 * (3 + 4) + 2 * 3 * 2


def test_a_flat_gate_has_one_branch_per_expert():
    # The first layer has 3 experts of width 4 and 3 branches, 15 rows. The second has 3 x 3 + 3 = 12 rows.
    stack = mixture(num_flat_splits=2)
    assert stack.flops.forward == 2 * 5 * 15 + 2 * 4 * 12 + 2 * 3 * 2
    assert stack.flops == mixture(num_experts=3).flops


def test_one_expert_costs_as_much_as_a_perceptron():
    assert mixture().flops == mixture(hard=True).flops == mlp((5, 4, 3, 2)).flops


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("grown", [{}, {"num_experts": 4}, {"num_splits": 3}, {"num_flat_splits": 2}])
def test_the_closed_form_of_a_mixture_equals_torchs_count(grown, hard):
    stack = mixture(**grown, hard=hard, sizes=(20, 8, 6, 10))
    for number in range(2):  # the count does not depend on which experts were split
        counted = count_flops(stack.to_module(number), (20,))
        assert (stack.flops.forward, stack.flops.training) == (counted.forward, counted.training)


def test_structures_with_equally_many_rows_are_distinguished():
    # With width 4, 7 experts in a tree have 7 x 4 + 12 = 40 rows, and 8 experts under one root 8 x 4 + 8 = 40 rows.
    tree, flat = (
        mixture(num_splits=6, hard=True, sizes=(5, 4, 4, 2)),
        mixture(num_experts=8, hard=True, sizes=(5, 4, 4, 2)),
    )
    assert tree.parameters.shapes == flat.parameters.shapes
    assert tree.flops.forward == flat.flops.forward
    assert tree.flops.prediction == 2 * (5 + 4) * (4 + 12) + 2 * 4 * 2
    assert flat.flops.prediction == 2 * (5 + 4) * (4 + 8) + 2 * 4 * 2


def test_linear_layers_by_hand():
    assert linear_flops([(3, 2), (2, 1)], unused=5) == Flops(forward=16, training=16 + 16 + 4, prediction=11)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.attention(y, y, y, need_weights=False)[0].mean(1)


def test_fused_operations_are_counted():
    """7 steps of 8 inputs and 5 units; then attention of 7 queries over 7 keys in 5 dimensions."""
    lstm = 7 * 2 * (8 + 5) * 20
    attention = 7 * 2 * 5 * 15 + 2 * 2 * 7 * 7 * 5 + 7 * 2 * 5 * 5
    found = count_flops(Recurrent(), (7, 8))
    assert found.forward == lstm + attention
    assert found.training > 2.5 * found.forward
