"""Files that may be compressed, read as a plain stream of bytes: cut short, damaged or a bomb is told, not passed over.

Archive readers differ in what they say of a truncated file (some say nothing), so that bytes are unpacked here and
handed to them plain.
"""

import io
import zlib
from bz2 import BZ2Decompressor
from pathlib import Path
from typing import BinaryIO, Protocol

CHUNK_BYTES = 1 << 18
BOMB_RATIO = 250
BOMB_FLOOR_BYTES = 64 << 20
"""Bytes out may be so many times the bytes in, beyond a floor. Text packs about 5 to 1, a crawl seldom 20 to 1."""


class DamagedFile(Exception):  # noqa: N818, it is the file that is
    """A file that cannot be read, or only up to here. The text says why."""


class _Decompressor(Protocol):
    """What zlib, bz2 and zstandard agree on: one member (stream, frame) of a file."""

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
"""How a stream of a .bz2 file begins, at a whole byte."""


def bzip2_streams(path: str | Path, start: int, end: int) -> tuple[int, int]:
    """The streams of a file of many, as Wikipedia's multistream dumps, that begin in bytes start..end: where the first
    begins and where the one after the last does. Equal if none begins there.
    """
    return _next_stream(path, start), _next_stream(path, end)


def _next_stream(path: str | Path, position: int) -> int:
    """The first at `position` or after it; the end of the file if there is none."""
    with open(path, "rb") as file:
        file.seek(position)
        kept = b""
        while piece := file.read(CHUNK_BYTES):
            found = (kept + piece).find(BZIP2_STREAM)
            if found >= 0:
                return position - len(kept) + found
            position += len(piece)
            kept = piece[-len(BZIP2_STREAM) + 1 :]
        return position


def open_bzip2_streams(path: str | Path, first: int, last: int) -> io.BufferedReader:
    """What lies unpacked between two places that `bzip2_streams` found."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115, the reader that is returned closes it
    file.seek(first)
    return io.BufferedReader(_Unpacked(_Slice(file, last - first), "bzip2", BZ2Decompressor), CHUNK_BYTES)


class _Slice(io.RawIOBase):
    """The next so many bytes of a file."""

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
    """The content of a file, unpacked if it is compressed (by its first bytes, not its name).

    Reading raises DamagedFile where the content ends too early, fails a check, or swells like a bomb.
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
    """Gives what is there rather than waiting for as much as is asked: what comes before some damage is not lost."""

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self.tail = b""
        """The last bytes that were given."""

    def read(self, size: int = -1) -> bytes:
        content = self._file.read1(size) if size > 0 else self._file.read(size)
        self.tail = (self.tail + content[-4:])[-4:]
        return content

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class _Unpacked(io.RawIOBase):
    """All members of a compressed file, one after another."""

    def __init__(self, file: BinaryIO | io.RawIOBase, name: str, make):
        self._file, self._name, self._make = file, name, make
        self._member: _Decompressor = make()
        self._ready = memoryview(b"")
        self._waiting = b""
        self._begun = False
        self.bytes_in = self.bytes_out = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:  # archive readers ask where they begin
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
        at = self.bytes_in
        try:
            # Pieces so small that even a bomb's output fits into memory before it is noticed.
            piece, rest = data[: CHUNK_BYTES // 64], data[CHUNK_BYTES // 64 :]
            out = self._member.decompress(piece)
        except Exception as error:  # zlib.error, OSError, EOFError, zstandard.ZstdError: each library has its own
            if not self._begun and at and not data.strip(b"\0"):
                self.bytes_in += len(data)  # padding with zeros, as tapes and some tools leave it
                return
            raise DamagedFile(f"damaged: {self._name} data wrong near byte {at:,} ({error})") from error
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
