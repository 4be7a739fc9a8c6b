"""How an image becomes a network input: the form in which it is stored on the device, and what a batch makes of it.

Shapes: n images, s side of an image, i inputs of a perceptron.
"""

import torch
from torch import Tensor

from vision.datasets import Pixels


class Inputs:
    """The base class, for examples that are numbers already: they are stored as floats and read unchanged."""

    def to_storage(self, images: Tensor) -> Tensor:
        """Return images in the form in which they are stored, [..., any shape].

        Args:
            images: [..., channels * height * width] of uint8.
        """
        return images.float()

    def to_input(self, stored: Tensor) -> Tensor:
        """Return network inputs for evaluation, without augmentation."""
        return stored

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Return random augmentation parameters for the examples of one epoch, [n, ...] on the CPU, or None."""
        return None

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Return network inputs for training.

        Args:
            stored: [n, ...], examples as they are stored.
            augmentation: [n, ...], drawn by `draw_augmentation`.
        """
        return self.to_input(stored)


class Vectors(Inputs):
    """The inputs of perceptrons, [..., i] of float: images are normalised once, before they are stored.

    Args:
        pixels: how a pixel becomes a number.
    """

    def __init__(self, pixels: Pixels):
        self._pixels = pixels

    def to_storage(self, images: Tensor) -> Tensor:
        return self._pixels.normalise(images)


class Images(Inputs):
    """The inputs of convolutions: stored as bytes, [..., s, s, channels], read as floats, channels last.

    In training, each image is cropped at random from itself with a border of `padding` pixels, and flipped with
    probability 1/2. Crop and flip are drawn anew for each example of each epoch, and applied on the device.

    Args:
        pixels: how a pixel becomes a number.
        num_channels: number of channels of an image.
        side: s.
        padding: width of the border in pixels; 0 turns off both crops and flips.
        border: the normalised value of border pixels (the original code: -1.9). None means black, pixels of 0.
    """

    def __init__(self, pixels: Pixels, num_channels: int, side: int, padding: int = 4, border: float | None = None):
        self._num_channels, self._side, self._padding, self._border = num_channels, side, padding, border
        # Normalisation is linear, so its values for the pixels 0 and 1 of each channel describe it.
        ends = pixels.normalise(torch.arange(2, dtype=torch.uint8)[:, None].expand(2, num_channels))
        self._shift, self._scale = ends[0], ends[1] - ends[0]

    def to_storage(self, images: Tensor) -> Tensor:
        image = images.unflatten(-1, (self._num_channels, self._side, self._side))
        return image.movedim(-3, -1).contiguous()

    def to_input(self, stored: Tensor) -> Tensor:
        # Computed on whole rows of pixels, because loops over only three channels would be slow.
        shift, scale = (value.to(stored.device).repeat(stored.shape[-2]) for value in (self._shift, self._scale))
        return torch.addcmul(shift, stored.flatten(-2).float(), scale).view(stored.shape)

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Return [n, 3]: the first row and column of the crop in the padded image, and 1 if the image is flipped."""
        if not self._padding:
            return None
        corners = torch.randint(2 * self._padding + 1, (num_examples, 2), generator=generator)
        return torch.cat([corners, torch.randint(2, (num_examples, 1), generator=generator)], dim=1)

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Return cropped and flipped images, [n, s, s, channels] of float.

        Args:
            stored: [n, s, s, channels] of uint8.
            augmentation: [n, 3], drawn by `draw_augmentation`.
        """
        if augmentation is None:
            return self.to_input(stored)
        side, padding, channels = self._side, self._padding, self._num_channels
        padded_side = side + 2 * padding
        source = stored if self._border is None else self.to_input(stored)
        padded = torch.nn.functional.pad(
            source, (0, 0, padding, padding, padding, padding), value=0 if self._border is None else self._border
        )
        positions = torch.arange(side, device=stored.device)
        rows_ns = positions + augmentation[:, :1]
        columns_ns = torch.where(augmentation[:, 2:].bool(), side - 1 - positions, positions) + augmentation[:, 1:2]
        first_n11 = torch.arange(len(stored), device=stored.device).mul_(padded_side * padded_side)[:, None, None]
        index = first_n11 + rows_ns[:, :, None] * padded_side + columns_ns[:, None, :]
        cropped = padded.view(-1, channels).index_select(0, index.view(-1)).view(stored.shape)
        return self.to_input(cropped) if self._border is None else cropped
