"""Count the FLOPs of a network, either with torch's FLOP counter or with a formula for linear layers.

Tests check that the counter and the formula give the same number.

One multiplication is one FLOP, and one addition is one FLOP. As in torch's counter, only matrix products and
convolutions are counted. Every expert and every gate is counted once per example, no matter how our code computes the
experts and gates. Exception: `Flops.prediction` counts only the experts that hard gates choose.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one network for one example."""

    forward: int
    """FLOPs of a forward pass."""
    training: int
    """FLOPs of the forward and the backward pass of an update."""
    prediction: int
    """FLOPs of a forward pass that predicts. With soft gates, a prediction uses all experts of each mixture. With hard
    gates, it uses only one."""


def count_flops(network: nn.Module, input_shape: tuple[int, ...]) -> Flops:
    """Return the FLOPs of a network for one example of the given shape, counted by torch's FLOP counter.

    This function switches the module to evaluation mode, because in training mode batch normalisation cannot compute a
    variance from one example. Both modes have the same number of FLOPs.
    """
    network.eval()
    example = torch.zeros(1, *input_shape, device=next(network.parameters()).device)
    # Some versions of torch count fused operations as 0: attention, and recurrent networks with mkldnn or cuDNN.
    mkldnn = torch.backends.mkldnn.flags(enabled=False)
    with torch.enable_grad(), mkldnn, _without_cudnn(), sdpa_kernel(SDPBackend.MATH):
        forward = flops_of_call(lambda: network(example))
        training = flops_of_call(lambda: network(example).sum().backward())
    return Flops(forward, training, forward)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Do not use cuDNN in a `with` block."""
    previous = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = previous


def flops_of_call(call: Callable[[], object]) -> int:
    """Execute `call` and return the number of its FLOPs, counted by torch's FLOP counter."""
    from torch.utils.flop_counter import FlopCounterMode  # this import takes a second

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def linear_flops(layers: Sequence[tuple[int, int]], unused: int = 0) -> Flops:
    """Return the FLOPs of a sequence of linear layers for one example, computed with a formula.

    The forward pass of a layer takes 2 x inputs x outputs FLOPs. The backward pass takes twice as many. Exception: in
    the first layer, both passes take equally many, because the network input needs no gradient.

    Args:
        layers: (number of inputs, number of outputs) of each layer.
        unused: FLOPs of the experts that a prediction does not compute, because hard gates do not choose them.
    """
    products = [2 * num_in * num_out for num_in, num_out in layers]
    forward = sum(products)
    return Flops(forward, 3 * forward - products[0], forward - unused)
