"""Convert images to the format in which the device stores them, and convert stored images to network inputs.

Shapes: n images, s height and width of an image.
"""

import torch
from torch import Tensor

from vision.datasets import Pixels


class Inputs:
    """Base class of the conversions from images to network inputs.

    The base class itself stores pixels as floats. The stored floats are the network inputs.
    """

    def to_storage(self, images: Tensor) -> Tensor:
        """Return images in the format in which they are stored on the device.

        The result has the same dimensions as `images`, except the last. Subclasses may replace the last dimension by
        several dimensions, for example height, width and channels.

        Args:
            images: pixels, uint8 [..., channels * height * width].
        """
        return images.float()

    def to_input(self, stored: Tensor) -> Tensor:
        """Return network inputs, without augmentation, for examples in the format that `to_storage` returns."""
        return stored

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw random augmentation parameters for the n examples of one epoch, and return them, [n, ...] on the CPU.

        Augmentation parameters are, for example, the position of a random crop. Return None if examples are not
        augmented.
        """
        return None

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Augment examples with the given random parameters, and return them as network inputs for training.

        Args:
            stored: examples in the format that `to_storage` returns, [n, ...].
            augmentation: augmentation parameters of these examples, [n, ...], from `draw_augmentation`. If None,
                nothing is augmented.
        """
        return self.to_input(stored)


class Vectors(Inputs):
    """Conversion of images to the inputs of multilayer perceptrons (MLPs), float [..., inputs].

    Images are normalised once, before they are stored.

    Args:
        pixels: the normalisation of pixels.
    """

    def __init__(self, pixels: Pixels):
        self._pixels = pixels

    def to_storage(self, images: Tensor) -> Tensor:
        return self._pixels.normalise(images)


class Images(Inputs):
    """Conversion of images to the inputs of convolutional networks, float [..., s, s, channels].

    Images are stored as bytes, uint8 [..., s, s, channels], and normalised when they are read.

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
        # A normalised value is shift + scale * pixel. To compute shift and scale, normalise the pixel values 0 and 1:
        # the results are shift and shift + scale.
        ends = pixels.normalise(torch.arange(2, dtype=torch.uint8)[:, None].expand(2, num_channels))
        self._shift, self._scale = ends[0], ends[1] - ends[0]

    def to_storage(self, images: Tensor) -> Tensor:
        image = images.unflatten(-1, (self._num_channels, self._side, self._side))
        return image.movedim(-3, -1).contiguous()

    def to_input(self, stored: Tensor) -> Tensor:
        # `_shift` and `_scale` have one value per channel. Repeat the values for each column of the image, because the
        # columns and channels are joined into one dimension: torch is slow if the last dimension has only size 3.
        shift, scale = (value.to(stored.device).repeat(stored.shape[-2]) for value in (self._shift, self._scale))
        return torch.addcmul(shift, stored.flatten(-2).float(), scale).view(stored.shape)

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw the crop and flip of each example, and return them, [n, 3]. Return None if `padding` is 0.

        The three numbers of an example are the first row of the crop, the first column of the crop (both counted in the
        image with border), and the flip (1 if the image is flipped, otherwise 0).
        """
        if not self._padding:
            return None
        corners = torch.randint(2 * self._padding + 1, (num_examples, 2), generator=generator)
        return torch.cat([corners, torch.randint(2, (num_examples, 1), generator=generator)], dim=1)

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """Return cropped and flipped images as network inputs, float [n, s, s, channels].

        Args:
            stored: images as `to_storage` returns them, uint8 [n, s, s, channels].
            augmentation: crop and flip of each image, [n, 3], from `draw_augmentation`. If None, nothing is augmented.
        """
        if augmentation is None:
            return self.to_input(stored)
        side, padding, channels = self._side, self._padding, self._num_channels
        padded_side = side + 2 * padding
        # If `border` is None, the border is black: it has the pixel value 0, so add it to the stored bytes, and
        # normalise all pixels at the end. Otherwise, `border` is a normalised value, so normalise the images first.
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
