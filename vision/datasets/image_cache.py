"""Decode images once, into a file that is then memory-mapped.

The file is stored below the data folder. Its name is a digest of the paths, sizes and modification times of the image
files, so a folder that has changed is decoded again. The files may be removed at any time when no run reads them.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import unfinished_files, written_aside
from vision.datasets.resizing import GREY_MODES, image_values

FORMAT = 1
"""Part of the digest. Increase it when the same files are decoded to other pixels."""
CHUNK = 256
"""Number of images that are decoded between two updates of the progress bar."""
ABANDONED_SECONDS = 24 * 3600.0
"""An unfinished file that nobody has written for this time was left behind by a killed process."""


def decoded_images(
    paths: Sequence[Path], root: Path, cache: Path, image_size: int | None, where: str
) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the pixels of image files, uint8 [n, channels * height * width], and the shape of an image.

    The tensor's memory is a file in the folder `cache`, so it may be larger than the machine's memory. If the file does
    not exist, the images are decoded first. Two processes may do this at the same time: each writes a file of its own,
    and renames it when it is complete.

    Args:
        paths: the image files.
        root: folder that contains the files. Their paths below it are part of the digest.
        cache: folder for the decoded images.
        image_size: height and width to which images are resized. If None, all images must have the same size.
        where: the dataset, for error messages.

    Raises:
        SettingError: if a file cannot be read as an image, or if `image_size` is None and images have different
            sizes.
    """
    folder, key = cache / _digest(paths, root, image_size), "images"
    path = folder / f"{key}.npy"
    if not path.is_file():
        mode, shape = _common_shape(paths, image_size, where)
        _write(path, paths, mode, shape, image_size, where)
    # The mode "c" (copy on write) makes a writable array, which torch needs, but never changes the file.
    images = np.load(path, mmap_mode="c")
    channels, height, width = (int(size) for size in images.shape[1:])
    return torch.from_numpy(images).flatten(1), (channels, height, width)


def _digest(paths: Sequence[Path], root: Path, image_size: int | None) -> str:
    digest = hashlib.sha256(f"{FORMAT} {image_size}\0".encode())
    for path in paths:
        state = path.stat()
        digest.update(os.fsencode(path.relative_to(root)) + f"\0{state.st_size} {state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _common_shape(paths: Sequence[Path], image_size: int | None, where: str) -> tuple[str, tuple[int, int, int]]:
    """Return the mode and the shape (channels, height, width) of all images. Only the heads of the files are read.

    The mode is "L" (grey) if all images are grey, otherwise "RGB".

    Raises:
        SettingError: if a file is no image, has 16 bits per pixel, or if the images have different sizes.
    """

    def head(path: Path) -> tuple[str, tuple[int, int]]:
        with _opened(path, where) as image:
            return image.mode, image.size

    is_grey, first = True, None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            for path, (mode, size) in zip(chunk, pool.map(head, chunk), strict=True):
                if mode in ("I", "F") or mode.startswith("I;"):
                    raise SettingError(
                        f"{where}: {path} has pixels with more than 8 bits (mode {mode}): convert the images to 8 "
                        f"bits, or store them as floats in a .npz file"
                    )
                is_grey &= mode in GREY_MODES
                first = first or size
                if image_size is None and size != first:
                    raise SettingError(
                        f"{where}: images have different sizes: {paths[0]} has {first[0]} x {first[1]} pixels, but "
                        f"{path} has {size[0]} x {size[1]} (width x height). Give image_size=N to scale all images to "
                        f"N x N pixels"
                    )
    assert first is not None
    width, height = (image_size, image_size) if image_size else first
    return ("L", (1, height, width)) if is_grey else ("RGB", (3, height, width))


def _opened(path: Path, where: str) -> Image.Image:
    try:
        return Image.open(path)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError, SyntaxError) as error:
        raise _unreadable(path, where, error) from error


def _unreadable(path: Path, where: str, error: Exception) -> SettingError:
    return SettingError(
        f"{where}: {path} cannot be read as an image ({type(error).__name__}: {error}): replace or remove this file"
    )


def _write(
    path: Path, paths: Sequence[Path], mode: str, shape: tuple[int, int, int], image_size: int | None, where: str
) -> None:
    """Decode the images and write them to the file `path`, an array uint8 [n, channels, height, width]."""
    for left in unfinished_files(path.parent):
        with suppress(OSError):  # another process may remove it at the same time
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                left.unlink()
    # Machines that share the data folder may have processes with the same number, so the name of the file that is
    # written aside contains a random part.
    own = path.with_name(f"{path.stem}_{uuid4().hex}.npy")
    with written_aside(own) as temporary:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=(len(paths), *shape))
        _allocate(temporary)

        def decode(index: int) -> None:
            try:
                with _opened(paths[index], where) as image:
                    array[index] = image_values(image, mode, image_size).reshape(shape)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                if isinstance(error, SettingError):
                    raise
                raise _unreadable(paths[index], where, error) from error

        _for_all(decode, len(paths), f"{where}: decoding images")
        array.flush()
    os.replace(own, path)


def _allocate(path: Path) -> None:
    """Allocate the disk space of a file that is written through memory.

    Otherwise the process would be killed by SIGBUS, without a message, when the disk is full.

    Raises:
        OSError: if the disk is full. The error names the file.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


def _for_all(do: Callable[[int], None], count: int, title: str) -> None:
    """Call do(0), ..., do(count - 1) in several threads, and show the progress on a terminal."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, tqdm(total=count, desc=title, disable=None) as progress:
        for start in range(0, count, CHUNK):
            indices = range(start, min(start + CHUNK, count))
            for _ in pool.map(do, indices):
                progress.update()
