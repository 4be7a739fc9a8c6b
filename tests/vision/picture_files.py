"""Files that show the same picture in different ways: by format, mode, orientation, transparency, depth and profile.

The table is used by test_decoding.py. Each case says how its file is written, and which picture a viewer shows.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps, features

SIZE = (24, 16)
"""Width and height of the picture. Both are multiples of 8, so that blocks of JPEG do not blur its edges."""


def picture() -> Image.Image:
    """Return the picture in colour: four fields, each of another colour and size, without any symmetry."""
    array = np.full((16, 24, 3), 255, np.uint8)
    array[:8, :8], array[:8, 8:16], array[8:, :16], array[8:, 16:] = (200, 40, 30), (30, 120, 60), (40, 60, 180), 90
    return Image.fromarray(array)


COLOUR = picture()
GREY = COLOUR.convert("L")
BLACK = Image.fromarray(((np.asarray(GREY) > 150) * 255).astype(np.uint8))
"""The picture in black and white: the field at the top right is white."""


@dataclass(frozen=True)
class Case:
    """A file, and what a viewer shows of it."""

    name: str
    """What is special, and the ending of the file."""
    write: Callable[[Path], None]
    """Writes the file."""
    shown: Image.Image | str
    """The picture that a viewer shows, or a part of the message with which the file is refused."""
    tolerance: int = 2
    """The largest difference of a pixel from the picture."""


def saved(image: Image.Image, **how) -> Callable[[Path], None]:
    return lambda path: image.copy().save(path, **how)  # Pillow leaves settings of an encoder at what it saves


def written(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content)


def lossy(ending: str) -> dict:
    """Return how to save a picture in a format with a quality so that it changes little."""
    return {
        **{one: {"quality": 100, "subsampling": 0} for one in ("jpg", "jpeg", "jpe", "jfif", "mpo")},
        "webp": {"lossless": True, "exact": True},
        "avif": {"quality": 100, "subsampling": "4:4:4"}, "jp2": {"irreversible": False},
    }.get(ending, {})  # fmt: skip


# ---- Formats and modes.


def of_modes() -> Iterator[Case]:
    modes = {
        "png": "1 L P RGB", "bmp": "1 L P RGB", "dib": "L RGB", "gif": "1 L P RGB", "tif": "1 L P RGB CMYK YCbCr LAB",
        "tiff": "RGB", "jpg": "L RGB CMYK", "jpeg": "RGB", "jfif": "L RGB", "jpe": "RGB", "jp2": "L RGB", "j2k": "RGB",
        "webp": "L RGB", "avif": "L RGB", "ppm": "RGB", "pgm": "L", "pbm": "1", "pnm": "L RGB", "tga": "L P RGB",
        "pcx": "1 L P RGB", "sgi": "L RGB", "rgb": "RGB", "qoi": "RGB", "dds": "RGB", "im": "1 L P RGB", "xbm": "1",
        "apng": "RGB", "mpo": "RGB", "JPG": "RGB", "Png": "L", "blp": "P", "msp": "1", "icb": "RGB",
    }  # fmt: skip
    for ending, names in modes.items():
        for mode in names.split():
            image = BLACK if mode == "1" else GREY if mode == "L" else COLOUR
            is_lossy = ending in ("jpg", "jpeg", "jfif", "jpe", "JPG", "mpo", "avif") or mode in ("LAB", "YCbCr")
            how = lossy(ending.lower())
            yield Case(f"{mode}.{ending}", saved(converted(image, mode), **how), image, 12 if is_lossy else 2)


def converted(image: Image.Image, mode: str) -> Image.Image:
    if mode == "P":
        return image.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    return image.convert(mode)


# ---- Orientation.

EXIF_FORMATS = ("jpg", "png", "webp", "tif", "avif", "mpo", "jfif")


def exif(orientation: int) -> bytes:
    data = Image.Exif()
    data[0x112] = orientation
    return data.tobytes()


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image that the orientation turns into `image`."""
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    marked = image.copy()
    marked.getexif()[0x112] = inverse
    return ImageOps.exif_transpose(marked)


