"""Convert images to the format in which they are stored on the device, and stored images to network inputs.

Shapes: n images, s height and width of an image, i inputs of a multilayer perceptron (MLP).
"""

import torch
from torch import Tensor

from vision.datasets import Pixels


class Inputs:
    """Base class. It stores the pixels of examples as floats, and networks read these floats without a change."""

    def to_storage(self, images: Tensor) -> Tensor:
        """Return images in the format in which the device stores them, [..., any shape].

        Args:
            images: pixels, uint8 [..., channels * height * width].
        """
        return images.float()

    def to_input(self, stored: Tensor) -> Tensor:
        """Convert stored examples to network inputs for evaluation, without augmentation."""
        return stored

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Return random augmentation parameters for the examples of one epoch, [n, ...] on the CPU.

        Return None if examples are not augmented.
        """
        return None

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Convert stored examples to augmented network inputs for training.

        Args:
            stored: stored examples, [n, ...].
            augmentation: parameters of these examples from `draw_augmentation`, [n, ...], or None for no augmentation.
        """
        return self.to_input(stored)


class Vectors(Inputs):
    """Inputs of MLPs, float [..., i]. Images are normalised once, before they are stored.

    Args:
        pixels: the normalisation of pixels.
    """

    def __init__(self, pixels: Pixels):
        self._pixels = pixels

    def to_storage(self, images: Tensor) -> Tensor:
        return self._pixels.normalise(images)


class Images(Inputs):
    """Inputs of convolutional networks, float [..., s, s, channels]. Images are stored as bytes in this layout.

    In training, each image gets a border of `padding` pixels, is cropped at random to its original size, and is flipped
    horizontally with probability 1/2. Crops and flips are sampled again for each example in each epoch, and are applied
    on the device.

    Args:
        pixels: the normalisation of pixels.
        num_channels: number of channels of an image.
        side: height and width of an image, s.
        padding: width of the border in pixels; 0 turns off both crops and flips.
        border: normalised value of the border pixels (-1.9 in the authors' code). None means black, the pixel value 0.
    """

    def __init__(self, pixels: Pixels, num_channels: int, side: int, padding: int = 4, border: float | None = None):
        self._num_channels, self._side, self._padding, self._border = num_channels, side, padding, border
        # A normalised value is shift + scale * pixel. Compute shift and scale from the pixel values 0 and 1.
        ends = pixels.normalise(torch.arange(2, dtype=torch.uint8)[:, None].expand(2, num_channels))
        self._shift, self._scale = ends[0], ends[1] - ends[0]

    def to_storage(self, images: Tensor) -> Tensor:
        image = images.unflatten(-1, (self._num_channels, self._side, self._side))
        return image.movedim(-3, -1).contiguous()

    def to_input(self, stored: Tensor) -> Tensor:
        # Compute on complete rows of pixels, because inner loops over only three channels would be slow.
        shift, scale = (value.to(stored.device).repeat(stored.shape[-2]) for value in (self._shift, self._scale))
        return torch.addcmul(shift, stored.flatten(-2).float(), scale).view(stored.shape)

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Return the crop and flip of each example, [n, 3], or None if `padding` is 0.

        The three numbers are the first row and the first column of the crop in the padded image, and 1 if the image is
        flipped or 0 if not.
        """
        if not self._padding:
            return None
        corners = torch.randint(2 * self._padding + 1, (num_examples, 2), generator=generator)
        return torch.cat([corners, torch.randint(2, (num_examples, 1), generator=generator)], dim=1)

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Return cropped and flipped images as network inputs, float [n, s, s, channels].

        Args:
            stored: stored images, uint8 [n, s, s, channels].
            augmentation: crop and flip of each image, from `draw_augmentation`, [n, 3]. If None, nothing is augmented.
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
