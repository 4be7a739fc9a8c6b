"""Copy the examples of a torchvision or Hugging Face dataset into arrays, one example after another."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from fairseq_alma.core.errors import SettingError
from vision.datasets.decoding import as_shown, image_values


def names_of(class_names: Any, labels: np.ndarray) -> list[str] | None:
    """Return the names of the classes from 0 to the largest label; None if the library has no names for all of them.

    Args:
        class_names: class names from the library; None if it has none. Names beyond the largest label are ignored.
        labels: class of each training example, [n].
    """
    num_classes = int(labels.max()) + 1 if len(labels) else 0
    if not isinstance(class_names, list | tuple) or len(class_names) < num_classes:
        return None
    names = list(class_names[:num_classes])
    return names if all(isinstance(one, str) for one in names) else None


def arrays_of(
    examples: Any, count: int, image_size: int | None, where: str, read: Callable[[Any], Sequence[Any]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [n, height, width, channels], and the labels, int64 [n], of a sequence of examples.

    Args:
        examples: object whose elements 0 to `count` - 1 are examples.
        count: number of examples.
        image_size: height and width to which images are resized; None if all have one size.
        where: the dataset, for error messages.
        read: function from an element to the image, as a PIL image, and its class. By default, the element is a tuple
            of both.

    Raises:
        SettingError: if an element is no image with a whole number as its class, or if images have different sizes.
    """
    images: list[np.ndarray] = []
    labels, mode, size = np.empty(count, np.int64), "L", (0, 0)
    for index in range(count):
        element = examples[index]
        image, label = (element if read is None else read(element))[:2]
        if not isinstance(image, Image.Image) or not isinstance(label, int | np.integer):
            raise SettingError(
                f"{where}: example {index} is {type(image).__name__} with the class {label!r}, but must be an image "
                f"with a whole number as its class: write a function that returns a Dataset, and give "
                f"dataset=MODULE:FUNCTION"
            )
        name = f"{where}: example {index}"
        image = as_shown(image, name)
        if image.mode != mode and mode == "L":
            # The first colour image: convert the grey images before it to colour.
            mode, images = "RGB", [np.tile(one, 3) for one in images]
        if image_size is None and index and image.size != size:
            raise SettingError(
                f"{where}: images have different sizes: example 0 has {size[0]} x {size[1]} pixels, but example "
                f"{index} has {image.size[0]} x {image.size[1]} (width x height). Give image_size=N to scale all "
                f"images to N x N pixels"
            )
        size = image.size
        images.append(image_values(image, mode, image_size, name))
        labels[index] = label
    width, height = (image_size, image_size) if image_size else size
    stacked = np.stack(images).reshape(count, -1, height, width)
    return stacked.transpose(0, 2, 3, 1), labels
