"""Format of the images on which a run was trained, and new images in this format. `inputs.json` records it.

Shapes: n images of h x w pixels with c channels.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.files import read_json, sealed, write_json
from fairseq_alma.core.settings import Count
from vision.datasets import Dataset, Pixels
from vision.datasets.decoding import as_shown, image_values
from vision.datasets.examples import resized

FILE = "inputs.json"
"""Name of the file in the run folder that describes the images of the dataset."""
LAYOUTS = {4: ("nhwc", "nchw"), 3: ("hwc", "chw", "nhw"), 2: ("hw", "nf"), 1: ("f",)}
"""What the axes of an array of images can be, by the number of axes: number n of the image, height h, width w, channel
c, or all f = c * h * w values of an image."""
ROUNDING = 1e-4
"""Floats of pixels may be outside 0 and 1 by this much, because of rounding errors."""


class _Inputs(TypedDict):
    """The content of inputs.json, as far as it is read."""

    image_shape: tuple[Count, Count, Count]
    dtype: Literal["uint8", "float32"]
    largest: float
    mean: float | list[float]
    deviation: float | list[float]
    class_names: list[str] | None
    image_size: Count | None
    decoded: bool


@dataclass(frozen=True)
class ImageFormat:
    """Format of the images of a dataset. The run folder contains it, so that new images can be converted to it."""

    image_shape: tuple[int, int, int]
    """Shape of an image, (channels, height, width)."""
    is_bytes: bool
    """Whether pixels are bytes. Otherwise they are floats."""
    pixels: Pixels
    """The normalisation of the pixels."""
    class_names: list[str] | None
    """Name of each class, if the dataset has names."""
    image_size: int | None = None
    """The setting `image_size`. If it is None, images of other sizes are refused."""
    is_decoded: bool = False
    """Whether the images were decoded by Pillow, which then also resized them and converted grey to colour."""

    @classmethod
    def of(cls, dataset: Dataset, image_size: int | None) -> "ImageFormat":
        """Return the format of the images of a dataset. `image_size` is the setting of that name."""
        names = None if dataset.class_names is None else [str(one) for one in dataset.class_names]
        is_bytes, is_decoded = dataset.training.images.dtype == torch.uint8, dataset.files is not None
        return cls(dataset.image_shape, is_bytes, dataset.pixels, names, image_size, is_decoded)

    def write(self, folder: Path, read: Mapping[str, Any]) -> None:
        """Write the format to a run folder, with what was read (see `vision.stream.what_was_read`)."""
        content = {
            "image_shape": self.image_shape,
            "dtype": "uint8" if self.is_bytes else "float32",
            **asdict(self.pixels),
            "class_names": self.class_names,
            "image_size": self.image_size,
            "decoded": self.is_decoded,
            "read": dict(read),
        }
        write_json(folder / FILE, sealed(content))

    @classmethod
    def read(cls, folder: Path) -> "ImageFormat":
        """Return the format that a run folder records. Raise RunError if the folder does not contain it."""
        path = folder / FILE
        if not path.exists():
            raise RunError(
                f"{path} is missing: run the command of the run again; this writes the file and does not repeat the "
                f"training"
            )
        content = read_json(path, _Inputs, advice="run the training command again, which writes the file")
        mean, deviation = (
            tuple(one) if isinstance(one, list) else one for one in (content["mean"], content["deviation"])
        )
        pixels = Pixels(content["largest"], mean, deviation)
        channels, height, width = content["image_shape"]
        shape, is_bytes, names = (channels, height, width), content["dtype"] == "uint8", content["class_names"]
        return cls(shape, is_bytes, pixels, names, content["image_size"], content["decoded"])

    def to_tensor(self, images: Any, is_one: bool = False) -> Tensor:
        """Return images as a tensor in this format, uint8 or float32 [n, channels * height * width].

        Args:
            images: as for `Predictor.__call__`.
            is_one: whether this is one image, and not several.

        Raises:
            SettingError: if the images do not fit, or if it is unclear how their shape is meant.
        """
        kinds = Image.Image | Tensor | np.ndarray
        if isinstance(images, list | tuple) and any(isinstance(one, kinds) for one in images):
            return torch.cat([self.to_tensor(one, is_one=True) for one in images])
        x = _as_array(images)
        layout = self._layout(x.shape, is_one, isinstance(images, Image.Image))
        if "f" in layout:
            x = x.reshape(-1, *self.image_shape)
        else:
            x = x.transpose([layout.index(axis) for axis in "nchw" if axis in layout])
            x = x[tuple(slice(None) if axis in layout else None for axis in "nchw")]
        return self._converted(self._checked(x))

    def _layout(self, shape: tuple[int, ...], is_one: bool, is_picture: bool) -> str:
        """Return what the axes of an array of images are, one of LAYOUTS. For the errors, see `to_tensor`."""
        ranks: dict[str, int] = {}
        for layout in LAYOUTS.get(len(shape), ()):
            length = dict(zip(layout, shape, strict=True))
            # An array [1, h, w] is one grey image, whether the first axis is n or c.
            if (is_one and length.get("n", 1) != 1) or (layout == "nhw" and length["n"] == 1):
                continue
            if is_picture and not layout.startswith("hw"):
                continue
            if "f" not in length:
                rank = self._rank((length.get("c", 1), length["h"], length["w"]), "c" in length)
            else:
                rank = None if length["f"] != prod(self.image_shape) else 3 if self.image_size else 0
            if rank is not None:
                ranks[layout] = rank
        best = [layout for layout, rank in ranks.items() if rank == min(ranks.values())]
        if len(best) == 1:
            return best[0]
        channels, height, width = self.image_shape
        if best:
            raise SettingError(
                f"images have the shape {list(shape)}, whose axes may be {' or '.join(best)} (n images, h high, w "
                f"wide, c channels, f values of an image): give nhwc or nchw"
            )
        sizes = "of any size" if self.image_size else f"{width} x {height} pixels (width x height) as in training"
        raise SettingError(
            f"images have the shape {list(shape)}, but the network needs [n, h, w, c], [n, c, h, w] or one such image, "
            f"with {channels} channel(s), {sizes}"
        )

    def _rank(self, shape: tuple[int, int, int], has_axis: bool) -> int | None:
        """Return how likely images have this shape (channels, height, width), from 0 for the likeliest."""
        same_channels, same_size = shape[0] == self.image_shape[0], shape[1:] == self.image_shape[1:]
        is_convertible = self.is_decoded and shape[0] in (1, 3)
        if not (same_channels or is_convertible) or not (same_size or (self.image_size and min(shape) > 0)):
            return None
        if same_channels and same_size and (has_axis or self.image_size is None):
            return 0
        if same_channels and has_axis:
            return 1
        return 2 if same_channels and same_size else 3

    def _checked(self, x: np.ndarray) -> np.ndarray:
        """Return a copy of pixels as bytes or float32, as in training. For the errors, see `to_tensor`."""
        largest = self.pixels.largest if self.pixels.largest > 1 else 255
        is_float, is_integer = np.issubdtype(x.dtype, np.floating), np.issubdtype(x.dtype, np.integer)
        # For images of bytes, floats from 0 to 1 are clear only if 1 is the byte 255.
        if not (is_float if not self.is_bytes else is_integer or (is_float and self.pixels.largest == 255)):
            expected = f"bytes (uint8, 0 to {largest:g})" if self.is_bytes else "floats"
            raise SettingError(f"images have the type {x.dtype}, but the images in training were {expected}")
        low, high = (x.min(), x.max()) if x.size else (0, 0)
        if not is_float:
            if low < 0 or high > largest:
                raise SettingError(
                    f"images have pixels from {low} to {high}, but must have pixels from 0 to {largest:g}"
                )
            return x.astype(np.uint8)
        limits = (-ROUNDING, 1 + ROUNDING) if self.is_bytes else (-np.inf, np.inf)
        if not (limits[0] <= low <= high <= limits[1] and np.isfinite([low, high]).all()):
            expected = "from 0 to 1, as ToTensor gives them" if self.is_bytes else "finite"
            raise SettingError(
                f"images are floats from {low:.4g} to {high:.4g}, but must be {expected}. Do not normalise them, and "
                f"give pixels from 0 to 255 as uint8"
            )
        return np.rint(x.clip(0, 1) * 255).astype(np.uint8) if self.is_bytes else x.astype(np.float32)

    def _converted(self, x: np.ndarray) -> Tensor:
        """Return images [n, c, h, w] with the number of channels and the size of those in training, flat."""
        flat = torch.from_numpy(x.reshape(len(x), prod(x.shape[1:])))
        if x.shape[1:] == self.image_shape:
            return flat
        if not self.is_decoded:
            assert self.image_size is not None  # otherwise `_rank` refuses other sizes
            return resized(flat, (x.shape[1], x.shape[2], x.shape[3]), self.image_size)
        mode = "L" if self.image_shape[0] == 1 else "RGB"
        pictures = x[:, 0] if x.shape[1] == 1 else np.ascontiguousarray(x.transpose(0, 2, 3, 1))
        values = [image_values(Image.fromarray(one), mode, self.image_size, "the image") for one in pictures]
        return torch.from_numpy(np.array(values, np.uint8).reshape(len(x), prod(self.image_shape)))


def _as_array(images: Any) -> np.ndarray:
    """Return images as an array of numbers. For the arguments and errors, see `ImageFormat.to_tensor`."""
    if isinstance(images, Image.Image):
        return np.asarray(as_shown(images, "the image"))
    if isinstance(images, Tensor):
        images = images.detach().cpu()
        return (images.float() if images.is_floating_point() else images).numpy()
    try:
        return np.asarray(images)
    except ValueError as error:  # nested lists of different lengths
        raise SettingError(f"images are no array ({error}): give a list with an array for each image") from error
