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

    def best(self, stream: str, recipe: str, grid: Mapping[str, Sequence[str]]) -> dict[str, str] | None:
        """Return the values with the lowest score; None if not all were tried that `search` would try."""
        return self.search(stream, recipe, grid, lambda values: None)

    def search(
        self,
        stream: str,
        recipe: str,
        grid: Mapping[str, Sequence[str]],
        measure: Callable[[dict[str, str]], float | None],
    ) -> dict[str, str] | None:
        """Try the values of a grid name by name, in its order. Several threads may search at the same time.

        Names that are still to come have their first value; those before have the best values so far.

        Args:
            stream: name of the stream.
            recipe: name of the recipe.
            grid: name -> values.
            measure: gives the score of values, or None if it cannot be had in this run of the script.

        Returns:
            The values with the lowest score; None if a score was missing.
        """
        chosen = {name: values[0] for name, values in grid.items()}
        for name, values in grid.items():
            scores = [self._score(stream, recipe, chosen | {name: value}, measure) for value in values]
            known = [score for score in scores if score is not None]
            if len(known) < len(scores):
                return None
            chosen |= {name: values[known.index(min(known))]}
        return chosen

    def _score(
        self, stream: str, recipe: str, values: dict[str, str], measure: Callable[[dict[str, str]], float | None]
    ) -> float | None:
        for one in self.tried(stream, recipe):
            if one["values"] == values:
                return one[self.score]
        score = measure(values)
        if score is not None:
            with self._lock:
                known = self._read()
                known.setdefault(stream, {}).setdefault(recipe, []).append({"values": values, self.score: score})
                write_json(self.path, known)
        return score

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}
