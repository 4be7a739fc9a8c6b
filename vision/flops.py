"""Count the FLOPs of a network, with a formula for linear layers or with torch's FLOP counter.

Tests check that the formula and the counter give the same number.

A multiplication and an addition are two FLOPs. As in torch's counter, only matrix products and convolutions are
counted. The count does not depend on how our code computes the model: every expert and every gate is counted once per
example.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one network for one example."""

    forward: int
    """FLOPs of a forward pass."""
    training: int
    """FLOPs of an update, which is a forward and a backward pass."""
    prediction: int
    """FLOPs of a forward pass in evaluation mode. With hard gates it computes one expert of each mixture, with soft
    gates all experts."""


def count_flops(network: nn.Module, input_shape: tuple[int, ...]) -> Flops:
    """Return the FLOPs of a network for one example, counted by torch's FLOP counter.

    Args:
        network: maps a batch of b examples to logits, [b, C] for C classes. This function switches it to evaluation
            mode.
        input_shape: shape of one example.
    """
    # Use evaluation mode, because in training mode batch normalisation cannot compute a variance from one example. The
    # FLOPs are the same in both modes.
    network.eval()
    example = torch.zeros(1, *input_shape)
    with torch.no_grad():
        forward = flops_of_call(lambda: network(example))
    training = flops_of_call(lambda: network(example).sum().backward())
    return Flops(forward, training, forward)


def flops_of_call(call: Callable[[], object]) -> int:
    """Run `call` and return the FLOPs that torch's FLOP counter counts in it."""
    # Import FlopCounterMode only when it is needed, because the import takes a second.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def linear_flops(layers: Sequence[tuple[int, int]], unused: int = 0) -> Flops:
    """Return the FLOPs of a sequence of linear layers for one example, computed with a formula.

    The forward pass of a layer takes 2 x inputs x outputs FLOPs, and its backward pass takes twice as many. The
    backward pass of the first layer takes only as many as its forward pass, because the network input needs no
    gradient.

    Args:
        layers: (number of inputs, number of outputs) of each layer.
        unused: FLOPs of the forward pass that a prediction does not need, because hard gates skip experts.
    """
    products = [2 * num_in * num_out for num_in, num_out in layers]
    forward = sum(products)
    return Flops(forward, 3 * forward - products[0], forward - unused)
