"""Keep the pairs of near copies in the folder of --cache, so that they are not searched for again.

Which documents are near copies of each other depends on their texts and their order of priority, and not on the seed or
the division into splits. So a second stream from the same files has the same pairs.
"""

import functools
import hashlib
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_prep.reading.provenance import reading_digest
from data_prep.running.progress import note

Pairs = tuple[np.ndarray, np.ndarray]
"""The numbers by priority of the better and of the worse documents, int64 [pairs]."""
_FOLDER = "near_copies"
_DIGEST_BYTES = 32
_ROWS = 1 << 20
"""Number of documents whose keys are copied at a time."""


def stored_pairs(
    cache: str | None, keys: np.ndarray, priority: np.ndarray, by_priority: np.ndarray, find: Callable[[], Pairs]
) -> Pairs:
    """Return the result of `find`, the pairs of near copies. If the cache contains it, `find` is not called.

    Args:
        cache: the setting --cache; None: the result is not stored.
        keys: the hash of the text of each document, NumPy type V16.
        priority: the number of each document by priority; -1 for exact copies.
        by_priority: the document of each number by priority.
        find: finds the pairs among these documents.
    """
    if cache is None:
        return find()
    # The pairs do not depend on the order in which the documents were read, so the name of the file does not either.
    name = hashlib.sha256(f"{reading_digest()} {_code_digest()} {len(keys)} ".encode())
    for start in range(0, len(keys), _ROWS):
        documents = by_priority[start : start + _ROWS]
        name.update(keys[documents].tobytes())
        name.update((priority[documents] < 0).tobytes())
    path = Path(cache, _FOLDER, name.hexdigest())
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if content[:_DIGEST_BYTES] == hashlib.sha256(memoryview(content)[_DIGEST_BYTES:]).digest():
        better, worse = np.frombuffer(content, np.int64, offset=_DIGEST_BYTES).reshape(2, -1)
        return better, worse
    better, worse = find()
    try:
        _write(path, np.array([better, worse], np.int64))
    except OSError as error:  # for example, the cache is full or read-only
        note(f"the pairs of similar documents are not stored in the cache: {error}")
    return better, worse


def _write(path: Path, pairs: np.ndarray) -> None:
    """Write pairs to a file, after their digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes on several hosts can use one cache, so the temporary name contains the host.
    aside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            file.write(hashlib.sha256(pairs.data).digest())
            file.write(pairs.data)
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def _code_digest() -> str:
    """Return a digest of the code that finds the pairs, apart from the code that reads and signs documents."""
    contents = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