def of_orientations() -> Iterator[Case]:
    for ending in EXIF_FORMATS:
        for orientation in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
            image = turned(COLOUR, orientation)
            write = saved(image, exif=exif(orientation), **lossy(ending))
            yield Case(f"orientation {orientation}.{ending}", write, COLOUR, 9)
    yield Case("orientation after the pixels.png", late_exif, COLOUR)
    for mode in ("1", "L", "P", "CMYK", "RGBA"):
        image = BLACK if mode == "1" else GREY if mode == "L" else COLOUR
        for compression in ("raw", "tiff_lzw"):
            write = saved(converted(turned(image, 6), mode), exif=exif(6), compression=compression)
            yield Case(f"orientation of {mode} {compression}.tif", write, image)
    yield Case("damaged exif.jpg", saved(COLOUR, exif=b"Exif\0\0rubbish that is no TIFF", **lossy("jpg")), COLOUR, 9)
    yield Case("damaged exif.png", saved(COLOUR, exif=b"Exif\0\0MM\0*\0\0\0\xff"), COLOUR)


def late_exif(path: Path) -> None:
    """Write a PNG with its EXIF data after the pixels."""
    data = io.BytesIO()
    turned(COLOUR, 6).save(data, "png")
    whole = data.getvalue()
    path.write_bytes(whole[:-12] + chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")) + whole[-12:])


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


# ---- Transparency: on white, these are the pictures.


def uncovered(image: Image.Image) -> Image.Image:
    """Return an image that is transparent where `image` is white, and has another colour there."""
    is_white = np.asarray(image.convert("L")) == 255
    pixels = np.asarray(image).copy()
    pixels[is_white] = 7
    result = Image.fromarray(pixels)
    result.putalpha(Image.fromarray(np.where(is_white, 0, 255).astype(np.uint8)))
    return result


def only_alpha(image: Image.Image) -> Image.Image:
    """Return a black image with a transparency that makes it a grey picture."""
    result = Image.new("LA", image.size)
    result.putalpha(ImageOps.invert(image))
    return result


def keyed(image: Image.Image) -> Image.Image:
    """Return an image whose white is replaced by the value 1, which a chunk of the file makes transparent."""
    pixels = np.asarray(image).copy()
    pixels[np.asarray(image.convert("L")) == 255] = 1
    return Image.fromarray(pixels)


def of_transparency() -> Iterator[Case]:
    for ending in ("png", "tif", "webp", "avif", "jp2", "tga", "ico", "gif", "qoi", "dds", "sgi"):
        how = {**lossy(ending), **({"sizes": [SIZE]} if ending == "ico" else {})}
        yield Case(f"RGBA.{ending}", saved(uncovered(COLOUR), **how), COLOUR, 9 if ending == "avif" else 2)
        if ending not in ("ico", "gif", "qoi", "sgi"):
            yield Case(f"only alpha.{ending}", saved(only_alpha(GREY).convert("RGBA"), **how), GREY, 9)
    for ending in ("png", "tif", "jp2", "tga", "dds"):
        yield Case(f"LA.{ending}", saved(uncovered(GREY), **lossy(ending)), GREY)
        yield Case(f"only alpha LA.{ending}", saved(only_alpha(GREY), **lossy(ending)), GREY)
    yield Case("keyed L.png", saved(keyed(GREY), transparency=1), GREY)
    yield Case("keyed 1.png", saved(BLACK.convert("1"), transparency=1), BLACK)
    half = Image.new("LA", SIZE, (100, 128)), Image.new("RGBA", SIZE, (100, 50, 0, 128))
    for stored, shown in zip(half, (227, (227, 177, 127)), strict=True):
        yield Case(f"premultiplied {stored.mode}.tif", premultiplied(stored), Image.new(stored.mode[:-1], SIZE, shown))
    yield Case("keyed RGB.png", saved(keyed(COLOUR), transparency=(1, 1, 1)), COLOUR)
    yield Case("palette with alphas.png", saved(palette(b"\xff" * 5 + b"\0")), COLOUR)
    for ending in ("png", "gif"):
        yield Case(f"palette.{ending}", saved(palette(5)), COLOUR)
    white = Image.new("L", SIZE, 255)
    white.putalpha(ImageOps.invert(GREY))
    for ending in ("png", "tif", "webp"):
        yield Case(
            f"white in alpha only.{ending}", saved(white.convert("RGBA"), **lossy(ending)), "is white on a transparent"
        )
    nothing = Image.new("RGBA", SIZE, (9, 9, 9, 0))
    yield Case("nothing.png", saved(nothing), Image.new("RGB", SIZE, "white"))


def premultiplied(image: Image.Image) -> Callable[[Path], None]:
    """Return a function that writes a TIFF whose pixels are multiplied by their transparency already."""
    data = io.BytesIO()
    image.save(data, "tiff")
    tag = struct.pack("<HHI", 338, 3, 1)  # ExtraSamples
    return written(data.getvalue().replace(tag + b"\2", tag + b"\1"))


def palette(alphas: bytes | int) -> Image.Image:
    """Return the picture with a palette, whose entry for white is another colour, which is transparent."""
    colours = [(200, 40, 30), (30, 120, 60), (40, 60, 180), (90, 90, 90), (0, 0, 0), (255, 255, 255)]
    pixels = np.asarray(COLOUR)
    index = np.zeros(pixels.shape[:2], np.uint8)
    for number, colour in enumerate(colours):
        index[(pixels == colour).all(-1)] = number
    image = Image.fromarray(index)
    image.putpalette([value for colour in [*colours[:5], (3, 4, 5)] for value in colour])
    image.info["transparency"] = alphas
    return image


# ---- Colour profiles.

SRGB = ImageCms.createProfile("sRGB")
ADOBE = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
"""The primary colours of Adobe RGB (1998)."""


def icc(space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return a colour profile with the given tags."""
    offset, table, data = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", offset + len(data), len(content))
        data += content
    head = struct.pack(">I4sI4s4s4s", offset + len(data), b"test", 0x02200000, b"scnr", space, connection)
    head += bytes(12) + b"acsp" + bytes(24) + bytes(4) + xyz(0.9642, 1.0, 0.8249)[8:] + bytes(48)
    return head + table + data


def xyz(*values: float) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


def gamma(value: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(value * 256))


def rgb_profile(primaries=ADOBE, power: float = 2.2) -> bytes:
    tags = {name: xyz(*colour) for name, colour in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True)}
    curves = {name: gamma(power) for name in (b"rTRC", b"gTRC", b"bTRC")}
    return icc(b"RGB ", b"XYZ ", {b"wtpt": xyz(0.9642, 1.0, 0.8249), **tags, **curves})


def grey_profile(power: float) -> bytes:
    return icc(b"GRAY", b"XYZ ", {b"wtpt": xyz(0.9642, 1.0, 0.8249), b"kTRC": gamma(power)})


def ink_profile() -> bytes:
    """Return a profile of CMYK in which the inks are weak: without it, colours would be much darker."""
    inks = np.stack(np.meshgrid(*[[0, 1]] * 4, indexing="ij"), -1).reshape(-1, 4)
    light = 100 - inks @ [20, 30, 10, 60]
    lab = [light.clip(0) * 2.55, 128 + inks @ [-30, 60, -5, 0], 128 + inks @ [-40, -5, 80, 0]]
    table = np.stack(lab, -1).clip(0, 255).astype(np.uint8).tobytes()
    same = bytes(range(256))
    head = (
        b"mft1"
        + bytes(4)
        + bytes([4, 3, 2, 0])
        + struct.pack(">9i", *(65536 * one for one in (1, 0, 0, 0, 1, 0, 0, 0, 1)))
    )
    return icc(b"CMYK", b"Lab ", {b"wtpt": xyz(0.9642, 1.0, 0.8249), b"A2B0": head + same * 4 + table + same * 3})


def in_profile(image: Image.Image, profile: bytes) -> Image.Image:
    """Return an image in another colour space."""
    converted = ImageCms.profileToProfile(image, SRGB, io.BytesIO(profile), outputMode="RGB")
    assert converted is not None
    return converted


def of_profiles() -> Iterator[Case]:
    kinds = {
        "adobe": rgb_profile(), "linear": rgb_profile(power=1.0), "swapped": rgb_profile(ADOBE[::-1]),
        "srgb": ImageCms.ImageCmsProfile(SRGB).tobytes(),
    }  # fmt: skip
    for kind, profile in kinds.items():
        stored = in_profile(COLOUR, profile)
        # A step of a linear byte is larger than a step of an sRGB byte in dark colours.
        tolerance = 12 if kind == "linear" else 4
        for ending in ("png", "jpg", "webp", "tif", "avif", "gif", "jp2"):
            if ending == "jp2" or (ending == "gif" and kind != "srgb"):
                continue  # Pillow cannot write them
            blur = 8 if ending in ("jpg", "avif") else 0
            yield Case(
                f"{kind}.{ending}", saved(stored, icc_profile=profile, **lossy(ending)), COLOUR, tolerance + 3 * blur
            )
        for mode in ("P", "RGBA"):
            image = converted(stored, mode)
            yield Case(f"{kind} {mode}.png", saved(image, icc_profile=profile), COLOUR, tolerance)
        covered = uncovered(COLOUR)
        alpha = covered.getchannel("A")
        both = in_profile(covered.convert("RGB"), profile)
        both.putalpha(alpha)
        for orientation in (1, 6):
            image = turned(both, orientation)
            for ending in ("png", "webp", "tif"):
                how = {"icc_profile": profile, "exif": exif(orientation), **lossy(ending)}
                yield Case(f"{kind} RGBA orientation {orientation}.{ending}", saved(image, **how), COLOUR, tolerance)
    for power in (1.0, 1.8):
        levels = np.asarray(in_profile(GREY.convert("RGB"), rgb_profile(power=power)))[..., 1]
        for ending in ("png", "jpg", "tif"):
            how = {"icc_profile": grey_profile(power), **lossy(ending)}
            yield Case(f"grey profile {power}.{ending}", saved(Image.fromarray(levels.copy()), **how), GREY, 14)
    inks = COLOUR.convert("CMYK")
    expected = ImageCms.profileToProfile(inks, io.BytesIO(ink_profile()), SRGB, outputMode="RGB")
    assert expected is not None
    for ending, tolerance in (("tif", 2), ("jpg", 12)):
        yield Case(f"inks.{ending}", saved(inks, icc_profile=ink_profile(), **lossy(ending)), expected, tolerance)
    for ending in ("png", "jpg", "tif", "webp"):
        how, blur = lossy(ending), 9 if ending == "jpg" else 2
        for kind, profile in (("damaged", b"rubbish" * 30), ("cut", rgb_profile()[:200]), ("inks", ink_profile())):
            yield Case(f"{kind} profile of RGB.{ending}", saved(COLOUR, icc_profile=profile, **how), COLOUR, blur)
        if ending != "webp":
            yield Case(
                f"RGB profile of grey.{ending}", saved(GREY, icc_profile=rgb_profile(power=1.0), **how), GREY, blur
            )


# ---- Bit depth.


def deep_png(samples: np.ndarray, colour_type: int, extra: bytes = b"") -> Callable[[Path], None]:
    """Return a function that writes a PNG with 16 bits. `samples` are bytes [h, w, channels]."""
    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in samples)
    head = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], 16, colour_type, 0, 0, 0)
    content = chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def of_depths() -> Iterator[Case]:
    colour, covered = np.asarray(COLOUR), np.asarray(uncovered(COLOUR))
    yield Case("16 bits RGB.png", deep_png(colour, 2), COLOUR)
    yield Case("16 bits RGBA.png", deep_png(covered, 6), COLOUR)
    yield Case("16 bits LA.png", deep_png(np.asarray(uncovered(GREY)), 4), GREY)
    with_key = np.asarray(keyed(COLOUR))
    yield Case(
        "16 bits keyed RGB.png", deep_png(with_key, 2, chunk(b"tRNS", struct.pack(">3H", 257, 257, 257))), COLOUR
    )
    for bits in (1, 2, 4, 8):
        image = BLACK.convert("P") if bits == 1 else converted(COLOUR, "P")
        image = palette(b"") if bits > 2 else image.quantize(2**bits)
        yield Case(f"palette with {bits} bits.png", saved(image, bits=bits), image.convert("RGB"))
    ramp = (np.asarray(GREY).astype(np.float64) * 257).astype(np.uint16)
    deep = {
        "I;16": Image.fromarray(ramp), "I": Image.fromarray(ramp.astype(np.int32)),
        "F": Image.fromarray(ramp.astype(np.float32)),
    }  # fmt: skip
    for mode, endings in {"I;16": "png tif jp2 pgm im", "I": "tif", "F": "tif pfm"}.items():
        for ending in endings.split():
            yield Case(f"{mode.replace(';', '')}.{ending}", saved(deep[mode]), "has pixels with more than 8 bits")
    for largest in (1, 15, 100, 255):
        levels = np.rint(np.asarray(GREY) / 255 * largest).astype(np.uint8)
        text = f"P2 24 16 {largest} {' '.join(map(str, levels.flatten().tolist()))}"
        shown = Image.fromarray(np.rint(levels * (255 / largest)).astype(np.uint8))
        yield Case(f"largest {largest}.pgm", written(text.encode()), shown)


# ---- Several frames, and files under a wrong ending.


def of_frames() -> Iterator[Case]:
    other = Image.new("RGB", SIZE, (0, 255, 0))
    for ending in ("gif", "png", "webp", "tif", "avif", "mpo"):
        how = {"save_all": True, "append_images": [other.copy()], **lossy(ending)}
        yield Case(f"frames.{ending}", saved(COLOUR, **how), COLOUR, 9 if ending in ("avif", "mpo") else 2)
    for kind, ending in (
        ("png", "jpg"),
        ("jpeg", "png"),
        ("webp", "jpg"),
        ("gif", "jpg"),
        ("bmp", "jpeg"),
        ("tiff", "png"),
    ):
        yield Case(
            f"a {kind} named.{ending}", saved(COLOUR, format=kind, **lossy(kind.replace("jpeg", "jpg"))), COLOUR, 9
        )
    for ending in ("tif", "tga", "bmp", "jp2", "png"):
        for how in {"tif": ("tiff_lzw", "tiff_adobe_deflate", "packbits"), "tga": ("tga_rle",)}.get(ending, ()):
            yield Case(f"{how}.{ending}", saved(COLOUR, compression=how), COLOUR)
    yield Case("group4.tif", saved(BLACK.convert("1"), compression="group4"), BLACK)
    yield Case("progressive.jpg", saved(COLOUR, progressive=True, **lossy("jpg")), COLOUR, 9)
    yield Case("interlaced.gif", saved(COLOUR, interlace=True), COLOUR)


# ---- Damaged and hostile files.


def encoded(kind: str) -> bytes:
    data = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(noise).save(data, kind)
    return data.getvalue()


def of_damages() -> Iterator[Case]:
    unreadable = "cannot be read as an image ("
    yield Case("empty.png", written(b""), unreadable)
    yield Case("zeros.jpg", written(bytes(5000)), unreadable)
    yield Case("text.gif", written(b"this is no image\n"), unreadable)
    yield Case(
        "postscript.jpg", written(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 16\n%%EndComments\n"), unreadable
    )
    yield Case("page.png", written(b"<!DOCTYPE html><html>404</html>"), unreadable)
    yield Case("archive.jpg", written(b"PK\x03\x04" + bytes(100)), unreadable)
    for kind in ("png", "jpeg", "gif", "webp", "tiff", "bmp", "jpeg2000", "avif", "ppm", "qoi", "tga"):
        ending = {"jpeg": "jpg", "jpeg2000": "jp2"}.get(kind, kind)
        content = encoded(kind)
        yield Case(f"half.{ending}", written(content[: len(content) // 2]), unreadable)
        yield Case(f"head.{ending}", written(content[:20]), unreadable)
    huge = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", huge) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
    yield Case("bomb.png", written(bomb), "DecompressionBombError")
    text = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(5_000_000)))
    data = encoded("png")
    yield Case("bomb in a comment.png", written(data[:33] + text + data[33:]), unreadable)


def all_cases() -> list[Case]:
    parts = of_modes, of_orientations, of_transparency, of_profiles, of_depths, of_frames, of_damages
    cases = [case for part in parts for case in part()]
    return [case for case in cases if features.check("avif") or not case.name.endswith("avif")]
