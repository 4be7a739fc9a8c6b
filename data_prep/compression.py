"""Decompress files while they are read. Truncated files, damaged files and decompression bombs raise an error.

The libraries that read archives handle truncated files differently, and some of them do not notice the truncation.
Therefore this module decompresses the files, and the libraries receive decompressed bytes.
"""

import io
import lzma
import zlib
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

CHUNK_BYTES = 1 << 18
PIECE_BYTES, _ZSTD_PIECE_BYTES = 1 << 12, 1 << 10
"""Number of compressed bytes that are decompressed at a time, so that even the output of a decompression bomb fits into
memory: up to 4 MiB of gzip and 32 MiB of zstd. Other formats have no such limit, but their decompressors return at most
CHUNK_BYTES at a time."""
BOMB_RATIO = 250
BOMB_FLOOR_BYTES = 64 << 20
"""A file is a decompression bomb if its decompressed size exceeds BOMB_FLOOR_BYTES + BOMB_RATIO x compressed size.

For comparison, text is typically compressed to a fifth of its size, and web archives rarely to less than a twentieth.
"""


_BLOCK_BYTES = 512
"""Size of the blocks that a file fills if it was padded with zero bytes, as on tapes."""


class DamagedFile(Exception):  # noqa: N818, the name needs no suffix
    """Raised if a file cannot be read, or only its beginning can be read. The message says why."""


_gzip = partial(zlib.decompressobj, wbits=31)  # in zlib, wbits=31 means the gzip format
_xz = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=256 << 20)


def zstd(dictionary: Any = None) -> Any:
    """Return a decompressor for one zstd frame. `dictionary`: the zstandard dictionary that it needs, if any."""
    import zstandard

    # Accept every window that zstd can write (--long=31, which means 2 GiB). The memory of a window is used only as far
    # as it is filled, so a small file with a large window uses little memory before it counts as a decompression bomb.
    window_bytes = 1 << zstandard.WINDOWLOG_MAX
    return zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=window_bytes).decompressobj()


_SKIPPABLE = tuple(bytes([0x50 + number]) + b"\x2a\x4d\x18" for number in range(16))
"""The first bytes of a zstd frame that contains no data. The program pzstd writes one before each frame with data."""
_DICTIONARY_FRAME = _SKIPPABLE[13]
"""The first bytes of the skippable frame with the zstd dictionary, with which each .warc.zst of ArchiveTeam begins. See
https://iipc.github.io/warc-specifications/specifications/warc-zstd/."""
_MAX_DICTIONARY_BYTES = 16 << 20
_FORMATS: dict[str, tuple[tuple[bytes, ...], Callable[[], Any]]] = {
    "gzip": ((b"\x1f\x8b",), _gzip),
    "bzip2": ((b"BZh",), BZ2Decompressor),
    "zstd": ((b"\x28\xb5\x2f\xfd", *_SKIPPABLE), zstd),
    "xz": ((b"\xfd7zXZ\0",), _xz),
}
"""For each compression format, the bytes with which a file can begin, and the function that makes a decompressor."""
_UNREADABLE = {
    "lz4": (b"\x04\x22\x4d\x18", "lz4 -d FILE"),
    "compress (.Z)": (b"\x1f\x9d", "uncompress FILE"),
    "zip": (b"PK\x03\x04", "unzip FILE"),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c", "7z x FILE"),
    "RAR": (b"Rar!\x1a\x07", "unrar x FILE"),
    "lzip": (b"LZIP\x01", "lzip -d FILE"),
    "lzma": (b"\x5d\0\0", "unlzma FILE"),
    "snappy": (b"\xff\x06\0\0sNaPpY", "snzip -d FILE"),
}
"""For each format that is recognized but not read, the bytes with which a file begins, and what decompresses it."""
ENDINGS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd", ".xz": "xz"}
"""The compression format that each ending of a file name stands for."""


