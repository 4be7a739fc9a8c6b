"""Change the size of images."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.datasets.examples import Dataset, Examples, image_parts


def resized_dataset(dataset: Dataset, size: int) -> Dataset:
    """Return a dataset with square images of `size` x `size` pixels; the dataset itself if its images are such images.

    Each image is scaled, with antialiasing, until its shorter side has `size` pixels. Then the square in its middle is
    cut out. The normalisation of the dataset does not change.
    """
    channels, height, width = dataset.image_shape
    if (height, width) == (size, size):
        return dataset
    parts = [
        Examples(resized(examples.images, dataset.image_shape, size), examples.labels)
        for examples in (dataset.training, dataset.test)
    ]
    return replace(dataset, image_shape=(channels, size, size), training=parts[0], test=parts[1])


def resized(images: Tensor, shape: tuple[int, int, int], size: int) -> Tensor:
    """Return images with another size, as `resized_dataset` does.

    Args:
        images: pixels, uint8 or float32 [n, channels * height * width].
        shape: shape of an image, (channels, height, width).
        size: new height and width.
    """
    height, width, top, left = scaled(shape[1], shape[2], size)
    found = []
    for part in image_parts(images):
        x = F.interpolate(part.unflatten(1, shape).float(), (height, width), mode="bilinear", antialias=True)
        x = x[..., top : top + size, left : left + size].flatten(1)
        found.append(x.contiguous() if part.is_floating_point() else x.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(found)


def scaled(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Return height and width of the scaled image, and the first row and column of the square in its middle."""
    shorter = min(height, width)
    height, width = max(size, round(height * size / shorter)), max(size, round(width * size / shorter))
    return height, width, (height - size) // 2, (width - size) // 2
