"""Write fairseq's memory-mapped dataset files, `.bin` and `.idx`.

The files have the same bytes as those of fairseq's MMapIndexedDatasetBuilder (fairseq/data/indexed_dataset.py). This
module is faster, because it writes NumPy arrays of many sequences, and never converts tokens to text or Python lists.
"""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from fairseq_alma.core.files import sha256_of

# Constants of fairseq's format: the first bytes of every .idx file, the format version, and codes of integer types.
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {"uint16": 8, "uint32": 9}
MAX_SEQUENCE_TOKENS = 65_535
"""Maximum sequence length, in tokens. fairseq's TokenBlockDataset stores token counts in 16 bits, which can overflow if
a sequence is longer."""
_POINTERS = 1 << 20
"""Number of positions in an .idx file that are computed at a time."""


def best_dtype(dictionary_size: int) -> str:
    """Return the integer type of stored tokens that fairseq-preprocess uses for a dictionary of this size."""
    return "uint16" if dictionary_size < 65_500 else "uint32"


def sequence_sizes(passage_tokens: np.ndarray) -> np.ndarray:
    """Return the length of each sequence to store. A passage longer than MAX_SEQUENCE_TOKENS becomes several sequences.

    Args:
        passage_tokens: int [n], the number of tokens of each passage, including its end-of-sequence token (eos).

    Returns:
        int [number of sequences], the number of tokens of each sequence.
    """
    if not (passage_tokens > MAX_SEQUENCE_TOKENS).any():
        return passage_tokens
    sizes = []
    for tokens in passage_tokens.tolist():
        full, rest = divmod(tokens, MAX_SEQUENCE_TOKENS)
        sizes += [MAX_SEQUENCE_TOKENS] * full + [rest] * (rest > 0)
    return np.array(sizes, dtype=np.int64)


class MMapWriter:
    """A context manager that writes one fairseq dataset: the files PREFIX.bin and PREFIX.idx.

    Each call of `write` appends tokens to PREFIX.bin, and the lengths of the sequences to PREFIX.idx. The positions of
    the sequences are added to PREFIX.idx at the end of the `with` statement, and PREFIX.idx is removed after an error.
    The memory that is needed does not depend on the size of the dataset.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.
        dtype: the integer type of stored tokens: uint16 or uint32.
        on_progress: called again and again while PREFIX.idx is completed, which takes long for many sequences.
    """

    def __init__(self, prefix: Path, dtype: str, on_progress: Callable[[], None] = lambda: None):
        self._prefix, self._dtype, self._on_progress = prefix, np.dtype(dtype), on_progress
        self._num_sequences = 0

    def __enter__(self) -> Self:
        self._file = open(f"{self._prefix}.bin", "wb")
        self._index = open(f"{self._prefix}.idx", "w+b")
        self._write_head()
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is not None:
            # Ignore errors while closing the files, because they would hide the error that ended the `with` statement.
            # The files are incomplete anyway.
            for file in (self._file, self._index):
                with contextlib.suppress(OSError):
                    file.close()
            Path(self._index.name).unlink(missing_ok=True)
            return
        self._file.close()
        with self._index:
            self._write_pointers()

    def write(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append sequences of tokens to the dataset.

        Args:
            tokens: int [n], the tokens of all sequences, one after another.
            sizes: int [number of sequences], the number of tokens of each sequence. Their sum is n.
        """
        assert tokens.size == sizes.sum(), (tokens.size, sizes.sum())
        self._file.write(tokens.astype(self._dtype, copy=False).data)
        self._index.write(sizes.astype(np.int32).data)
        self._num_sequences += len(sizes)

    def sha256(self) -> str:
        """Read the finished file PREFIX.bin, and return its SHA-256 digest in hexadecimal."""
        return sha256_of(self._file.name)

    def _write_head(self) -> None:
        """Write the head of PREFIX.idx, which contains the number of sequences."""
        code = DTYPE_CODES[self._dtype.name]
        self._index.seek(0)
        self._index.write(MAGIC + struct.pack("<QBQ", VERSION, code, self._num_sequences))

    def _write_pointers(self) -> None:
        """Complete PREFIX.idx: write the number of sequences, and the position of each sequence in PREFIX.bin."""
        self._write_head()
        sizes_at = self._index.tell()
        pointers_at = sizes_at + 4 * self._num_sequences
        # Pointers are byte positions in PREFIX.bin. Use 64 bits, because a mega-batch can have more than 2^32 bytes.
        position = 0
        for start in range(0, self._num_sequences, _POINTERS):
            count = min(_POINTERS, self._num_sequences - start)
            self._index.seek(sizes_at + 4 * start)
            ends = np.cumsum(np.frombuffer(self._index.read(4 * count), np.int32), dtype=np.int64)
            ends = position + ends * self._dtype.itemsize
            self._index.seek(pointers_at + 8 * start)
            self._index.write(np.concatenate([[position], ends[:-1]]).astype(np.int64).data)
            position = int(ends[-1])
            self._on_progress()
