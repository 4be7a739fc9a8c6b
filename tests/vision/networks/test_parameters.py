"""The parameters of M networks as one flat tensor."""

import torch

from vision.networks.parameters import Parameters, draw_layers, draw_linear
from vision.seeds import generator

SHAPES = {"weight_1": (2, 3), "bias_1": (2,)}


def counted(num_networks=2):
    """Return parameters whose flat tensor is 0, 1, 2, ..."""
    parameters = Parameters(SHAPES, num_networks)
    parameters.flat.copy_(torch.arange(len(parameters.flat)))
    return parameters


def test_the_flat_tensor_contains_tensor_after_tensor_and_network_after_network():
    parameters = counted()
    assert parameters.size == 8  # 2 x 3 weights and 2 biases of one network
    assert parameters.num_networks == 2
    assert parameters["weight_1"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert parameters["bias_1"].tolist() == [[12, 13], [14, 15]]


def test_tensors_are_views_of_the_flat_tensor():
    parameters = counted()
    parameters.flat += 100
    assert parameters["bias_1"].tolist() == [[112, 113], [114, 115]]
    parameters["bias_1"][1, 1] = -1
    assert parameters.flat[15] == -1


def test_a_copy_shares_no_memory():
    parameters = counted()
    copy = parameters.copy()
    parameters.flat.zero_()
    assert copy.flat.tolist() == list(range(16))
    assert copy["bias_1"].tolist() == [[12, 13], [14, 15]]


def test_zeros_like_has_the_same_shapes():
    zeros = counted().zeros_like()
    assert zeros.shapes == SHAPES
    assert zeros.flat.tolist() == [0] * 16


def test_some_networks_are_copied():
    parameters = counted()
    other = parameters.zeros_like()
    parameters.copy_networks(other, torch.tensor([False, True]))
    assert parameters["weight_1"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[0, 0, 0], [0, 0, 0]]]
    assert parameters["bias_1"].tolist() == [[12, 13], [0, 0]]
    parameters.copy_networks(other, torch.tensor([False, False]))
    assert parameters["bias_1"].tolist() == [[12, 13], [0, 0]]
    parameters.copy_networks(other, torch.tensor([True, True]))
    assert parameters.flat.tolist() == [0] * 16


def test_a_state_is_a_copy_and_restores_the_parameters():
    parameters = counted()
    state = parameters.state()
    parameters.flat.zero_()
    back = Parameters.from_state(state)
    assert back.shapes == SHAPES
    assert back.flat.tolist() == list(range(16))
    back.flat.zero_()
    assert state["bias_1"].tolist() == [[12, 13], [14, 15]]


def test_a_network_draws_the_same_numbers_in_a_stack_and_alone():
    together = Parameters(SHAPES, 3)
    draw_layers(together, [generator(seed) for seed in (4, 5, 6)])
    alone = Parameters(SHAPES, 1)
    draw_layers(alone, [generator(5)])
    assert torch.equal(together["weight_1"][1], alone["weight_1"][0])
    assert torch.equal(together["bias_1"][1], alone["bias_1"][0])
    assert not torch.equal(together["weight_1"][0], together["weight_1"][1])


def test_weights_and_biases_have_the_distribution_of_torch():
    weight, bias = draw_linear(1000, 16, [generator(0)])
    torch.manual_seed(0)
    of_torch = torch.nn.Linear(16, 1000)
    for ours, theirs in ((weight[0], of_torch.weight), (bias[0], of_torch.bias)):
        assert ours.shape == theirs.shape
        # Uniform between -1/sqrt(16) and 1/sqrt(16): the standard deviation is 0.25 / sqrt(3) = 0.1443.
        for values in (ours, theirs.detach()):
            assert -0.25 <= values.min() < -0.245
            assert 0.245 < values.max() <= 0.25
            assert abs(values.mean()) < 0.02
            assert abs(values.std() - 0.1443) < 0.01


def test_with_an_alignment_each_network_begins_at_a_multiple_and_the_gaps_stay_zero():
    parameters = Parameters(SHAPES, 3, alignment=4)
    assert parameters.size == 8
    assert len(parameters.flat) == 3 * (8 + 4)
    for name in SHAPES:
        for network in range(3):
            assert parameters[name][network].storage_offset() % 4 == 0
            assert parameters[name][network].is_contiguous()
            parameters[name][network].fill_(1 + network)
    assert parameters.flat.tolist() == [
        *[1] * 6,
        0,
        0,
        *[2] * 6,
        0,
        0,
        *[3] * 6,
        0,
        0,
        1,
        1,
        0,
        0,
        2,
        2,
        0,
        0,
        3,
        3,
        0,
        0,
    ]
    assert parameters.zeros_like().alignment == 4
    packed = Parameters.from_state(parameters.state())
    assert packed.flat.tolist() == [*[1] * 6, *[2] * 6, *[3] * 6, 1, 1, 2, 2, 3, 3]
    other = parameters.zeros_like()
    other.copy_networks(parameters, torch.tensor([True, False, True]))
    assert other["bias_1"].tolist() == [[1, 1], [0, 0], [3, 3]]
