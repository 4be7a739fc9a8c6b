"""Convert images to the format in which they are stored on the device, and stored images to network inputs.

Shapes: n images, s height and width of an image, i inputs of a multilayer perceptron (MLP).
"""

import torch
from torch import Tensor

from vision.datasets import Pixels


class Inputs:
    """Base class of the conversions. It stores pixels as floats, and networks read these floats without a change."""

    def to_storage(self, images: Tensor) -> Tensor:
        """Return images in their storage format, [..., any shape]. The leading dimensions are those of `images`.

        Args:
            images: pixels, uint8 [..., channels * height * width].
        """
        return images.float()

    def to_input(self, stored: Tensor) -> Tensor:
        """Convert examples from their storage format to network inputs, without augmentation."""
        return stored

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw random augmentation parameters for the n examples of one epoch, and return them, [n, ...] on the CPU.

        Return None if examples are not augmented.
        """
        return None

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Augment examples at random and convert them to network inputs for training.

        Args:
            stored: examples in their storage format, [n, ...].
            augmentation: parameters of these examples, [n, ...], from `draw_augmentation`. If None, nothing is
                augmented.
        """
        return self.to_input(stored)


class Vectors(Inputs):
    """Conversion to the inputs of MLPs, float [..., i]. Images are normalised once, before they are stored.

    Args:
        pixels: the normalisation of pixels.
    """

    def __init__(self, pixels: Pixels):
        self._pixels = pixels

    def to_storage(self, images: Tensor) -> Tensor:
        return self._pixels.normalise(images)


class Images(Inputs):
    """Conversion to the inputs of convolutional networks, float [..., s, s, channels].

    Images are stored as bytes, uint8 [..., s, s, channels].

    In training, each image gets a border of `padding` pixels. It is then cropped at random to its original size, and
    flipped horizontally with probability 1/2. Every epoch draws new crops and flips for all examples.

    Args:
        pixels: the normalisation of pixels.
        num_channels: number of channels of an image.
        side: height and width of an image, s.
        padding: width of the border in pixels. If it is 0, images are neither cropped nor flipped.
        border: normalised value of the border pixels (-1.9 in the authors' code). None means black, the pixel value 0.
    """

    def __init__(self, pixels: Pixels, num_channels: int, side: int, padding: int = 4, border: float | None = None):
        self._num_channels, self._side, self._padding, self._border = num_channels, side, padding, border
        # A normalised value is shift + scale * pixel. So the pixel value 0 gives shift, and the pixel value 1 gives
        # shift + scale.
        ends = pixels.normalise(torch.arange(2, dtype=torch.uint8)[:, None].expand(2, num_channels))
        self._shift, self._scale = ends[0], ends[1] - ends[0]

    def to_storage(self, images: Tensor) -> Tensor:
        image = images.unflatten(-1, (self._num_channels, self._side, self._side))
        return image.movedim(-3, -1).contiguous()

    def to_input(self, stored: Tensor) -> Tensor:
        # Join width and channels to one long dimension, because torch would be slow with a last dimension of size 3.
        shift, scale = (value.to(stored.device).repeat(stored.shape[-2]) for value in (self._shift, self._scale))
        return torch.addcmul(shift, stored.flatten(-2).float(), scale).view(stored.shape)

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw the crop and flip of each example, and return them, [n, 3]. Return None if `padding` is 0.

        The three numbers are: the first row of the crop in the image with border, its first column, and the flip (1 if
        the image is flipped, otherwise 0).
        """
        if not self._padding:
            return None
        corners = torch.randint(2 * self._padding + 1, (num_examples, 2), generator=generator)
        return torch.cat([corners, torch.randint(2, (num_examples, 1), generator=generator)], dim=1)

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Return cropped and flipped images as network inputs, float [n, s, s, channels].

        Args:
            stored: images in their storage format, uint8 [n, s, s, channels].
            augmentation: crop and flip of each image, [n, 3], from `draw_augmentation`. If None, nothing is augmented.
        """
        if augmentation is None:
            return self.to_input(stored)
        side, padding, channels = self._side, self._padding, self._num_channels
        padded_side = side + 2 * padding
        # A black border has the pixel value 0. It is added to the stored bytes, and all pixels are normalised at the
        # end. Any other border is given as a normalised value. So the images are normalised before it is added.
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
