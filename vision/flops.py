"""What a network costs: FLOPs by closed form, held to torch's own counter by tests, or by that counter itself.

A multiplication with its addition is two. What is not a matrix product is not counted, by torch's counter neither. The
cost belongs to the model and not to how we compute it: every expert and gate once for each example.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Flops:
    """Of one network and one example."""

    forward: int
    training: int
    """Forward and backward of one update."""
    prediction: int
    """Forward, in testing: with hard gates one expert a layer is computed, with soft gates all of them."""


def count_flops(network: nn.Module, input_shape: tuple[int, ...]) -> Flops:
    """By torch's counter.

    Args:
        network: a batch of examples to [b, C].
        input_shape: of one example.
    """
    # Here, because it takes a second to import.
    from torch.utils.flop_counter import FlopCounterMode

    # Not training, because a batch of one has no statistics; what is counted is the same.
    network.eval()
    example = torch.zeros(1, *input_shape)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        network(example)
    with FlopCounterMode(display=False) as training:
        network(example).sum().backward()
    return Flops(forward.get_total_flops(), training.get_total_flops(), forward.get_total_flops())


def linear_flops(layers: Sequence[tuple[int, int]], unused: int = 0) -> Flops:
    """The closed form of linear layers, one after the other: 2 x inputs x outputs each forward, twice that backward,
    but once for the first, whose input needs no gradient.

    Args:
        layers: (inputs, outputs) of each.
        unused: FLOPs of a forward pass that a prediction saves.
    """
    products = [2 * num_in * num_out for num_in, num_out in layers]
    forward = sum(products)
    return Flops(forward, 3 * forward - products[0], forward - unused)
