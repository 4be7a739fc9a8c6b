"""Growth in depth: insert new layers whose output differs only slightly from their input.

A candidate is a possible new layer after one of the layers of the network. There is one candidate per layer.

Shapes: b examples, s x s pixels of an image, D outputs of a layer. The weights of a new layer have the shape
[D, D, 3, 3] (convolution) or [D, D] (linear layer).
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError
from vision.firefly.chain import Chain, Layer, Norm, head_input
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
from vision.networks.narrow import EPS

logger = logging.getLogger(__name__)


class DepthCandidates:
    """A network with one candidate, a new layer, after each of its layers.

    If pooling follows a layer of the network, the new layer is inserted between this layer and the pooling.

    A new layer computes relu(x + noise(x)), where `noise` is a convolution or a linear map with small random weights.
    Its input x is the output of a ReLU and therefore not negative. So if the noise is 0, the output of the new layer
    is x, and the new layer does not change the network.

    Args:
        chain: the network.
        draw_uniform: function that returns uniform random numbers in [0, 1).
    """

    def __init__(self, chain: Chain, draw_uniform: Draw):
        self.chain = chain
        self.noise = [
            trainable((draw_uniform((layer.width, layer.width, *layer.weight.shape[2:])) * 2 - 1) * 0.01)
            for layer in chain.layers
        ]
        """For each layer of the chain, the noise of the new layer after it, [D, D] or, for a convolution, [D, D, 3, 3].
        The weights of the new layer are the identity (weights that return the input unchanged) plus the noise."""

    @property
    def variables(self) -> list[Tensor]:
        """The noise of all candidates: small random weights, which the first of the two ranking passes trains."""
        return self.noise

    def penalty(self) -> Tensor:
        """Return the penalty that is added to the loss, a scalar. It keeps the noise of the new layers small."""
        return SPLIT_PENALTY * sum_of_squares(self.noise)

    def gates(self) -> list[Tensor]:
        """Return the gates of the candidates: for each layer a tensor [1] that is 0 and requires gradients.

        The second ranking pass multiplies the noise of a candidate by 1 + gate, and the gradient of the loss with
        respect to the gate is the score of the candidate.
        """
        return [torch.zeros(1, device=noise.device, requires_grad=True) for noise in self.noise]

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits of the network with all new layers, [b, classes].

        Args:
            x: examples, [b, inputs] or [b, channels, s, s].
            gates: the gates from `gates()`, in the second ranking pass. None in the first pass.
        """
        for number, layer in enumerate(self.chain.layers):
            x = layer.output(x)
            noise = layer.product(x, self.noise[number])
            if gates is not None:
                # Multiply the noise by 1 + gate, because the score is the gradient with respect to the gate. All gates
                # are 0, so the product noise * gate adds only zeros to the gradient with respect to `noise`. detach()
                # saves the computation of these zeros.
                noise = noise + noise.detach() * gates[number]
            x = layer.pool((x + noise).relu())
        return F.linear(head_input(x), self.chain.head_weight, self.chain.head_bias)

    def grown_chain(self, places: Sequence[int], batches: BatchSource, with_noise: bool = True) -> Chain:
        """Return the network with a new layer after each of the given layers.

        The weights of a new layer are the identity plus small random weights, the noise. Without the noise, the new
        layer must not change its input. So if the new layer has a norm (batch normalisation), the output of the norm
        must equal the input of the norm. Therefore the norm gets the mean and the variance of the input of the new
        layer, and a scale and a shift that undo the normalisation.

        Args:
            places: indices of the layers (from 0) after which a new layer is inserted.
            batches: the data from which the means and variances of the new norms are computed. One epoch is read.
            with_noise: if False, the weights of a new layer are the identity without noise. Then the new layers do not
                change the output of the network.
        """
        normed = [place for place in places if self.chain.layers[place].norm]
        moments = _moments(self.chain, normed, batches()) if normed else {}
        layers = []
        for number, layer in enumerate(self.chain.layers):
            if number not in places:
                layers.append(layer)
                continue
            # If pooling follows the old layer, move the pooling behind the new layer.
            layers.append(replace(layer, is_pooled=False))
            weight = _identity_weight(layer) + self.noise[number].detach() * with_noise
            norm, bias = None, None if layer.bias is None else torch.zeros_like(layer.bias)
            if number in moments:
                mean, variance = moments[number]
                # Choose the scale sqrt(variance + EPS) and the shift `mean`, so that the norm does not change its input
                # x: (x - mean) / sqrt(variance + EPS) * scale + shift = x.
                norm = Norm((variance + EPS).sqrt(), mean, mean, variance)
            layers.append(Layer(weight, bias, norm, layer.is_pooled))
        return replace(self.chain, layers=layers)


def grow_depth(
    chain: Chain, batches: BatchSource, num_layers: int, generator: torch.Generator, max_params: int | None = None
) -> Growth:
    """Return the network grown in depth: new layers are inserted where they lower the loss fastest.

    Args:
        chain: the network. It is not modified.
        batches: the data that the next stage trains on.
        num_layers: number of new layers. If `max_params` does not allow so many, fewer are added.
        generator: random generator for the noise, the small random part of the weights of new layers.
        max_params: largest number of parameters of the grown network, or None for no limit. New layers are added from
            the best score to the worst. If the network would exceed the limit with the next one, growth ends and a
            warning is logged.

    Raises:
        SettingError: if `num_layers` is larger than the number of layers of the network.
    """
    if num_layers > len(chain.layers):
        raise SettingError(
            f"grow_depth={num_layers} is too large: each of the {len(chain.layers)} layers of the network can be "
            f"followed by at most one new layer. Set grow_depth to at most {len(chain.layers)}"
        )
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
        logger.warning(
            "added only %d of %d new layers, because with one more layer the network would have more parameters than "
            "this stage's limit of %d",
            len(places), num_layers, max_params,
        )  # fmt: skip
    if places and any(layer.norm for layer in chain.layers):
        # Add the FLOPs of the forward pass over all examples in which `grown_chain` computes the means and variances of
        # the new norms.
        with torch.no_grad():
            flops += flops_of_call(lambda: chain.logits(example)) * num_examples
    return Growth(candidates.grown_chain(places, batches), flops)


def _identity_weight(layer: Layer) -> Tensor:
    """Return weights with which a new layer after `layer` returns its input unchanged, [D, D] or [D, D, 3, 3]."""
    eye = torch.eye(layer.width, device=layer.weight.device, dtype=layer.weight.dtype)
    return F.pad(eye[..., None, None], (1, 1, 1, 1)) if layer.weight.dim() == 4 else eye


@torch.no_grad()
def _moments(chain: Chain, places: Sequence[int], batches: Iterable[Batch]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the mean [D] and the variance [D] of the output of each given layer, over all examples and pixels.

    The output is taken before pooling.

    Args:
        chain: the network.
        places: indices of the layers, from 0. The result contains one entry per index.
        batches: the batches of one epoch.
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
