"""A block of the VGG: convolutions, then max pooling. The C code narrow.c computes it if this is faster, else torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vision.networks.conv import ConvLayer, MaxPool
from vision.networks.narrow import NarrowBlock


class ConvBlock:
    """A block of one network: a sequence of convolutions, then max pooling.

    The block maps [b, s, s, C] to [b, s/2, s/2, D].

    Shapes: b examples, s x s pixels of an image, C input and D output channels.

    Args:
        layers: the convolutional layers, in order.
    """

    def __init__(self, layers: Sequence[ConvLayer]):
        self._layers, self._pool, self._narrow = list(layers), MaxPool(), NarrowBlock(layers)
        self._was_narrow = False
        """True if the C code narrow.c computed the last forward pass in training mode. Then narrow.c also computes
        `backward`."""

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the convolutions: float32 or bfloat16."""
        for layer in self._layers:
            layer.compute_dtype = dtype

    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        """Return the output of the block, [b, s/2, s/2, D].

        Args:
            x: images or activations, [b, s, s, C].
            training: if True, normalise with the statistics of the batch, update the running statistics, and save what
                `backward` needs. If False, normalise with the running statistics.
        """
        is_narrow = self._layers[0].compute_dtype is torch.float32 and self._narrow.can_compute(x)
        if training:
            if is_narrow is not self._was_narrow:
                # torch computed the last forward pass and the C code narrow.c computes this one, or the reverse. torch
                # and narrow.c save tensors in different objects, so this pass does not overwrite the tensors that the
                # last pass saved. Free these tensors, because they are not needed any more.
                self.free_activations()
            self._was_narrow = is_narrow
        if is_narrow:
            return self._narrow.forward(x, training)
        for layer in self._layers:
            x = layer.forward(x, training)
        return self._pool.forward(x, training)

    def free_activations(self) -> None:
        """Free the tensors saved for `backward`."""
        self._narrow.free_activations()
        self._pool.free_activations()
        for layer in self._layers:
            layer.free_activations()

    def backward(self, dy: Tensor, wants_dx: bool = True) -> Tensor | None:
        """Write the gradients of the parameters to the field `gradient` of each layer.

        Args:
            dy: gradient with respect to the output of the last forward pass in training mode, [b, s/2, s/2, D].
            wants_dx: if True, return the gradient with respect to the input, [b, s, s, C]; else return None.
        """
        if self._was_narrow:
            return self._narrow.backward(dy, wants_dx)
        dx: Tensor | None = self._pool.backward(dy)
        for number in range(len(self._layers) - 1, -1, -1):
            assert dx is not None
            dx = self._layers[number].backward(dx, wants_dx or number > 0)
        return dx
