"""Decompress files while they are read. Truncated files, damaged files and decompression bombs raise an error.

The libraries that read archives handle truncated files differently, and some of them do not notice the truncation.
Therefore this module decompresses the files, and the libraries receive decompressed bytes.
"""

import io
import lzma
import zlib
from bz2 import BZ2Decompressor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

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


class _Decompressor(Protocol):
    """The common interface of the zlib, bz2 and zstandard decompressors.

    A decompressor handles one member of a compressed file: a gzip member, a bzip2 stream or a zstd frame.
    """

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes: ...  # zstd has no max_length


def _gzip() -> _Decompressor:
    return zlib.decompressobj(wbits=31)  # in zlib, wbits=31 means the gzip format


def zstd(dictionary: Any = None) -> _Decompressor:
    import zstandard

    # Accept every window that zstd can write (--long=31, which means 2 GiB). The memory of a window is used only as far
    # as it is filled, so a small file with a large window uses little memory before it counts as a decompression bomb.
    window_bytes = 1 << zstandard.WINDOWLOG_MAX
    return zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=window_bytes).decompressobj()  # type: ignore[return-value]


def _xz() -> _Decompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=256 << 20)


_SKIPPABLE = tuple(bytes([0x50 + number]) + b"\x2a\x4d\x18" for number in range(16))
"""The first bytes of a zstd frame that contains no data. The program pzstd writes one before each frame with data."""
_DICTIONARY_FRAME = _SKIPPABLE[13]
"""The first bytes of the skippable frame with the zstd dictionary, with which each .warc.zst of ArchiveTeam begins. See
https://iipc.github.io/warc-specifications/specifications/warc-zstd/."""
_MAX_DICTIONARY_BYTES = 16 << 20
_FORMATS = {
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


BZIP2_STREAM = b"BZh91AY&SY"
"""The first bytes of each stream in a .bz2 file. A stream always begins at a byte boundary."""


def bzip2_streams(path: str | Path, start: int, end: int) -> tuple[int, int]:
    """Find the bzip2 streams that begin between the bytes `start` and `end` of a file with many streams.

    Returns:
        Position of the byte at which the first of these streams begins, and position of the byte at which the last of
        these streams ends. The two positions are equal if no stream begins between `start` and `end`.
    """
    return _next_stream(path, start), _next_stream(path, end)


def _next_stream(path: str | Path, position: int) -> int:
    """Return the position of the first bzip2 stream that begins at or after `position`; the file size if none does."""
    with open(path, "rb") as file:
        file.seek(position)
        # Keep the last bytes of the previous chunk, because the bytes BZIP2_STREAM, with which each stream begins, may
        # be split between two chunks.
        kept = b""
        while chunk := file.read(CHUNK_BYTES):
            found = (kept + chunk).find(BZIP2_STREAM)
            if found >= 0:
                return position - len(kept) + found
            position += len(chunk)
            kept = chunk[-len(BZIP2_STREAM) + 1 :]
        return position


def open_bzip2_streams(path: str | Path, first: int, last: int) -> io.BufferedReader:
    """Open the decompressed content of the bzip2 streams between two byte positions that `bzip2_streams` returned."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115, the reader that is returned closes it
    file.seek(first)
    return io.BufferedReader(_Unpacked(_Slice(file, last - first), "bzip2", BZ2Decompressor), CHUNK_BYTES)


class _Slice(io.RawIOBase):
    """A file object that reads only the next `num_bytes` bytes of another file."""

    def __init__(self, file: BinaryIO, num_bytes: int):
        self._file, self._left = file, num_bytes

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def open_plain(path: str | Path) -> io.BufferedReader:
    """Open a file for reading its decompressed content. The first bytes of the file determine the compression format.

    Reading from the result raises DamagedFile if the content ends too early, is invalid, or is a decompression bomb.

    Raises:
        DamagedFile: if the file is compressed in a format that is not read, or the file name has one of the ENDINGS,
            but the first bytes are not those of this format.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115, the reader that is returned closes it
    try:
        return io.BufferedReader(_plain(file, str(path).lower()), CHUNK_BYTES)
    except DamagedFile:
        file.close()
        raise


def _plain(file: io.FileIO, path: str) -> io.RawIOBase:
    """Return a file object that reads the decompressed content of a file. See `open_plain`."""
    magic = file.read(10)
    file.seek(0)
    for name, (starts, make) in _FORMATS.items():
        if magic.startswith(starts):
            dictionary = _dictionary(file) if magic.startswith(_DICTIONARY_FRAME) else None
            return _Unpacked(file, name, partial(zstd, dictionary) if dictionary else make)
    for name, (start, command) in _UNREADABLE.items():
        if magic.startswith(start):
            raise DamagedFile(f"the {name} format cannot be read. Decompress the file with: {command}")
    if path.endswith(".br"):  # files in this format have no typical first bytes
        raise DamagedFile("the Brotli format cannot be read. Decompress the file with: brotli -d FILE")
    wanted = next((name for ending, name in ENDINGS.items() if path.endswith(ending)), None)
    if wanted and magic:
        raise DamagedFile(f"the file name says {wanted}, but the content does not begin like a {wanted} file")
    return file


def _dictionary(file: io.FileIO) -> Any:
    """Return the zstd dictionary in the skippable frame at the beginning of a file; None if it contains none."""
    import zstandard

    num_bytes = int.from_bytes(file.read(8)[4:], "little")
    content = file.read(min(num_bytes, _MAX_DICTIONARY_BYTES + 1))
    file.seek(0)
    if content.startswith(_FORMATS["zstd"][0]):
        content = io.BufferedReader(_Unpacked(io.BytesIO(content), "zstd", zstd)).read(_MAX_DICTIONARY_BYTES + 1)
    if not content.startswith(b"\x37\xa4\x30\xec"):  # the first bytes of a zstd dictionary
        return None
    if len(content) > _MAX_DICTIONARY_BYTES:
        raise DamagedFile(f"the zstd dictionary has more than {_MAX_DICTIONARY_BYTES >> 20} MiB")
    return zstandard.ZstdCompressionDict(content)


class Eager:
    """A reader whose `read` returns the bytes that are available now, even if they are fewer than requested.

    Therefore, if the file is damaged, the caller first gets all bytes before the damage, and only then the error.
    """

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self.tail = b""
        """The last four bytes read so far."""

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, or b"" at the end of the file."""
        content = self._file.read1(size) if size > 0 else self._file.read(size)
        self.tail = (self.tail + content[-4:])[-4:]
        return content

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class _Unpacked(io.RawIOBase):
    """A file object that reads the decompressed content of a compressed file.

    The file may have several members (for example gzip members). They are decompressed one after another.
    """

    def __init__(self, file: Any, name: str, make):
        self._file, self._name, self._make = io.BufferedReader(file, CHUNK_BYTES), name, make
        self._member: _Decompressor = make()
        self._piece_bytes = _ZSTD_PIECE_BYTES if name == "zstd" else PIECE_BYTES
        # _ready: decompressed bytes that have not been returned yet.
        # _waiting: compressed bytes that have been read from the file, but have not been decompressed yet.
        # _begun: True inside a member of the file (for example a gzip member), False between two members.
        # _has_more: True if the decompressor has more output without more input.
        self._ready = memoryview(b"")
        self._waiting = b""
        self._begun = self._has_more = False
        self.bytes_in = self.bytes_out = 0
        self._padding_start = 0  # the first of the zero bytes at the end of the file; 0 if there are none

    def readable(self) -> bool:
        return True

    # Archive libraries call tell() to find out at which position of the file they begin to read.
    def tell(self) -> int:
        return self.bytes_out - len(self._ready)

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        while not self._ready:
            if not self._has_more and (not self._waiting or not self._begun):
                self._waiting += self._file.read(self._piece_bytes - len(self._waiting))
            if not self._has_more and not self._waiting:
                if self._begun:
                    raise DamagedFile(f"cut short: the {self._name} data ends too early, at byte {self.bytes_in:,}")
                # Some tools add zero bytes, so that a file fills whole blocks. Other zeros stand where data should be.
                if self._padding_start and self.bytes_in % _BLOCK_BYTES:
                    raise DamagedFile(f"damaged: zero bytes from byte {self._padding_start:,} to the end of the file")
                return 0
            self._unpack()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> None:
        """Decompress the waiting bytes, or take more output from the decompressor if it has more."""
        position = self.bytes_in
        data, self._waiting = self._waiting, b""  # no bytes wait while the decompressor has more output
        try:
            if isinstance(self._member, BZ2Decompressor | lzma.LZMADecompressor):
                out = self._member.decompress(data, CHUNK_BYTES)
                self._has_more = not self._member.needs_input and not self._member.eof
            else:
                out = self._member.decompress(data)
        except Exception as error:  # catch all errors, because each library has its own error types
            if not self._begun and position and not data.strip(b"\0"):
                self._padding_start = self._padding_start or position
                self.bytes_in += len(data)
                return
            raise DamagedFile(_why_invalid(error, self._name, position)) from error
        self._begun = True
        if self._member.eof:
            self._waiting = self._member.unused_data
            self._member, self._begun = self._make(), False
        self.bytes_in += len(data) - len(self._waiting)
        self.bytes_out += len(out)
        if self.bytes_out > BOMB_FLOOR_BYTES + BOMB_RATIO * self.bytes_in:
            raise DamagedFile(
                f"the file is a decompression bomb: it decompresses to more than {BOMB_RATIO} times its size "
                f"and more than {BOMB_FLOOR_BYTES >> 20} MiB"
            )
        self._ready = memoryview(out)


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
