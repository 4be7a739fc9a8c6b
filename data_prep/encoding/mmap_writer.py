"""Write fairseq's memory-mapped dataset files, `.bin` and `.idx`.

The files have the same bytes as those of fairseq's MMapIndexedDatasetBuilder (fairseq/data/indexed_dataset.py). This
module is faster, because it writes NumPy arrays of many sequences, and never converts tokens to text or Python lists.
"""

import contextlib
import hashlib
import struct
from pathlib import Path
from typing import Self

import numpy as np

from fairseq_alma.core.files import sync

# Constants of fairseq's format: the first bytes of every .idx file, the format version, and codes of integer types.
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {"uint16": 8, "uint32": 9}
MAX_SEQUENCE_TOKENS = 65_535
"""Maximum sequence length, in tokens. fairseq's TokenBlockDataset stores token counts in 16 bits, which can overflow if
a sequence is longer."""


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

    Each call of `write` appends tokens to PREFIX.bin. PREFIX.idx (the lengths and positions of the sequences) is
    written at the end of the `with` statement. If the `with` statement ends without an error, both files are complete
    and synced to disk.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.
        dtype: the integer type of stored tokens: uint16 or uint32.
    """

    def __init__(self, prefix: Path, dtype: str):
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._sizes: list[np.ndarray] = []
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        self._file = open(f"{self._prefix}.bin", "wb")
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is not None:
            # Ignore errors while closing the file, because they would hide the error that ended the `with` statement.
            # The file is incomplete anyway.
            with contextlib.suppress(OSError):
                self._file.close()
            return
        self._file.close()
        sync(Path(self._file.name))
        self._write_index()

    def write(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append sequences of tokens to the dataset.

        Args:
            tokens: int [n], the tokens of all sequences, one after another.
            sizes: int [number of sequences], the number of tokens of each sequence. Their sum is n.
        """
        assert tokens.size == sizes.sum(), (tokens.size, sizes.sum())
        content = tokens.astype(self._dtype, copy=False).data
        self._file.write(content)
        self._digest.update(content)
        self._sizes.append(sizes.astype(np.int32))

    def sha256(self) -> str:
        """Return the SHA-256 digest of the bytes written to PREFIX.bin so far, in hexadecimal."""
        return self._digest.hexdigest()

    def _write_index(self) -> None:
        sizes = np.concatenate([np.empty(0, np.int32), *self._sizes])
        # Pointers are byte positions in PREFIX.bin. Use 64 bits, because a mega-batch can have more than 2^32 bytes.
        pointers = np.zeros(len(sizes), dtype=np.int64)
        np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self._dtype.itemsize
        path = Path(f"{self._prefix}.idx")
        with open(path, "wb") as file:
            file.write(MAGIC + struct.pack("<QBQ", VERSION, DTYPE_CODES[self._dtype.name], len(sizes)))
            file.write(sizes.data)
            file.write(pointers.data)
        sync(path)
