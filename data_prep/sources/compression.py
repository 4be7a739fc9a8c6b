"""Read files that may be compressed as a plain stream of bytes. Truncated and damaged files and bombs raise an error.

Archive readers handle truncated files differently, and some do not notice them. Therefore the bytes are decompressed
here, and archive readers get them plain.
"""

import io
import zlib
from bz2 import BZ2Decompressor
from pathlib import Path
from typing import BinaryIO, Protocol

CHUNK_BYTES = 1 << 18
BOMB_RATIO = 250
BOMB_FLOOR_BYTES = 64 << 20
"""The decompressed size may be at most the floor plus BOMB_RATIO times the compressed size.

Text compresses about 5 to 1, and a crawl seldom 20 to 1.
"""


class DamagedFile(Exception):  # noqa: N818, it is the file that is
    """An error of a file that cannot be read, or only up to this point. The text says why."""


class _Decompressor(Protocol):
    """The interface that zlib, bz2 and zstandard share: a decompressor of one member (stream, frame) of a file."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _gzip() -> _Decompressor:
    return zlib.decompressobj(wbits=31)


def _zstd() -> _Decompressor:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()  # type: ignore[return-value]


_MAGIC = {b"\x1f\x8b": ("gzip", _gzip), b"BZh": ("bzip2", BZ2Decompressor), b"\x28\xb5\x2f\xfd": ("zstd", _zstd)}
_ENDINGS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}


BZIP2_STREAM = b"BZh91AY&SY"
"""The first bytes of a stream in a .bz2 file. Streams begin at whole bytes."""


def bzip2_streams(path: str | Path, start: int, end: int) -> tuple[int, int]:
    """Find the streams that begin in bytes start..end of a file of many streams, such as a multistream dump.

    Returns:
        Where the first of them begins, and where the first one after them begins. Equal if no stream begins there.
    """
    return _next_stream(path, start), _next_stream(path, end)


def _next_stream(path: str | Path, position: int) -> int:
    """Return where the first stream at `position` or after it begins; the end of the file if there is none."""
    with open(path, "rb") as file:
        file.seek(position)
        kept = b""
        while chunk := file.read(CHUNK_BYTES):
            found = (kept + chunk).find(BZIP2_STREAM)
            if found >= 0:
                return position - len(kept) + found
            position += len(chunk)
            kept = chunk[-len(BZIP2_STREAM) + 1 :]
        return position


def open_bzip2_streams(path: str | Path, first: int, last: int) -> io.BufferedReader:
    """Open the decompressed content between two places that `bzip2_streams` returned."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115, the reader that is returned closes it
    file.seek(first)
    return io.BufferedReader(_Unpacked(_Slice(file, last - first), "bzip2", BZ2Decompressor), CHUNK_BYTES)


class _Slice(io.RawIOBase):
    """The next `num_bytes` bytes of a file."""

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
    """Open a file and decompress it if it is compressed. The first bytes decide, not the name.

    Reading raises DamagedFile where the content ends too early, fails a check, or is a decompression bomb.

    Raises:
        DamagedFile: the name has the ending of a compression, but the first bytes are others.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115, the reader that is returned closes it
    magic = file.read(4)
    file.seek(0)
    for start, (name, make) in _MAGIC.items():
        if magic.startswith(start):
            return io.BufferedReader(_Unpacked(file, name, make), CHUNK_BYTES)
    wanted = next((name for ending, name in _ENDINGS.items() if str(path).endswith(ending)), None)
    if wanted and magic:
        file.close()
        raise DamagedFile(f"its name says {wanted}, its first bytes do not")
    return io.BufferedReader(file, CHUNK_BYTES)


class Eager:
    """A reader that returns the bytes it has, rather than all that are asked for: bytes before damage are not lost."""

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self.tail = b""
        """The last four bytes that were read."""

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; empty at the end of the file."""
        content = self._file.read1(size) if size > 0 else self._file.read(size)
        self.tail = (self.tail + content[-4:])[-4:]
        return content

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class _Unpacked(io.RawIOBase):
    """The decompressed content of all members of a compressed file, one after another."""

    def __init__(self, file: BinaryIO | io.RawIOBase, name: str, make):
        self._file, self._name, self._make = file, name, make
        self._member: _Decompressor = make()
        self._ready = memoryview(b"")
        self._waiting = b""
        self._begun = False
        self.bytes_in = self.bytes_out = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:  # archive readers ask for the position at which they begin
        return self.bytes_out - len(self._ready)

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        while not self._ready:
            data = self._waiting or self._file.read(CHUNK_BYTES) or b""
            self._waiting = b""
            if not data:
                if self._begun:
                    raise DamagedFile(f"cut short: its {self._name} data end at byte {self.bytes_in:,}, too early")
                return 0
            self._unpack(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, data: bytes) -> None:
        """Decompress the beginning of `data`, and keep the rest for later."""
        position = self.bytes_in
        try:
            # Chunks so small that even the output of a bomb fits into memory before it is noticed.
            chunk, rest = data[: CHUNK_BYTES // 64], data[CHUNK_BYTES // 64 :]
            out = self._member.decompress(chunk)
        except (
            Exception
        ) as error:  # zlib.error, OSError, EOFError, zstandard.ZstdError: each library has errors of its own
            if not self._begun and position and not data.strip(b"\0"):
                self.bytes_in += len(data)  # padding with zeros, as tapes and some tools write it
                return
            raise DamagedFile(f"damaged: {self._name} data wrong near byte {position:,} ({error})") from error
        self._begun = True
        if self._member.eof:
            rest = self._member.unused_data + rest
            self._member, self._begun = self._make(), False
        self._waiting = rest
        self.bytes_in += len(data) - len(rest)
        self.bytes_out += len(out)
        if self.bytes_out > BOMB_FLOOR_BYTES + BOMB_RATIO * self.bytes_in:
            raise DamagedFile(
                f"a decompression bomb: more than {BOMB_RATIO} times its size comes out of it, "
                f"and more than {BOMB_FLOOR_BYTES >> 20} MiB"
            )
        self._ready = memoryview(out)
