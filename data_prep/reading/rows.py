"""Collect rows of a table, and write them to a NumPy file."""

from pathlib import Path

import numpy as np

_ROWS = 1 << 16
"""Number of rows that are kept as Python tuples. Such a row takes about ten times as much memory as in an array."""


class Rows:
    """Rows of a structured NumPy type, which are added one by one.

    Args:
        kind: the type of a row.
    """

    def __init__(self, kind: np.dtype):
        self._kind = kind
        self._arrays: list[np.ndarray] = []
        self._rows: list[tuple] = []

    def __len__(self) -> int:
        return len(self._arrays) * _ROWS + len(self._rows)

    def add(self, row: tuple) -> None:
        """Add a row. The tuple contains the values of the fields."""
        self._rows.append(row)
        if len(self._rows) == _ROWS:
            self._arrays.append(np.array(self._rows, self._kind))
            self._rows = []

    def write(self, path: Path) -> None:
        """Write all rows to a file, with the bytes that `np.save` would write for an array of them."""
        with open(path, "wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(self._kind), "fortran_order": False, "shape": (len(self),)}
            np.lib.format.write_array_header_1_0(file, header)
            for array in (*self._arrays, np.array(self._rows, self._kind)):
                file.write(array.data)
