"""Decode images to the pixels that a viewer shows: upright, in the colours of sRGB, on a white background."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms

from fairseq_alma.core.errors import SettingError
from vision.datasets.examples import scaled

GREY_MODES = ("1", "L", "LA", "La")
"""Pillow's modes of grey images with at most 8 bits."""
NOT_DECODED = ("BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF")
"""Formats that Pillow recognises, but does not decode itself. For EPS it would run the program in the file."""
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""The step that turns an image upright, for each value of the tag Orientation in its EXIF data."""
VISIBLE = 8
"""A part of a picture is visible if it differs from the background by this much, of 255."""
MAX_SCALED_PIXELS = 100_000_000
"""An image that `image_size` would scale to more pixels than this, because it is long and narrow, is refused."""


def image_endings() -> set[str]:
    """Return the endings of the names of all image files that Pillow can decode, in lower case, with their dots."""
    formats = Image.registered_extensions()  # this also loads all formats
    can_open = (set(Image.OPEN) | {"MPO"}) - set(NOT_DECODED)  # an MPO file is a JPEG file with further pictures
    return {ending for ending, one in formats.items() if one in can_open}


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn an error in a `with` block into a SettingError with the name of the image, the dataset and the file."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # Pillow raises errors of many kinds for damaged files
        cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise SettingError(f"{name} cannot be read as an image ({cause}): replace or remove this file") from error


@contextmanager
def opened(path: Path, name: str) -> Iterator[Image.Image]:
    """Open an image file for a `with` block. The format is found by its content, not by its ending. See `readable`."""
    # Give Pillow a file, and not its name. Otherwise Pillow maps uncompressed TIFF files into memory, and then mixes up
    # width and height of those that are to be turned.
    formats = [one for one in Image.ID if one not in NOT_DECODED]
    with readable(name), path.open("rb") as file, Image.open(file, formats=formats) as image:
        yield image


def is_grey(image: Image.Image, name: str) -> bool:
    """Return True if an image is grey, with or without transparency. It need not be decoded.

    Raises:
        SettingError: if the image has pixels with more than 8 bits, of which Pillow does not know what is white.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise SettingError(
            f"{name} has pixels with more than 8 bits (mode {image.mode}): convert the images to 8 bits, or store them "
            f"as floats in a .npz file"
        )
    return image.mode in GREY_MODES


def as_shown(image: Image.Image, name: str) -> Image.Image:
    """Return an image as a viewer shows it, with the mode "L" (grey) or "RGB". Of an animation, it is the first frame.

    It is turned upright as its EXIF data say, converted from its colour profile to sRGB, and laid on white where it is
    transparent. Profiles that are damaged, or are for other colours than those of the image, are ignored.

    Args:
        image: the image, which is decoded by this function.
        name: the dataset and the file, for messages.

    Raises:
        SettingError: if the image cannot be decoded, has more than 8 bits, or is white where it is not transparent.
    """
    with readable(name):
        mode = "L" if is_grey(image, name) else "RGB"
        image.load()
        image = _upright(image)
        alpha = None
        if image.has_transparency_data:
            image = image.convert("LA" if mode == "L" else "RGBA")
            alpha = image.getchannel("A")
        shown = _in_srgb(image, mode)
        if alpha is not None:
            shown = _on_white(shown, alpha, name)
        shown.info.clear()  # so that nothing is done again if the result is given to this function
        return shown


def _upright(image: Image.Image) -> Image.Image:
    try:
        step = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # viewers ignore damaged EXIF data, for which Pillow raises errors of many kinds
        return image
    return image if step is None else image.transpose(step)


def _in_srgb(image: Image.Image, mode: str) -> Image.Image:
    """Return an image without its transparency, as grey or sRGB, with the mode `mode`."""
    profile = image.info.get("icc_profile")
    plain = image if image.mode in ("CMYK", mode) else image.convert(mode)
    if profile and image.mode != "LAB":  # Pillow has converted LAB to sRGB
        try:
            converted = ImageCms.profileToProfile(
                plain, BytesIO(profile), ImageCms.createProfile("sRGB"), outputMode="RGB"
            )
            assert converted is not None
            return converted.convert(mode)
        except ImageCms.PyCMSError:
            pass
    return plain.convert(mode)


def _on_white(image: Image.Image, alpha: Image.Image, name: str) -> Image.Image:
    """Return an image on a white background."""
    shown = Image.new(image.mode, image.size, "white")
    shown.paste(image, mask=alpha)
    if _contrast(shown) < VISIBLE <= _contrast(alpha):
        raise SettingError(
            f"{name} is white on a transparent background, and transparent images are laid on white, so nothing would "
            f"be left of it: save the images without transparency, on a background that you choose"
        )
    return shown


def _contrast(image: Image.Image) -> int:
    """Return the largest difference between two pixels in a channel."""
    return int(np.ptp(np.asarray(image), axis=(0, 1)).max())


def image_values(image: Image.Image, mode: str, size: int | None, name: str) -> np.ndarray:
    """Return the pixels of an image, uint8 [channels * height * width], channel by channel.

    Args:
        image: the image, as `as_shown` returns it.
        mode: "L" for grey, "RGB" for colour. The image is converted if necessary.
        size: if given, the image is resized to a square as `resized_dataset` does, by Pillow.
        name: the dataset and the file, for messages.

    Raises:
        SettingError: if the image is so long and narrow that it becomes too large when it is scaled.
    """
    image = image.convert(mode)
    if size is not None and image.size != (size, size):
        height, width, top, left = scaled(image.height, image.width, size)
        if height * width > MAX_SCALED_PIXELS:
            raise SettingError(
                f"{name} has {image.width} x {image.height} pixels (width x height), which image_size={size} would "
                f"scale to {width} x {height}: remove this image, or cut it"
            )
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + size, top + size))
    values = np.asarray(image, dtype=np.uint8)
    return values.reshape(-1) if mode == "L" else values.transpose(2, 0, 1).reshape(-1)
