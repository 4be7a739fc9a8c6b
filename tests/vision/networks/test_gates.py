"""Trees of gates, flat gates and hard gates."""

import pytest
import torch

from vision.networks.gates import Gates, expert_paths

CPU = torch.device("cpu")


def logits_of(*probabilities):
    """Return logits [1, 1, K] for one network and one example from the probabilities of branches."""
    return torch.tensor(probabilities).log()[None, None]


def given(*uniforms):
    """Return noise with these numbers for the nodes, for one network and one example."""
    return lambda shape: torch.tensor(uniforms).view(1, *shape)


@pytest.mark.parametrize(
    ("root", "splits", "paths"),
    [
        (0, [], [[]]),  # one expert, no gate
        (3, [], [[0], [1], [2]]),
        (0, [0], [[0], [1]]),
        (0, [0, 0], [[0, 2], [1], [0, 3]]),  # expert 0 is split again: branches 2 and 3 are below branch 0
        (0, [0, 1, 1], [[0], [1, 2, 4], [1, 3], [1, 2, 5]]),
        (2, [1, 0, 2], [[0, 4], [1, 2], [1, 3, 6], [0, 5], [1, 3, 7]]),
    ],
)
def test_paths_to_the_experts_of_a_tree(root, splits, paths):
    assert expert_paths(root, splits) == paths


def test_the_numbers_of_experts_and_branches():
    gates = Gates(3, [[0, 3]], hard=False, device=CPU)
    assert (gates.num_experts, gates.num_branches) == (5, 7)
    gates = Gates(0, [[0, 0, 2]], hard=False, device=CPU)
    assert (gates.num_experts, gates.num_branches) == (4, 6)
    gates = Gates(0, [[]], hard=False, device=CPU)
    assert (gates.num_experts, gates.num_branches) == (1, 0)


def test_the_weight_of_an_expert_is_the_product_of_its_branches():
    gates = Gates(2, [[1]], hard=False, device=CPU)
    weights = gates.weights(logits_of(0.25, 0.75, 0.4, 0.6), training=False)
    # Expert 0 has the weight of the root's first branch. Expert 1 and its twin 2 share 0.75 as 0.4 to 0.6.
    torch.testing.assert_close(weights, torch.tensor([[[0.25, 0.30, 0.45]]]))


def test_networks_of_a_stack_may_have_split_different_experts():
    gates = Gates(0, [[0, 0], [0, 1]], hard=False, device=CPU)
    weights = gates.weights(logits_of(0.25, 0.75, 0.4, 0.6).repeat(2, 1, 1), training=False)
    torch.testing.assert_close(weights, torch.tensor([[[0.1, 0.75, 0.15]], [[0.25, 0.3, 0.45]]]))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("root", "splits"), [(4, []), (0, [0]), (0, [0, 1, 0, 2]), (3, [0, 2, 2])])
def test_weights_sum_to_1(root, splits, hard):
    gates = Gates(root, [splits, splits[:1] * len(splits)], hard, CPU)
    gates.noise = lambda shape: torch.rand(2, *shape)
    for training in (True, False):
        weights = gates.weights(20 * torch.randn(2, 50, gates.num_branches), training)
        assert weights.min() >= 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 50))


def test_hard_gates_choose_node_by_node_and_not_among_all_experts():
    # Expert 0 had 0.6 and expert 1 has 0.4. Expert 0 was split into halves of 0.33 and 0.27. Both are less likely than
    # expert 1, but the branch that leads to them is still the likelier one.
    split = logits_of(0.6, 0.4, 0.55, 0.45)
    soft = Gates(2, [[0]], hard=False, device=CPU).weights(split, training=False)
    torch.testing.assert_close(soft, torch.tensor([[[0.33, 0.4, 0.27]]]))
    assert soft.argmax() == 1
    hard = Gates(2, [[0]], hard=True, device=CPU).weights(split, training=False)
    assert hard.tolist() == [[[1, 0, 0]]]


@pytest.mark.parametrize(
    ("at_root", "at_split", "chosen"),
    [
        (0.0, 0.0, 0),  # below 0.5: branch 0
        (0.49, 0.9, 0),
        (0.51, 0.1, 1),  # between 0.5 and 0.7: branch 1, the split expert; below 0.25 its first half
        (0.69, 0.24, 1),
        (0.69, 0.26, 3),
        (0.71, 0.1, 2),
        (0.9999, 0.9999, 2),
    ],
)
def test_hard_gates_draw_a_branch_by_its_interval(at_root, at_split, chosen):
    gates = Gates(3, [[1]], hard=True, device=CPU)
    gates.noise = given(at_root, at_split)
    weights = gates.weights(logits_of(0.5, 0.2, 0.3, 0.25, 0.75), training=True)
    assert weights.tolist() == [[[float(expert == chosen) for expert in range(4)]]]


def test_hard_gates_choose_each_expert_with_its_probability():
    gates = Gates(2, [[1, 0]], hard=True, device=CPU)
    generator = torch.Generator().manual_seed(0)
    gates.noise = lambda shape: torch.rand(1, *shape, generator=generator)
    num_draws = 40_000
    logits = logits_of(0.3, 0.7, 0.9, 0.1, 0.5, 0.5).expand(1, num_draws, 6)
    frequency_E = gates.weights(logits, training=True).mean((0, 1))
    # Expert 0 and its twin 3 have 0.3 x 0.5 each. Expert 1 and its twin 2 have 0.7 x 0.9 and 0.7 x 0.1.
    # The standard deviation of a frequency is at most 0.5 / sqrt(40000) = 0.0025.
    assert frequency_E.tolist() == pytest.approx([0.15, 0.63, 0.07, 0.15], abs=0.01)


def test_hard_gates_cannot_train_without_noise():
    with pytest.raises(RuntimeError, match="call set_gate_noise"):
        Gates(2, [[]], hard=True, device=CPU).weights(logits_of(0.5, 0.5), training=True)


def test_the_gradient_of_a_soft_gate_by_hand():
    gates = Gates(0, [[0]], hard=False, device=CPU)
    gates.weights(logits_of(0.25, 0.75), training=True)
    # The gradient of a softmax is p (d - sum of p d). Here d = (1, 5), and the sum is 0.25 + 3.75 = 4.
    torch.testing.assert_close(gates.backward(torch.tensor([[[1.0, 5.0]]])), torch.tensor([[[-0.75, 0.75]]]))


def test_the_straight_through_gradient_of_a_hard_gate_by_hand():
    gates = Gates(0, [[0, 1]], hard=True, device=CPU)
    gates.noise = given(0.1, 0.9)  # the root chooses branch 0, so expert 0; the node below branch 1 chooses expert 2
    assert gates.weights(logits_of(0.25, 0.75, 0.5, 0.5), training=True).tolist() == [[[1, 0, 0]]]
    # Branch 0 gets 1 from expert 0. Branch 1 gets 5 from expert 2, because the other choice on its path is made. Then
    # follows the gradient of a softmax, as above. The lower node gets 0, because branch 1 is not chosen.
    gradient = gates.backward(torch.tensor([[[1.0, 100.0, 5.0]]]))
    torch.testing.assert_close(gradient, torch.tensor([[[-0.75, 0.75, 0.0, 0.0]]]))
