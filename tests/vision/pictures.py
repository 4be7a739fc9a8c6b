"""Small image files for tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, value: int, size: tuple[int, int] = (4, 4), mode: str = "L") -> None:
    """Write an image of one colour. Its pixels have the value `value`; its size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value // 2, 0)).save(path)


def write_classes(folder: Path, counts: dict[str, int], first: int = 0, **how) -> int:
    """Write images of one colour in class folders: `counts` is the number of images of each class.

    Each image has another value: `first`, `first` + 1, ... in the order of the classes. Return the next value.
    """
    for name, count in counts.items():
        for number in range(count):
            write_image(folder / name / f"{number:02d}.png", first, **how)
            first += 1
    return first


def write_parts(root: Path, training: dict[str, int], test: dict[str, int], **how) -> Path:
    """Write a folder of images with train/ and test/, and return it. Test images have the values 100, 101, ..."""
    write_classes(root / "train", training, **how)
    write_classes(root / "test", test, first=100, **how)
    return root


def noise(num: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Return random images, uint8 [num, *shape]."""
    return np.random.default_rng(seed).integers(0, 256, (num, *shape), dtype=np.uint8)
