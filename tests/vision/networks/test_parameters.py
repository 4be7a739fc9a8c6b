"""The parameters of M networks as one flat tensor."""

import torch

from vision.networks.parameters import Parameters, draw_layers, draw_linear
from vision.seeds import generator

SHAPES = {"weight_1": (2, 3), "bias_1": (2,)}


def counted(num_networks=2):
    """0, 1, 2 ... from the first number of the flat tensor on."""
    parameters = Parameters(SHAPES, num_networks)
    parameters.flat.copy_(torch.arange(len(parameters.flat)))
    return parameters


def test_a_flat_tensor_holds_tensor_after_tensor_and_in_each_network_after_network():
    parameters = counted()
    assert parameters.size == 8  # 2 x 3 weights and 2 biases of one network
    assert parameters.num_networks == 2
    assert parameters["weight_1"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert parameters["bias_1"].tolist() == [[12, 13], [14, 15]]


def test_tensors_are_views_so_an_optimizer_of_the_flat_one_moves_all():
    parameters = counted()
    parameters.flat += 100
    assert parameters["bias_1"].tolist() == [[112, 113], [114, 115]]
    parameters["bias_1"][1, 1] = -1
    assert parameters.flat[15] == -1


def test_a_copy_is_a_copy():
    parameters = counted()
    copy = parameters.copy()
    parameters.flat.zero_()
    assert copy.flat.tolist() == list(range(16))
    assert copy["bias_1"].tolist() == [[12, 13], [14, 15]]


def test_empty_like_has_the_shapes_and_no_numbers():
    empty = counted().zeros_like()
    assert empty.shapes == SHAPES
    assert empty.flat.tolist() == [0] * 16


def test_some_networks_take_what_another_has():
    parameters = counted()
    other = parameters.zeros_like()
    parameters.copy_networks(other, torch.tensor([False, True]))
    assert parameters["weight_1"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[0, 0, 0], [0, 0, 0]]]
    assert parameters["bias_1"].tolist() == [[12, 13], [0, 0]]
    parameters.copy_networks(other, torch.tensor([False, False]))
    assert parameters["bias_1"].tolist() == [[12, 13], [0, 0]]
    parameters.copy_networks(other, torch.tensor([True, True]))
    assert parameters.flat.tolist() == [0] * 16


def test_a_state_is_a_copy_and_comes_back_as_it_was():
    parameters = counted()
    state = parameters.state()
    parameters.flat.zero_()
    back = Parameters.from_state(state)
    assert back.shapes == SHAPES
    assert back.flat.tolist() == list(range(16))
    back.flat.zero_()
    assert state["bias_1"].tolist() == [[12, 13], [14, 15]]


def test_networks_draw_the_same_alone_and_in_a_stack():
    together = Parameters(SHAPES, 3)
    draw_layers(together, [generator(seed) for seed in (4, 5, 6)])
    alone = Parameters(SHAPES, 1)
    draw_layers(alone, [generator(5)])
    assert torch.equal(together["weight_1"][1], alone["weight_1"][0])
    assert torch.equal(together["bias_1"][1], alone["bias_1"][0])
    assert not torch.equal(together["weight_1"][0], together["weight_1"][1])


def test_weights_and_biases_are_drawn_as_torch_draws_them():
    weight, bias = draw_linear(1000, 16, [generator(0)])
    torch.manual_seed(0)
    of_torch = torch.nn.Linear(16, 1000)
    for ours, theirs in ((weight[0], of_torch.weight), (bias[0], of_torch.bias)):
        assert ours.shape == theirs.shape
        # Uniform in +-1/sqrt(16): the deviation is 0.25 / sqrt(3) = 0.1443.
        for drawn in (ours, theirs.detach()):
            assert -0.25 <= drawn.min() < -0.245
            assert 0.245 < drawn.max() <= 0.25
            assert abs(drawn.mean()) < 0.02
            assert abs(drawn.std() - 0.1443) < 0.01
