"""A block of the VGG: convolutions and max pooling, computed by narrow.c where that is the faster, else by torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vision.networks.conv import ConvLayer, MaxPool
from vision.networks.narrow import NarrowBlock


class ConvBlock:
    """Convolutions, one after the other, and max pooling: [b, s, s, C] to [b, s/2, s/2, D].

    Args:
        layers: of one network.
    """

    def __init__(self, layers: Sequence[ConvLayer]):
        self._layers, self._pool, self._narrow = list(layers), MaxPool(), NarrowBlock(layers)
        self._was_narrow = False
        """Whether the last pass in training was."""

    def compute_in(self, dtype: torch.dtype) -> None:
        """What products are computed in."""
        for layer in self._layers:
            layer.compute_in = dtype

    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        is_narrow = self._layers[0].compute_in is torch.float32 and self._narrow.takes(x)
        if training:
            if is_narrow is not self._was_narrow:
                self.forget()
            self._was_narrow = is_narrow
        if is_narrow:
            return self._narrow.forward(x, training)
        for layer in self._layers:
            x = layer.forward(x, training)
        return self._pool.forward(x, training)

    def forget(self) -> None:
        """Let go of what `backward` needed."""
        self._narrow.forget()
        self._pool.forget()
        for layer in self._layers:
            layer.forget()

    def backward(self, dy: Tensor, wants_dx: bool = True) -> Tensor | None:
        """Fill the gradients of all layers; give that of the input, where it is wanted."""
        if self._was_narrow:
            return self._narrow.backward(dy, wants_dx)
        dx: Tensor | None = self._pool.backward(dy)
        for number in range(len(self._layers) - 1, -1, -1):
            assert dx is not None
            dx = self._layers[number].backward(dx, wants_dx or number > 0)
        return dx
