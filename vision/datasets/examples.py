"""Labelled images, the normalisation of their pixels, and datasets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError

PART_BYTES = 64 * 2**20
"""Approximate size, in bytes, of the parts in which all images of a dataset are read."""


@dataclass(frozen=True)
class Examples:
    """Images and their classes. `examples[indices]` returns the examples at the positions in the tensor `indices`."""

    images: Tensor
    """Pixels, uint8 or float32 [n, channels * height * width], stored channel by channel, and row by row within a
    channel. The memory of this tensor may be a file (see `vision.datasets.image_cache`), so the images of a large
    dataset are read from disk when they are needed."""
    labels: Tensor
    """Class indices, int64 [n]."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Tensor) -> "Examples":
        return Examples(self.images.index_select(0, which), self.labels.index_select(0, which))


class Selection:
    """Some examples of a dataset. Their images are copied each time they are asked for, and not before.

    So the mega-batches of a stream need no memory of their own. A selection gives access to its own examples only: a
    learner that gets the selection of a mega-batch cannot read mega-batches that have not arrived.

    Args:
        positions: positions of the selected examples in `source`, int64 [n].
    """

    def __init__(self, source: Examples, positions: Tensor):
        self._source, self._positions = source, positions

    @staticmethod
    def join(parts: "Sequence[Examples | Selection]") -> "Selection | None":
        """Return some selections of one source as one selection; None if they do not have the same source."""
        selections = [part for part in parts if isinstance(part, Selection)]
        if len(selections) < len(parts) or len({id(part._source) for part in selections}) != 1:
            return None
        return Selection(selections[0]._source, torch.cat([part._positions for part in selections]))

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, which: Tensor) -> Examples:
        return self._source[self._positions[which]]

    @property
    def images(self) -> Tensor:
        """A copy of the images, uint8 or float32 [n, channels * height * width]."""
        return self._source.images.index_select(0, self._positions)

    @property
    def labels(self) -> Tensor:
        """A copy of the class indices, int64 [n]."""
        return self._source.labels.index_select(0, self._positions)


