"""What a network costs: FLOPs by torch's own counter, once for each structure.

Counted on the plain network, so that a cost belongs to the model and not to how we compute it.
"""

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from vision.networks import MixtureStack, Stack


@dataclass(frozen=True)
class Flops:
    """Of one network and one example. A multiplication with its addition is two."""

    forward: int
    training: int
    """Forward and backward, one update."""
    prediction: int
    """Forward, in testing: with hard gates one expert a layer is computed, with soft gates all of them."""


_counted: dict[Hashable, Flops] = {}


def count_flops(stack: Stack) -> Flops:
    """Of one network of a stack. All its networks cost the same: trees of equal size have equally many gates."""
    key = (type(stack), *((name, shape) for name, shape in stack.parameters.shapes.items()), _is_hard(stack))
    if key not in _counted:
        plain = stack.plain(0)
        num_inputs = stack.parameters.shapes["weight_1"][1]
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            plain(torch.zeros(1, num_inputs))
        with FlopCounterMode(display=False) as training:
            plain(torch.zeros(1, num_inputs)).sum().backward()
        prediction = forward.get_total_flops()
        if _is_hard(stack):
            # All gates, the head, and one expert a layer.
            experts = [linear for layer in plain.layers for linear in list(layer.experts)[1:]]
            prediction -= sum(2 * expert.in_features * expert.out_features for expert in experts)
        _counted[key] = Flops(forward.get_total_flops(), training.get_total_flops(), prediction)
    return _counted[key]


def mlp_flops(sizes: tuple[int, ...]) -> Flops:
    """The closed form for a perceptron: 2 x inputs x outputs of each layer forward, twice that backward, but once
    for the first layer, whose input needs no gradient."""
    products = [2 * num_in * num_out for num_in, num_out in itertools.pairwise(sizes)]
    forward = sum(products)
    return Flops(forward, 3 * forward - products[0], forward)


def _is_hard(stack: Stack) -> bool:
    return isinstance(stack, MixtureStack) and stack.gates[0].hard
