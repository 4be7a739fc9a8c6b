"""The form of a network that growth works on: a chain of layers with ReLU, followed by a linear head.

A unit is an output channel of a convolution or a hidden unit of a multilayer perceptron. A norm is a batch
normalisation layer. All forward passes are in evaluation mode, so the running statistics of the norms do not change.

Shapes: b examples, s x s pixels of an image, C inputs and D outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.networks.narrow import EPS


@dataclass(frozen=True)
class Norm:
    """Batch normalisation in evaluation mode. Every tensor has shape [D], one element per unit."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    variance: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` normalised. The shape does not change."""
        return F.batch_norm(x, self.mean, self.variance, self.scale, self.shift, training=False, eps=EPS)

    def select(self, units: Tensor) -> "Norm":
        """Return a norm for only some units of this norm. `units` contains their indices."""
        return Norm(self.scale[units], self.shift[units], self.mean[units], self.variance[units])

    def join(self, other: "Norm") -> "Norm":
        """Return a norm for the units of both norms: first the units of `self`, then the units of `other`."""
        return Norm(
            torch.cat([self.scale, other.scale]),
            torch.cat([self.shift, other.shift]),
            torch.cat([self.mean, other.mean]),
            torch.cat([self.variance, other.variance]),
        )

    @staticmethod
    def identity(like: Tensor, num_units: int) -> "Norm":
        """Return a norm for `num_units` units with mean 0, variance 1, scale 1 and shift 0.

        Args:
            like: a tensor with the device and the dtype of the new norm.
            num_units: number of units, D.
        """
        zeros, ones = like.new_zeros(num_units), like.new_ones(num_units)
        return Norm(ones, zeros, zeros, ones)


@dataclass(frozen=True)
class Layer:
    """One layer with ReLU. A convolution computes relu(norm(W x)), a linear layer relu(W x + bias)."""

    weight: Tensor
    """Weights for C inputs and D outputs, [D, C, 3, 3] for a convolution or [D, C] for a linear layer."""
    bias: Tensor | None
    """Biases, [D], or None if the layer has a norm."""
    norm: Norm | None
    """Batch normalisation between the convolution and ReLU. None for a linear layer."""
    is_pooled: bool = False
    """True if 2 x 2 max pooling follows the layer."""

    @property
    def width(self) -> int:
        """Number of units, D."""
        return len(self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution or the matrix product of `x` with the given weights, without a bias.

        Args:
            x: input of this layer, [b, C] or [b, C, s, s].
            weight: weights with any number of outputs, [outputs, C] or [outputs, C, 3, 3].
        """
        return F.conv2d(x, weight, padding=1) if weight.dim() == 4 else F.linear(x, weight)

    def activate(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return relu(norm(x)), or relu(x) if `norm` is None."""
        return (x if norm is None else norm(x)).relu()

    def add_bias(self, x: Tensor) -> Tensor:
        """Return x + bias, or `x` if the layer has no bias."""
        return x if self.bias is None else x + self.bias

    def output(self, x: Tensor) -> Tensor:
        """Return the output of the layer for the input `x`, before pooling: [b, D] or [b, D, s, s]."""
        return self.activate(self.add_bias(self.product(x, self.weight)), self.norm)

    def pool(self, x: Tensor) -> Tensor:
        """Return `x` after 2 x 2 max pooling, or `x` unchanged if no pooling follows this layer."""
        return F.max_pool2d(x, 2) if self.is_pooled else x


@dataclass(frozen=True)
class Chain:
    """One network: a sequence of layers, followed by a linear head."""

    layers: list[Layer]
    """All layers except the head, in order."""
    head_weight: Tensor
    """Weights of the head, [classes, D of the last layer]."""
    head_bias: Tensor
    """Biases of the head, [classes]."""

    @property
    def widths(self) -> list[int]:
        """Number of units of each layer."""
        return [layer.width for layer in self.layers]

    def num_params(self, widths: Sequence[int] | None = None) -> int:
        """Return the number of parameters that this network would have if its layers had the given widths.

        Args:
            widths: number of units of each layer. By default, the widths of this network.
        """
        first = self.layers[0].weight
        num_in, kernel_size, total = first.shape[1], first[0, 0].numel(), 0
        for layer, width in zip(self.layers, widths or self.widths, strict=True):
            total += num_in * width * kernel_size + (width if layer.norm is None else 2 * width)
            num_in = width
        return total + (num_in + 1) * len(self.head_bias)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits in evaluation mode, [b, classes].

        Args:
            x: examples, [b, inputs] or [b, channels, s, s].
        """
        for layer in self.layers:
            x = layer.pool(layer.output(x))
        return F.linear(head_input(x), self.head_weight, self.head_bias)


def head_input(x: Tensor) -> Tensor:
    """Return what the head reads, [b, D]: for images [b, D, s, s], the mean over the pixels."""
    return x.mean((2, 3)) if x.dim() == 4 else x
