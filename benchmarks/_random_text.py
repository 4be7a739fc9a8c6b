"""Random text of any size, in which each word follows the word before as it does in some book (a Markov chain).

Two documents have hardly any passage in common, however large the text is. Random sentences of the books would not do:
the same sentences would come again and again, and the number of documents that could be copies of each other would grow
with the square of the text.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORDS_A_DOCUMENT = 600
_DOCUMENTS = 2000
"""Number of documents that are made together."""


class RandomText:
    """Makes random text from all books in a folder, except gitenberg*, which is a second copy of Moby-Dick."""

    def __init__(self, books: Path):
        paths = [path for path in sorted(books.iterdir()) if path.suffix in (".txt", ".md")]
        texts = [path.read_text(encoding="utf-8") for path in paths if not path.name.startswith("gitenberg")]
        words, self._ids = np.unique(np.array(" ".join(texts).split(), dtype=object), return_inverse=True)
        self._words = list(words)
        # The places of each word in the books, word after word.
        self._places = np.argsort(self._ids, kind="stable")
        self._counts = np.bincount(self._ids)
        self._starts = np.cumsum(self._counts) - self._counts

    def write(self, num_bytes: int, path: Path, seed: int) -> int:
        """Write documents to a file, one per line, until it has `num_bytes` bytes. Return the number of documents."""
        written = count = 0
        with open(path, "w", encoding="utf-8") as file:
            for line in self._lines(np.random.default_rng(seed)):
                if written >= num_bytes:
                    break
                file.write(line)
                written, count = written + len(line.encode("utf-8")), count + 1
        return count

    def _lines(self, rng: np.random.Generator) -> Iterator[str]:
        while True:
            place = rng.integers(len(self._ids), size=_DOCUMENTS)
            chosen = np.empty((_DOCUMENTS, WORDS_A_DOCUMENT), np.int64)
            for position in range(WORDS_A_DOCUMENT):
                word = self._ids[place]
                chosen[:, position] = word
                # Continue after a random occurrence of this word.
                which = (rng.random(_DOCUMENTS) * self._counts[word]).astype(np.int64)
                place = (self._places[self._starts[word] + which] + 1) % len(self._ids)
            for row in chosen.tolist():
                yield " ".join(map(self._words.__getitem__, row)) + "\n"
