"""Choose the settings of the rows of a table from a declared grid.

Every value that was tried stays in a JSON file, which is committed: stream -> recipe -> list of values and their score.
A value with a score is not tried again.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_alma.core.files import write_json


@dataclass(frozen=True)
class Choices:
    """The values that were tried, in a file."""

    path: Path
    score: str
    """Name of the score in the file. The lowest score is chosen."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tried(self, stream: str, recipe: str) -> list[dict[str, Any]]:
        """Return what was tried for a recipe on a stream, in this order."""
        return self._read().get(stream, {}).get(recipe, [])

    def best(self, stream: str, recipe: str) -> dict[str, str] | None:
        """Return the values with the lowest score; None if none were tried."""
        tried = self.tried(stream, recipe)
        return min(tried, key=lambda one: one[self.score])["values"] if tried else None

    def search(
        self,
        stream: str,
        recipe: str,
        grid: Mapping[str, Sequence[str]],
        measure: Callable[[dict[str, str]], float | None],
    ) -> bool:
        """Try the values of a grid name by name, in its order. Several threads may search at the same time.

        Names that are still to come have their first value; those before have the best values so far.

        Args:
            stream: name of the stream.
            recipe: name of the recipe.
            grid: name -> values.
            measure: gives the score of values, or None if it cannot be had in this run of the script.

        Returns:
            Whether everything was tried.
        """
        chosen = {name: values[0] for name, values in grid.items()}
        for name, values in grid.items():
            for value in values:
                if not self._try(stream, recipe, chosen | {name: value}, measure):
                    return False
            chosen = self.best(stream, recipe) or chosen
        return True

    def _try(
        self, stream: str, recipe: str, values: dict[str, str], measure: Callable[[dict[str, str]], float | None]
    ) -> bool:
        if any(one["values"] == values for one in self.tried(stream, recipe)):
            return True
        score = measure(values)
        if score is None:
            return False
        with self._lock:
            known = self._read()
            known.setdefault(stream, {}).setdefault(recipe, []).append({"values": values, self.score: score})
            write_json(self.path, known)
        return True

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}