_BZIP2_STREAM = b"BZh91AY&SY"
"""The first bytes of each stream in a .bz2 file. A stream always begins at a byte boundary."""


class _Chunks(io.RawIOBase):
    """A file object that reads the bytes that an iterator yields."""

    def __init__(self, chunks: Iterator[bytes], file: IO[bytes]):
        self._chunks, self._file = chunks, file
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def reader(chunks: Iterator[bytes], file: IO[bytes]) -> io.BufferedReader:
    """Return a file object that reads the bytes that an iterator yields. Closing it closes `file`."""
    return io.BufferedReader(_Chunks(chunks, file), CHUNK_BYTES)


def open_bzip2_streams(path: str | Path, start: int, end: int) -> io.BufferedReader | None:
    """Open the content of the bzip2 streams that begin between the bytes `start` and `end` of a file with many streams.

    The content of the first stream of the file, which can contain a header, comes before it.

    Returns:
        The decompressed content; None if `start` is above 0 and no stream begins between `start` and `end`.
    """
    first, last = _next_stream(path, start), _next_stream(path, end)
    if first == last and start > 0:
        return None
    file = open(path, "rb")  # noqa: SIM115, the reader that is returned closes it
    head = [(0, _next_stream(path, 1))] if first > 0 else []
    compressed = reader(_bytes_of(file, [*head, (first, last)]), file)
    return reader(_unpacked(compressed, "bzip2", BZ2Decompressor), compressed)


def _next_stream(path: str | Path, position: int) -> int:
    """Return the position of the first bzip2 stream that begins at or after `position`; the file size if none does."""
    with open(path, "rb") as file:
        file.seek(position)
        kept = b""  # the last bytes of the previous chunk, because the first bytes of a stream may be split
        while chunk := file.read(CHUNK_BYTES):
            found = (kept + chunk).find(_BZIP2_STREAM)
            if found >= 0:
                return position - len(kept) + found
            position += len(chunk)
            kept = chunk[-len(_BZIP2_STREAM) + 1 :]
        return position


