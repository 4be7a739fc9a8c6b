"""Growth in depth: a layer that does almost nothing is added after a layer.

Shapes: b examples, D outputs of a layer, k the 3 x 3 kernel of a convolution (nothing for a linear layer).
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError
from vision.firefly.chain import Chain, Layer, Norm
from vision.firefly.ranking import (
    SPLIT_PENALTY,
    Batch,
    BatchSource,
    Draw,
    Growth,
    best_first,
    draws,
    rank,
    sum_of_squares,
    trainable,
)
from vision.flops import flops_of_call
from vision.networks.conv import EPS

logger = logging.getLogger(__name__)


class DepthCandidates:
    """A chain with a new layer after each of its layers, before pooling. Without noise a new layer changes nothing.

    The input x of a new layer is the output of a ReLU, so that relu(x + noise(x)) = x where the noise is 0.

    Args:
        chain: the network.
        draw_uniform: returns uniform numbers in [0, 1).
    """

    def __init__(self, chain: Chain, draw_uniform: Draw):
        self.chain = chain
        self.noise = [
            trainable((draw_uniform((layer.width, layer.width, *layer.weight.shape[2:])) * 2 - 1) * 0.01)
            for layer in chain.layers
        ]
        """Per layer, [D, D, *k]: the weights of the new layer less those of the identity."""

    @property
    def variables(self) -> list[Tensor]:
        """The noise that the first pass of a ranking trains."""
        return self.noise

    def penalty(self) -> Tensor:
        """Return what is added to the loss to keep the noise small, a scalar."""
        return SPLIT_PENALTY * sum_of_squares(self.noise)

    def gates(self) -> list[Tensor]:
        """Return zeros that require gradients, [1] per layer."""
        return [torch.zeros(1, device=noise.device, requires_grad=True) for noise in self.noise]

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits of the network with all new layers, [b, classes].

        Args:
            x: examples, [b, inputs] or [b, channels, s, s].
            gates: as `gates` returns them. Only the second pass of a ranking gives them.
        """
        for number, layer in enumerate(self.chain.layers):
            x = layer.output(x)
            noise = layer.product(x, self.noise[number])
            if gates is not None:
                noise = noise + noise.detach() * gates[number]
            x = layer.pool((x + noise).relu())
        return F.linear(x.flatten(1), self.chain.head_weight, self.chain.head_bias)

    def grown_chain(self, places: Sequence[int], batches: BatchSource, with_noise: bool = True) -> Chain:
        """Return the network with a new layer after each of these layers.

        The norm of a new layer must not change its input either. So its mean and variance are those of what it will
        read, and its scale and shift undo the normalisation.

        Args:
            places: numbers of layers, from 0.
            batches: the data for the means and variances of new norms; one epoch is read.
            with_noise: if False, the new layers change nothing at all.
        """
        normed = [place for place in places if self.chain.layers[place].norm]
        moments = _moments(self.chain, normed, batches()) if normed else {}
        layers = []
        for number, layer in enumerate(self.chain.layers):
            if number not in places:
                layers.append(layer)
                continue
            layers.append(replace(layer, is_pooled=False))
            weight = _identity_weight(layer) + self.noise[number].detach() * with_noise
            norm, bias = None, None if layer.bias is None else torch.zeros_like(layer.bias)
            if number in moments:
                mean, variance = moments[number]
                norm = Norm((variance + EPS).sqrt(), mean, mean, variance)
            layers.append(Layer(weight, bias, norm, layer.is_pooled))
        return replace(self.chain, layers=layers)


def grow_depth(
    chain: Chain, batches: BatchSource, num_layers: int, generator: torch.Generator, max_params: int | None = None
) -> Growth:
    """Add layers that do almost nothing, at the places where their noise lowers the loss fastest.

    Args:
        chain: the network. It does not change.
        batches: the data that the next stage trains on.
        num_layers: the largest number of new layers.
        generator: draws the noise.
        max_params: the largest number of parameters of the grown network. Layers that would exceed it are not added,
            and a warning is logged. None sets no limit.

    Raises:
        SettingError: `num_layers` is larger than the number of layers.
    """
    if num_layers > len(chain.layers):
        raise SettingError(f"grow_depth={num_layers} is more than one new layer after each of {len(chain.layers)}")
    candidates = DepthCandidates(chain, draws(chain, generator)[0])
    scores, flops, num_examples, example = rank(candidates, batches)
    places: list[int] = []
    num_params = chain.num_params()
    for place in best_first(scores):
        num_params += chain.layers[place].num_params_of_added_layer()
        if len(places) == num_layers or (max_params is not None and num_params > max_params):
            break
        places.append(place)
    if len(places) < num_layers:
        logger.warning("%d of %d new layers fit into %d parameters", len(places), num_layers, max_params)
    if places and any(layer.norm for layer in chain.layers):
        # The statistics of new norms cost one more forward pass of the network.
        with torch.no_grad():
            flops += flops_of_call(lambda: chain.logits(example)) * num_examples
    return Growth(candidates.grown_chain(places, batches), flops)


def _identity_weight(layer: Layer) -> Tensor:
    """Return the weights [D, D, *k] of a layer after `layer` whose output is its input."""
    eye = torch.eye(layer.width, device=layer.weight.device, dtype=layer.weight.dtype)
    return F.pad(eye[..., None, None], (1, 1, 1, 1)) if layer.weight.dim() == 4 else eye


@torch.no_grad()
def _moments(chain: Chain, places: Sequence[int], batches: Iterable[Batch]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return mean [D] and variance [D] of the outputs of some layers, over all examples and pixels.

    Args:
        chain: the network.
        places: numbers of layers, from 0.
        batches: one epoch.
    """
    like = chain.head_weight
    sums = {place: [like.new_zeros(chain.layers[place].width).double() for _ in range(2)] for place in places}
    counts = dict.fromkeys(places, 0)
    for x, _ in batches:
        for number, layer in enumerate(chain.layers[: max(places) + 1]):
            x = layer.output(x)
            if number in sums:
                rows = x.movedim(1, -1).flatten(0, -2).double()
                counts[number] += len(rows)
                sums[number][0] += rows.sum(0)
                sums[number][1] += rows.square().sum(0)
            x = layer.pool(x)
    moments = {}
    for place, (total, squares) in sums.items():
        mean = total / counts[place]
        variance = (squares / counts[place] - mean.square()).clamp_min(0)
        moments[place] = (mean.to(like), variance.to(like))
    return moments
