"""Decode images once, into a file that is then memory-mapped.

The file is stored below the data folder, in a folder whose name is a digest of the paths, sizes and times of the image
files, so a folder that has changed is decoded again. The files may be removed at any time when no run reads them. What
was decoded of an earlier state of the folder is removed if it was not used for KEEP_SECONDS.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import remove
from fairseq_alma.core.store import Store
from vision.datasets.decoding import as_shown, image_values, is_grey, opened, readable

FORMAT = 2
"""Part of the digest. Increase it when the same files are decoded to other pixels."""
KEEP_SECONDS = 30 * 86_400
"""Time in seconds after its last use for which an entry of an earlier state of a folder is kept."""
CHUNK = 256
"""Number of images that are decoded between two updates of the progress bar."""


def decoded_images(
    paths: Sequence[Path], root: Path, cache: Path, image_size: int | None, where: str
) -> tuple[Tensor, tuple[int, int, int], int]:
    """Return the pixels of image files, the shape of an image, and the number of files with several frames.

    The pixels are uint8 [n, channels * height * width]. The tensor's memory is a file in the folder `cache`, so it may
    be larger than the machine's memory. If the file does not exist, the images are decoded first. Two processes may do
    this at the same time: each writes a file of its own, and renames it when it is complete.

    Args:
        root: folder that contains the files.
        cache: folder for the decoded images.
        image_size: height and width to which images are resized. If None, all images must have the same size.

    Raises:
        SettingError: if a file cannot be read as an image, or if `image_size` is None and images have different
            sizes.
    """
    # Durable, because the digests of large files are not compared each time.
    store, key = Store(cache), _digest(paths, root, image_size, where)
    entry = store.take(key, check_digests=False)
    images = None if entry is None else _mapped(entry.folder / "images.npy")
    if entry is None or images is None:  # not decoded yet, or damaged
        if entry is not None:
            remove(entry.folder)
        mode, num_animated = _common_mode(paths, image_size, where)
        with store.writing(key, {"several_frames": num_animated, "root": str(root.resolve())}) as folder:
            _write(folder / "images.npy", paths, mode, image_size, where)
        _remove_unused(store, root)
        entry = store.take(key, check_digests=False)
        images = None if entry is None else _mapped(entry.folder / "images.npy")
        assert entry is not None and images is not None
    with suppress(OSError):  # it may be somebody else's
        os.utime(entry.folder)
    channels, height, width = (int(size) for size in images.shape[1:])
    return torch.from_numpy(images).flatten(1), (channels, height, width), entry.value["several_frames"]


def _remove_unused(store: Store, root: Path) -> None:
    """Remove the decoded images of this folder that were not used for KEEP_SECONDS. A folder grows with each week."""
    for path in store.folder.iterdir():
        with suppress(OSError):  # another process may remove it at the same time
            entry = store.take(path.name, check_digests=False)
            is_unused = time.time() - path.stat().st_mtime > KEEP_SECONDS
            if entry is not None and is_unused and entry.value.get("root") == str(root.resolve()):
                remove(path)


def _mapped(path: Path) -> np.ndarray | None:
    """Return the array in a file, memory-mapped; None if the file is damaged."""
    try:
        # The mode "c" (copy on write) makes a writable array, which torch needs, but never changes the file.
        return np.load(path, mmap_mode="c")
    except (OSError, ValueError, EOFError):
        return None


def _digest(paths: Sequence[Path], root: Path, image_size: int | None, where: str) -> str:
    """Return a digest that differs if a file has changed, been replaced, or lies in another folder.

    Archives often give all files the same time, and images of the same kind often have the same size. So the digest
    also contains the place of the folder, and the times at which the file system last changed each file (ctime), which
    programs cannot choose.
    """
    digest = hashlib.sha256(f"{FORMAT} {image_size}\0".encode() + os.fsencode(root.resolve()))
    for path in paths:
        with readable(f"{where}: {path}"):
            state = path.stat()
        digest.update(b"\0" + os.fsencode(path.relative_to(root)))
        digest.update(f"\0{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}".encode())
    return digest.hexdigest()


def _common_mode(paths: Sequence[Path], image_size: int | None, where: str) -> tuple[str, int]:
    """Return the mode of all images, and how many have several frames. Only the heads of the files are read.

    The mode is "L" (grey) if all images are grey, otherwise "RGB". For the errors, see `decoded_images`.
    """

    def head(path: Path) -> tuple[bool, bool, tuple[int, int]]:
        with opened(path, name := f"{where}: {path}") as image:
            # The further pictures in the formats of cameras and Photoshop are previews and layers.
            is_animated = getattr(image, "is_animated", False) and image.format not in ("MPO", "PSD")
            return is_grey(image, name), is_animated, image.size

    are_grey, num_animated, first = True, 0, None
    Image.init()  # loads all formats, which threads must not do at the same time
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            for path, (is_grey_one, is_animated, size) in zip(chunk, pool.map(head, chunk), strict=True):
                are_grey &= is_grey_one
                num_animated += is_animated
                first = first or size
                # Height and width may change places when the images are turned upright, so only `_write` knows them.
                if image_size is None and sorted(size) != sorted(first):
                    raise _different_sizes(paths[0], first, path, size, where)
    return "L" if are_grey else "RGB", num_animated


def _different_sizes(
    one: Path, size: tuple[int, int], other: Path, other_size: tuple[int, int], where: str
) -> SettingError:
    return SettingError(
        f"{where}: images have different sizes: {one} has {size[0]} x {size[1]} pixels, but {other} has "
        f"{other_size[0]} x {other_size[1]} (width x height). Give image_size=N to scale all images to N x N pixels"
    )


def _write(path: Path, paths: Sequence[Path], mode: str, image_size: int | None, where: str) -> None:
    """Decode the images and write them to the file `path`, an array uint8 [n, channels, height, width]."""

    def shown(index: int) -> Image.Image:
        with opened(paths[index], name := f"{where}: {paths[index]}") as image:
            return as_shown(image, name)

    size = (image_size, image_size) if image_size else shown(0).size
    shape = (1 if mode == "L" else 3, size[1], size[0])
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(paths), *shape))
    _allocate(path)

    def decode(index: int) -> None:
        image = shown(index)
        if not image_size and image.size != size:
            raise _different_sizes(paths[0], size, paths[index], image.size, where)
        values = image_values(image, mode, image_size, f"{where}: {paths[index]}")
        array[index] = values.reshape(shape)

    title = f"{where}: decoding images"
    with ThreadPoolExecutor(os.cpu_count()) as pool, tqdm(total=len(paths), desc=title, disable=None) as progress:
        for start in range(0, len(paths), CHUNK):
            for _ in pool.map(decode, range(start, min(start + CHUNK, len(paths)))):
                progress.update()
    array.flush()


def _allocate(path: Path) -> None:
    """Allocate the disk space of a file that is written through memory.

    Otherwise the process would be killed by SIGBUS, without a message, when the disk is full. Now an OSError names the
    file.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