def _bytes_of(file: IO[bytes], ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of a file in some ranges (start, end)."""
    for start, end in ranges:
        file.seek(start)
        while start < end and (chunk := file.read(min(CHUNK_BYTES, end - start))):
            yield chunk
            start += len(chunk)


def plain_name(name: str) -> str:
    """Return a file name without the ending of a compressed file (.gz, .bz2, .zst, .xz), if it has one."""
    return next((name[: -len(ending)] for ending in ENDINGS if name.lower().endswith(ending)), name)


def open_plain(path: str | Path) -> io.BufferedReader:
    """Open a file for reading its decompressed content. The first bytes of the file determine the compression format.

    Reading from the result raises DamagedFile if the content ends too early, is invalid, or is a decompression bomb.

    Raises:
        DamagedFile: if the file is compressed in a format that is not read, or the file name has one of the ENDINGS,
            but the first bytes are not those of this format.
    """
    file: io.BufferedReader = io.BufferedReader(io.FileIO(path), CHUNK_BYTES)
    try:
        magic = file.peek()
        for name, (starts, make) in _FORMATS.items():
            if magic.startswith(starts):
                dictionary = _dictionary(file) if magic.startswith(_DICTIONARY_FRAME) else None
                return reader(_unpacked(file, name, partial(zstd, dictionary) if dictionary else make), file)
        for name, (start, command) in _UNREADABLE.items():
            if magic.startswith(start):
                raise DamagedFile(f"the {name} format cannot be read. Decompress the file with: {command}")
        ending = Path(path).suffix.lower()
        if ending == ".br":  # files in this format have no typical first bytes
            raise DamagedFile("the Brotli format cannot be read. Decompress the file with: brotli -d FILE")
        if ending in ENDINGS and magic:
            wanted = ENDINGS[ending]
            raise DamagedFile(f"the file name says {wanted}, but the content does not begin like a {wanted} file")
        return file
    except DamagedFile:
        file.close()
        raise


def _dictionary(file: io.BufferedReader) -> Any:
    """Return the zstd dictionary in the skippable frame at the beginning of a file; None if it contains none."""
    import zstandard

    num_bytes = int.from_bytes(file.read(8)[4:], "little")
    content = file.read(min(num_bytes, _MAX_DICTIONARY_BYTES + 1))
    file.seek(0)
    if content.startswith(_FORMATS["zstd"][0]):
        packed = io.BytesIO(content)
        content = reader(_unpacked(packed, "zstd", zstd), packed).read(_MAX_DICTIONARY_BYTES + 1)
    if not content.startswith(b"\x37\xa4\x30\xec"):  # the first bytes of a zstd dictionary
        return None
    if len(content) > _MAX_DICTIONARY_BYTES:
        raise DamagedFile(f"the zstd dictionary has more than {_MAX_DICTIONARY_BYTES >> 20} MiB")
    return zstandard.ZstdCompressionDict(content)


def _unpacked(file: IO[bytes], name: str, make: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the decompressed content of a file.

    The file may have several members (for example gzip members). They are decompressed one after another.

    Args:
        file: the compressed file.
        name: the name of its format.
        make: makes a zlib, bz2, lzma or zstandard decompressor for one member.
    """
    member = make()
    piece_bytes = _ZSTD_PIECE_BYTES if name == "zstd" else PIECE_BYTES
    waiting = b""  # compressed bytes that have been read, but have not been decompressed yet
    is_inside = has_more = False  # whether a member has begun, and whether it has more output without more input
    bytes_in = bytes_out = 0
    padding_start = 0  # the first of the zero bytes at the end of the file; 0 if there are none
    while True:
        if not has_more and (not waiting or not is_inside):
            waiting += file.read(piece_bytes - len(waiting))
        if not has_more and not waiting:
            if is_inside:
                raise DamagedFile(f"cut short: the {name} data ends too early, at byte {bytes_in:,}")
            # Some tools add zero bytes, so that a file fills whole blocks. Other zeros stand where data should be.
            if padding_start and bytes_in % _BLOCK_BYTES:
                raise DamagedFile(f"damaged: zero bytes from byte {padding_start:,} to the end of the file")
            return
        data, waiting = waiting, b""  # no bytes wait while the decompressor has more output
        try:
            if isinstance(member, BZ2Decompressor | lzma.LZMADecompressor):
                out = member.decompress(data, CHUNK_BYTES)
                has_more = not member.needs_input and not member.eof
            else:
                out = member.decompress(data)
        except Exception as error:  # catch all errors, because each library has its own error types
            if is_inside or not bytes_in or data.strip(b"\0"):
                raise DamagedFile(_why_invalid(error, name, bytes_in)) from error
            padding_start = padding_start or bytes_in
            bytes_in += len(data)
            continue
        is_inside = not member.eof
        if member.eof:
            waiting = member.unused_data
            member = make()
        bytes_in += len(data) - len(waiting)
        bytes_out += len(out)
        if bytes_out > BOMB_FLOOR_BYTES + BOMB_RATIO * bytes_in:
            raise DamagedFile(
                f"the file is a decompression bomb: it decompresses to more than {BOMB_RATIO} times its size "
                f"and more than {BOMB_FLOOR_BYTES >> 20} MiB"
            )
        yield out


def _why_invalid(error: Exception, name: str, position: int) -> str:
    """Return why a decompressor raised an error."""
    if "Dictionary mismatch" in str(error):
        return (
            "the zstd data needs a dictionary that the file does not contain. Decompress the file with: "
            "zstd -d -D DICTIONARY FILE"
        )
    if "not enough memory" in str(error):
        return "the zstd data needs more memory than this process may use (up to 2 GiB if compressed with --long=31)"
    return f"damaged: invalid {name} data near byte {position:,} ({error})"
