"""Convert images to the format in which the device stores them, and convert stored images to network inputs.

Shapes: n images of h x w pixels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_alma.app.plugins import call_own_function
from fairseq_alma.core.errors import SettingError
from vision.datasets import Pixels
from vision.seeds import seed_torch


class Inputs:
    """Base class of the conversions from images to network inputs. It stores pixels as floats, which are the inputs."""

    def to_storage(self, images: Tensor) -> Tensor:
        """Return images, uint8 or float32 [..., channels * height * width], as they are stored on the device.

        Subclasses may replace the last dimension by several dimensions, for example height, width and channels.
        """
        return images.float()

    def to_input(self, stored: Tensor) -> Tensor:
        """Return network inputs, without augmentation, for examples in the format that `to_storage` returns."""
        return stored

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw random augmentation parameters for the n examples of one epoch, for example the position of a crop.

        They are returned as [n, ...] on the CPU. None if examples are not augmented.
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
    """Conversion of images to the inputs of MLPs, float [..., inputs]. Images are normalised before they are stored."""

    def __init__(self, pixels: Pixels):
        self._pixels = pixels

    def to_storage(self, images: Tensor) -> Tensor:
        return self._pixels.normalise(images)


class Images(Inputs):
    """Conversion of images to the inputs of convolutional networks, float [..., h, w, channels].

    Images are stored as they are, uint8 or float32 [..., h, w, channels], and normalised when they are read.

    In training, each image gets a border of `padding` pixels. It is then cropped at random to its original size, and
    flipped horizontally with probability 1/2. Every epoch draws new crops and flips for all examples.

    Args:
        pixels: the normalisation of pixels.
        image_shape: shape of an image, (channels, height, width).
        padding: width of the border in pixels. If it is 0, images are neither cropped nor flipped.
        border: normalised value of the border pixels (-1.9 in the authors' code). None means black, the pixel value 0.
    """

    def __init__(
        self, pixels: Pixels, image_shape: tuple[int, int, int], padding: int = 4, border: float | None = None
    ):
        self._image_shape, self._padding, self._border = image_shape, padding, border
        # A normalised value is shift + scale * pixel.
        mean, deviation = (
            torch.tensor(value, dtype=torch.float64).expand(image_shape[0]) for value in (pixels.mean, pixels.deviation)
        )
        self._shift, self._scale = (-mean / deviation).float(), (1 / (pixels.largest * deviation)).float()

    def to_storage(self, images: Tensor) -> Tensor:
        return images.unflatten(-1, self._image_shape).movedim(-3, -1).contiguous()

    def to_input(self, stored: Tensor) -> Tensor:
        # Join the columns and channels into one dimension: torch is slow if the last dimension has only size 3.
        shift, scale = (value.to(stored.device).repeat(stored.shape[-2]) for value in (self._shift, self._scale))
        return torch.addcmul(shift, stored.flatten(-2).float(), scale).view(stored.shape)

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw the crop and flip of each example, and return them, [n, 3]. Return None if `padding` is 0.

        The numbers are the first row and the first column of the crop, counted in the image with border, and the flip
        (1 if the image is flipped, otherwise 0).
        """
        if not self._padding:
            return None
        corners = torch.randint(2 * self._padding + 1, (num_examples, 2), generator=generator)
        return torch.cat([corners, torch.randint(2, (num_examples, 1), generator=generator)], dim=1)

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        if augmentation is None:
            return self.to_input(stored)
        (channels, height, width), padding = self._image_shape, self._padding
        padded_height, padded_width = height + 2 * padding, width + 2 * padding
        # A black border is added to the stored pixels, and normalised with them. Otherwise, `border` is a normalised
        # value, so normalise the images first.
        source = stored if self._border is None else self.to_input(stored)
        padded = torch.nn.functional.pad(
            source, (0, 0, padding, padding, padding, padding), value=0 if self._border is None else self._border
        )
        rows_nh = torch.arange(height, device=stored.device) + augmentation[:, :1]
        columns = torch.arange(width, device=stored.device)
        columns_nw = torch.where(augmentation[:, 2:].bool(), width - 1 - columns, columns) + augmentation[:, 1:2]
        first_n11 = torch.arange(len(stored), device=stored.device).mul_(padded_height * padded_width)[:, None, None]
        index = first_n11 + rows_nh[:, :, None] * padded_width + columns_nw[:, None, :]
        cropped = padded.view(-1, channels).index_select(0, index.view(-1)).view(stored.shape)
        return self.to_input(cropped) if self._border is None else cropped


class Transformed(Inputs):
    """Conversion of images to network inputs in which a function of the user augments the training images.

    The function replaces the augmentation of the other conversion, for example its crop and flip. Images are stored as
    they are, uint8 or float32 [..., channels * height * width], on the device.

    The function is called for each image separately, with torch's random numbers seeded for this image. So an image
    gets the same random numbers when an interrupted stage is trained again, and when several seeds are trained
    together. The function must draw random numbers from torch only, as torchvision.transforms.v2 does.

    Args:
        inputs: the other conversion, which turns the augmented pixels into network inputs.
        transform: function from an image, uint8 or float32 [channels, height, width] on the device, to an image of the
            same shape. If it returns floats for an image of bytes, 1.0 is the pixel value 255, as in
            torchvision.transforms.v2.ToDtype(torch.float32, scale=True). The result is normalised afterwards.
    """

    def __init__(self, inputs: Inputs, image_shape: tuple[int, int, int], transform: Callable[[Tensor], Tensor]):
        self._inputs, self._image_shape, self._transform = inputs, image_shape, transform

    def to_storage(self, images: Tensor) -> Tensor:
        return images

    def to_input(self, stored: Tensor) -> Tensor:
        return self._inputs.to_input(self._inputs.to_storage(stored))

    def draw_augmentation(self, num_examples: int, generator: torch.Generator) -> Tensor | None:
        """Draw a random seed for the transform of each example, int64 [n, 1]."""
        return torch.randint(2**63 - 1, (num_examples, 1), generator=generator)

    def augment(self, stored: Tensor, augmentation: Tensor | None) -> Tensor:
        """See `Inputs`. Raise SettingError if the function returns something else than an image of the same shape."""
        if augmentation is None:
            return self.to_input(stored)
        found = []
        with torch.random.fork_rng([stored.device] if stored.is_cuda else []):
            for image, seed in zip(stored.unflatten(-1, self._image_shape), augmentation[:, 0].tolist(), strict=True):
                seed_torch(seed, stored.device)
                found.append(self._checked(call_own_function("transform", self._transform, image), stored.dtype))
        return self.to_input(torch.stack(found).flatten(1))

    def _checked(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the result of the function as pixel values. For the error, see `augment`."""
        is_image = isinstance(image, Tensor) and image.dtype in (torch.uint8, torch.float32)
        if not is_image or tuple(image.shape) != self._image_shape:
            shape = f"{image.dtype} {list(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise SettingError(
                f"transform= returned {shape}, but must return a tensor of uint8 or float32 with the shape of the "
                f"image (channels, height, width) = {self._image_shape}"
            )
        if dtype == torch.uint8 and image.is_floating_point():
            return image * 255
        return image.float()
