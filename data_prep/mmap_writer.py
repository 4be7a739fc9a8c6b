"""fairseq's memory-mapped dataset, `.bin` and `.idx`, written directly.

Byte for byte what fairseq's MMapIndexedDatasetBuilder writes (fairseq/data/indexed_dataset.py), without the way
through text, tensors and Python lists of pointers.
"""

import contextlib
import hashlib
import os
import struct
from pathlib import Path
from typing import Self

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {"uint16": 8, "uint32": 9}
MAX_SEQUENCE_TOKENS = 65_535
"""fairseq's TokenBlockDataset counts in 16 bits and can wrap beyond this."""


def best_dtype(dictionary_size: int) -> str:
    """The type fairseq-preprocess chooses for a dictionary of this size."""
    return "uint16" if dictionary_size < 65_500 else "uint32"


def sequence_sizes(passage_tokens: np.ndarray) -> np.ndarray:
    """Tokens per stored sequence: passages longer than MAX_SEQUENCE_TOKENS (with eos) become several."""
    if not (passage_tokens > MAX_SEQUENCE_TOKENS).any():
        return passage_tokens
    sizes = []
    for tokens in passage_tokens.tolist():
        full, rest = divmod(tokens, MAX_SEQUENCE_TOKENS)
        sizes += [MAX_SEQUENCE_TOKENS] * full + [rest] * (rest > 0)
    return np.array(sizes, dtype=np.int64)


class MMapWriter:
    """Writes one dataset, sequence after sequence, to PREFIX.bin; PREFIX.idx is written at the end.

    A context manager: leaving it without an error makes both files whole and safe on disk.
    """

    def __init__(self, prefix: Path, dtype: str):
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._sizes: list[np.ndarray] = []
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        self._file = open(f"{self._prefix}.bin", "wb")
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is not None:
            # Close without hiding the error on its way: the file is given up anyway.
            with contextlib.suppress(OSError):
                self._file.close()
            return
        with self._file:
            sync(self._file)
        self._write_index()

    def write(self, tokens: np.ndarray, sizes: np.ndarray):
        """Append the sequences that lie in `tokens` one after another, with so many tokens each."""
        assert tokens.size == sizes.sum(), (tokens.size, sizes.sum())
        content = tokens.astype(self._dtype, copy=False).data
        self._file.write(content)
        self._digest.update(content)
        self._sizes.append(sizes.astype(np.int32))

    def sha256(self) -> str:
        """Of the `.bin` file, of all that was written so far."""
        return self._digest.hexdigest()

    def _write_index(self):
        sizes = np.concatenate([np.empty(0, np.int32), *self._sizes])
        # In 64 bits: a mega-batch has more bytes than 32 bits can count.
        pointers = np.zeros(len(sizes), dtype=np.int64)
        np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self._dtype.itemsize
        with open(f"{self._prefix}.idx", "wb") as file:
            file.write(MAGIC + struct.pack("<QBQ", VERSION, DTYPE_CODES[self._dtype.name], len(sizes)))
            file.write(sizes.data)
            file.write(pointers.data)
            sync(file)


def sync(file):
    """Have the disk take what was written to an open file, so that a rename never comes before its content."""
    file.flush()
    os.fsync(file.fileno())