def examples_at_once(images: Tensor) -> int:
    """Return the number of images that have about PART_BYTES bytes, at least one, for images [n, ...]."""
    return max(1, PART_BYTES // max(1, images[:1].nbytes))


def image_parts(images: Tensor) -> Iterator[Tensor]:
    """Yield the images [n, ...] in parts of about PART_BYTES bytes, in order."""
    yield from images.split(examples_at_once(images))


@dataclass(frozen=True)
class Pixels:
    """Normalises pixel values: divides them by `largest`, subtracts `mean`, and divides by `deviation`.

    Raises:
        SettingError: if `mean` and `deviation` have different numbers of channels.
    """

    largest: float
    """The largest possible pixel value of the dataset, for example 255; 1 for images that are stored as floats."""
    mean: float | tuple[float, ...]
    """Mean of the pixel values after division by `largest`: one number for all channels, or one number per channel."""
    deviation: float | tuple[float, ...]
    """Standard deviation of the pixel values after division by `largest`: one number for all channels, or a tuple with
    one number per channel."""

    def __post_init__(self):
        if len(_by_channel(self.mean)) != len(_by_channel(self.deviation)):
            raise SettingError(f"mean={self.mean} and deviation={self.deviation} must have the same number of channels")

    def normalise(self, images: Tensor) -> Tensor:
        """Return images, uint8 or float32 [..., channels * height * width], as normalised floats of the same shape."""
        x = images.to(torch.float32, copy=True).div_(self.largest)
        means, deviations = _by_channel(self.mean), _by_channel(self.deviation)
        # Normalise channel by channel and in place, so that no second tensor of the size of x is allocated.
        channels = x.unflatten(-1, (len(means), -1)).unbind(-2)
        for channel, mean, deviation in zip(channels, means, deviations, strict=True):
            channel.sub_(mean).div_(deviation)
        return x


def _by_channel(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def measured_pixels(images: Tensor, num_channels: int, at_most: int = 10_000) -> Pixels:
    """Return the normalisation of training images: mean and standard deviation of each channel.

    They are computed from at most `at_most` of the images, which are drawn with a fixed seed. So all runs of a dataset
    have the same normalisation, whatever their seeds are. The images may include mega-batches that arrive later, as
    do the images on which the published numbers for MNIST and CIFAR were measured. If all pixels of a channel are
    equal, its standard deviation is set to 1.

    Args:
        images: all training images, uint8 or float32 [n, num_channels * height * width].
        num_channels: number of channels.
        at_most: number of images to draw.
    """
    # RandomState(0) would draw the first mega-batches of seed=0, because `vision.stream` shuffles with it. This
    # seed, a list of six numbers, is used for nothing else.
    drawn = np.sort(np.random.RandomState(list(b"pixels")).permutation(len(images))[:at_most])
    largest = 1.0 if images.is_floating_point() else 255.0
    count = 0
    total, squares = torch.zeros(2, num_channels, dtype=torch.float64)
    for which in torch.from_numpy(drawn).split(examples_at_once(images)):
        pixels = images.index_select(0, which).double().div_(largest).unflatten(1, (num_channels, -1))
        count += pixels.shape[0] * pixels.shape[2]
        total += pixels.sum((0, 2))
        squares += pixels.square().sum((0, 2))
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
    # A deviation that is only a rounding error would turn a constant channel into large numbers.
    deviation = torch.where(deviation > 1e-6 * mean.abs().clamp_min(1e-6), deviation, 1.0)
    # Sums depend on the number of threads in their last digits. The normalisation must not.
    mean, deviation = (tuple(float(f"{value:.9g}") for value in values.tolist()) for values in (mean, deviation))
    return Pixels(largest, mean, deviation)


@dataclass(frozen=True)
class ImageFiles:
    """How the images of a dataset were read from files, or from objects of Pillow."""

    ignored: Mapping[str, int] = field(default_factory=dict)
    """What was not read, and how many there are of each, for example {".txt files": 3, "the folder val": 1}."""
    mega_batches: Sequence[str] = ()
    """With order=folders, the names of the folders in the order of arrival."""


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set of labelled images."""

    name: str
    """Name of the dataset, as given in `dataset=`, for example "mnist"."""
    image_shape: tuple[int, int, int]
    """Shape of an image, (channels, height, width)."""
    num_classes: int
    """Number of classes, C."""
    pixels: Pixels
    """The normalisation of the pixels of this dataset."""
    training: Examples
    """The training set. It is cut into the mega-batches of the stream."""
    test: Examples
    """The test set. Only the evaluator reads it."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further values of each training example, such as a date, by name: numbers or texts, [n]. With `order=column:NAME`
    the examples arrive in the order of these values."""
    folder_of_example: np.ndarray | None = None
    """Index of the mega-batch of each training example, counted from 0, int64 [n], for `order=folders`. None: the
    dataset does not say which examples arrive together."""
    class_names: Sequence[str] | None = None
    """Name of each class, if the classes have names."""
    files: ImageFiles | None = None
    """How the images were decoded; None if they were given as arrays. `vision.load` treats new images alike."""


def resized_dataset(dataset: Dataset, size: int) -> Dataset:
    """Return a dataset with square images of `size` x `size` pixels; the dataset itself if its images are such images.

    Each image is scaled, with antialiasing, until its shorter side has `size` pixels. Then the square in its middle is
    cut out. The normalisation of the dataset does not change.
    """
    channels, height, width = dataset.image_shape
    if (height, width) == (size, size):
        return dataset
    training, test = (
        Examples(resized(examples.images, dataset.image_shape, size), examples.labels)
        for examples in (dataset.training, dataset.test)
    )
    return replace(dataset, image_shape=(channels, size, size), training=training, test=test)


def resized(images: Tensor, shape: tuple[int, int, int], size: int) -> Tensor:
    """Return images with another size, as `resized_dataset` does.

    Args:
        images: pixels, uint8 or float32 [n, channels * height * width].
        shape: shape of an image, (channels, height, width).
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
