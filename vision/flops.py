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


def count_flops(network: nn.Module, num_inputs: int) -> Flops:
    """By torch's counter.

    Args:
        network: [b, i] to [b, C].
        num_inputs: i.
    """
    # Here, because it takes a second to import.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward, torch.no_grad():
        network(torch.zeros(1, num_inputs))
    with FlopCounterMode(display=False) as training:
        network(torch.zeros(1, num_inputs)).sum().backward()
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
