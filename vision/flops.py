"""The FLOPs of a network: by a closed form that tests compare with torch's counter, or by that counter itself.

A multiplication and its addition are two FLOPs. Only matrix products and convolutions are counted, as torch's counter
does. The count belongs to the model, however it is computed: every expert and every gate is counted once per example.
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
    """FLOPs of an update: forward and backward."""
    prediction: int
    """FLOPs of a forward pass in evaluation mode: hard gates compute one expert per layer, soft gates all of them."""


def count_flops(network: nn.Module, input_shape: tuple[int, ...]) -> Flops:
    """Return the FLOPs of a network by torch's counter.

    Args:
        network: maps a batch of examples to logits [b, C]. It is left in evaluation mode.
        input_shape: shape of one example.
    """
    # In evaluation mode, because a batch of one example has no statistics. The count is the same.
    network.eval()
    example = torch.zeros(1, *input_shape)
    with torch.no_grad():
        forward = flops_of_call(lambda: network(example))
    training = flops_of_call(lambda: network(example).sum().backward())
    return Flops(forward, training, forward)


def flops_of_call(call: Callable[[], object]) -> int:
    """Return the FLOPs that torch counts while `call` runs."""
    # Imported here, because the import takes a second.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def linear_flops(layers: Sequence[tuple[int, int]], unused: int = 0) -> Flops:
    """Return the FLOPs of linear layers, one after the other, by the closed form.

    A layer costs 2 x inputs x outputs FLOPs forward and twice that backward. The first layer costs only once that
    backward, because its input needs no gradient.

    Args:
        layers: (inputs, outputs) of each layer.
        unused: FLOPs of a forward pass that a prediction saves.
    """
    products = [2 * num_in * num_out for num_in, num_out in layers]
    forward = sum(products)
    return Flops(forward, 3 * forward - products[0], forward - unused)
