"""Choose a sample of the input files of a source, for --dry-run.

The sample is spread over the files. From a large file, only the beginning is used. The readers can read the beginning
of a compressed file, because they read damaged files up to the damage.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.sources.base import SourceFile, no_report
from data_prep.sources.bounded import LimitExceeded, stream
from data_prep.sources.remote import open_source

_LEAST_BYTES = 1 << 20
"""Smallest number of bytes of a file that is used, if the file is not smaller. A bzip2 file consists of blocks of 900
kB, so fewer bytes would give no text."""
_WHOLE = (".epub", ".md", ".arrow", ".feather")
"""Endings of files that are never cut, because a file is one document, or may be one batch of rows."""


class Sample(NamedTuple):
    """A sample of the files of a source."""

    files: list[SourceFile]
    num_bytes: int
    """Number of bytes of the input files that the sample represents."""


def sample_files(kind: str, files: Sequence[SourceFile], wanted_bytes: float, folder: Path) -> Sample:
    """Return a sample of about `wanted_bytes` bytes.

    Args:
        kind: the kind of the source.
        files: all files of the source.
        wanted_bytes: number of bytes of the input files to use.
        folder: an empty folder for the beginnings of large files.
    """
    is_whole = [kind == "books" or file.name.lower().endswith(_WHOLE) for file in files]
    takes = _takes([file.num_bytes for file in files], is_whole, wanted_bytes)
    found: list[SourceFile] = []
    num_bytes = 0
    for number, take in takes.items():
        file = files[number]
        if take >= file.num_bytes:
            found.append(file)
            num_bytes += file.num_bytes
            continue
        target = folder / str(number) / Path(file.name).name
        target.parent.mkdir(parents=True)
        if file.name.lower().endswith(".parquet"):
            num_bytes += _first_rows(file, target, take)
        else:
            num_bytes += _first_bytes(file, target, take)
        status = target.stat()
        found.append(file._replace(path=target, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns))
    return Sample(sorted(found, key=lambda file: file.name), num_bytes)


def _takes(sizes: Sequence[int], is_whole: Sequence[bool], wanted_bytes: float) -> dict[int, int]:
    """Return how many bytes to use of each file that is in the sample, by the index of the file, in ascending order.

    Points with equal distances are put on the bytes of all files, one file after another. Each point adds a piece of
    _LEAST_BYTES bytes of the file in which it lies. So the sample has the same mix of large and small files.

    Args:
        sizes: size of each file in bytes.
        is_whole: whether each file must be used completely.
        wanted_bytes: number of bytes to use in total.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1])
    if wanted_bytes >= total:
        return dict(enumerate(sizes))
    num_points = max(1, math.ceil(wanted_bytes / _LEAST_BYTES))
    while True:
        points = (np.arange(num_points) + 0.5) * (total / num_points)
        hit, counts = np.unique(np.searchsorted(ends, points, "right"), return_counts=True)
        takes = {
            number: sizes[number] if is_whole[number] else min(sizes[number], count * _LEAST_BYTES)
            for number, count in zip(hit.tolist(), counts.tolist(), strict=True)
        }
        # If the files are smaller than _LEAST_BYTES, a point adds less, so more points are needed.
        if sum(takes.values()) >= 0.9 * wanted_bytes or num_points > total:
            return takes
        num_points *= 2


def _first_bytes(file: SourceFile, target: Path, most_bytes: int) -> int:
    """Copy the beginning of a file to `target`. Return the number of bytes copied."""
    with open_source(file) as source:
        content = source.read(most_bytes)
    if file.name.lower().endswith((".txt", ".jsonl", ".ndjson", ".json")) and b"\n" in content:
        content = content[: content.rindex(b"\n") + 1]
    target.write_bytes(content)
    return len(content)


def _first_rows(file: SourceFile, target: Path, most_bytes: int) -> int:
    """Copy the first rows of a Parquet file to `target`. Return the number of bytes of the file that they represent."""
    with suppress(LimitExceeded):
        *_, share = stream("data_prep.sources.parquet:copied_rows", (file, target, most_bytes), no_report)
        if share is not None:
            return round(file.num_bytes * share)
    # The file is damaged, or exceeds a limit. Let the reader report it.
    return _first_bytes(file, target, file.num_bytes)
