"""Change the size of images."""

from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vision.datasets.examples import Dataset, Examples, image_parts

GREY_MODES = ("1", "L", "LA")
"""Pillow's modes of grey images with 8 bits."""


def resized_dataset(dataset: Dataset, size: int) -> Dataset:
    """Return a dataset with square images of `size` x `size` pixels; the dataset itself if its images are such images.

    Each image is scaled, with antialiasing, until its shorter side has `size` pixels. Then the square in its middle is
    cut out. The normalisation of the dataset does not change.
    """
    channels, height, width = dataset.image_shape
    if (height, width) == (size, size):
        return dataset
    parts = [
        Examples(_resized(examples.images, dataset.image_shape, size), examples.labels)
        for examples in (dataset.training, dataset.test)
    ]
    return replace(dataset, image_shape=(channels, size, size), training=parts[0], test=parts[1])


def _resized(images: Tensor, shape: tuple[int, int, int], size: int) -> Tensor:
    height, width, top, left = _scaled(shape[1], shape[2], size)
    found = []
    for part in image_parts(images):
        x = F.interpolate(part.unflatten(1, shape).float(), (height, width), mode="bilinear", antialias=True)
        x = x[..., top : top + size, left : left + size].flatten(1)
        found.append(x.contiguous() if part.is_floating_point() else x.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(found)


def _scaled(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Return height and width of the scaled image, and the first row and column of the square in its middle."""
    shorter = min(height, width)
    height, width = max(size, round(height * size / shorter)), max(size, round(width * size / shorter))
    return height, width, (height - size) // 2, (width - size) // 2


def image_values(image: Image.Image, mode: str, size: int | None) -> np.ndarray:
    """Return the pixels of an image, uint8 [channels * height * width], channel by channel.

    Args:
        image: the image, which is decoded by this function.
        mode: "L" for grey, "RGB" for colour. The image is converted if necessary; transparency is dropped.
        size: if given, the image is resized to a square as `resized_dataset` does, by Pillow.
    """
    image = image.convert(mode)
    if size is not None and image.size != (size, size):
        height, width, top, left = _scaled(image.height, image.width, size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + size, top + size))
    values = np.asarray(image, dtype=np.uint8)
    return values.reshape(-1) if mode == "L" else values.transpose(2, 0, 1).reshape(-1)
