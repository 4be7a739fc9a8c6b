"""Write fairseq's memory-mapped dataset files, `.bin` and `.idx`.

The files have the same bytes as those of fairseq's MMapIndexedDatasetBuilder (fairseq/data/indexed_dataset.py). This
module is faster, because it writes NumPy arrays of many sequences, and never converts tokens to text or Python lists.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from fairseq_alma.core.stream_folder import idx_header

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

    PREFIX.idx, which contains the lengths and the positions of the sequences, is written at the end of the `with`
    statement, but not after an error. Until then, 4 bytes per sequence are kept in memory.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.
        dtype: the integer type of stored tokens: uint16 or uint32.
        on_progress: called again and again while PREFIX.idx is written, which takes long for many sequences.
    """

    def __init__(self, prefix: Path, dtype: str, on_progress: Callable[[], None] = lambda: None):
        self._prefix, self._dtype, self._on_progress = prefix, np.dtype(dtype), on_progress
        self._sizes = [np.empty(0, np.int32)]

    def __enter__(self) -> Self:
        self._file = open(f"{self._prefix}.bin", "wb")
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is None:
            self._file.close()
            self._write_index(np.concatenate(self._sizes))
        else:
            # An error while closing the file would hide the error that ended the `with` statement.
            with contextlib.suppress(OSError):
                self._file.close()

    def write(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append sequences of tokens to the dataset.

        Args:
            tokens: int [n], the tokens of all sequences, one after another.
            sizes: int [number of sequences], the number of tokens of each sequence. Their sum is n.
        """
        assert tokens.size == sizes.sum(), (tokens.size, sizes.sum())
        self._file.write(tokens.astype(self._dtype, copy=False).data)
        self._sizes.append(sizes.astype(np.int32))

    def _write_index(self, sizes: np.ndarray) -> None:
        with open(f"{self._prefix}.idx", "wb") as file:
            file.write(idx_header(self._dtype.name, len(sizes)))
            file.write(sizes.data)
            # Byte positions in PREFIX.bin. Use 64 bits, because a mega-batch can have more than 2^32 bytes.
            position = 0
            for start in range(0, len(sizes), _POINTERS):
                num_bytes = sizes[start : start + _POINTERS].astype(np.int64) * self._dtype.itemsize
                ends = position + np.cumsum(num_bytes)
                file.write((ends - num_bytes).data)
                position = int(ends[-1])
                self._on_progress()
