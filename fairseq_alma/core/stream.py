"""The stream of mega-batches. It can be read only once, and only in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MegaBatch:
    """One mega-batch of a stream. A mega-batch is a large amount of data that becomes available at one moment.

    A mega-batch may be, for example, one part of a randomly divided data set, one crawl of the web, or the articles of
    one month. So the mega-batches of a stream may come from different distributions.
    """

    t: int
    """Position in the stream, counted from 1. The first mega-batch is t = 1 here and t0 in the paper."""
    digest: str
    """Digest (hash) of the data. Two mega-batches with the same digest contain the same data."""
    data: Any = field(default=None, compare=False, repr=False)
    """Training data, or the path of the training data. In vision, the validation data are included. Only the learner
    reads this field."""
    counts: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Sizes of the mega-batch, as a mapping from a unit to a number. The unit is "documents", "words", "tokens"
    or "examples"."""


class MegaBatchStream:
    """Iterable over the mega-batches of a stream, t = 1, 2, ..., B, in order. It can be iterated only once.

    For replay, `run_stream` keeps those of earlier stages in `Stage.past`. Raises ValueError if the `t` of a mega-batch
    is not its position in the list.
    """

    def __init__(self, mega_batches: Sequence[MegaBatch]):
        for position, mega_batch in enumerate(mega_batches, start=1):
            if mega_batch.t != position:
                raise ValueError(
                    f"mega-batch number {position} of the stream has t={mega_batch.t}, expected t={position}"
                )
        self._mega_batches = tuple(mega_batches)
        self._offered = False

    @property
    def digests(self) -> list[str]:
        """Digest of each mega-batch. When a run is continued, the digests show whether the stream is still the same."""
        return [mega_batch.digest for mega_batch in self._mega_batches]

    def __len__(self) -> int:
        return len(self._mega_batches)

    def __iter__(self) -> Iterator[MegaBatch]:
        """Yield the mega-batches in order. Raise RuntimeError if the stream has been iterated before."""
        if self._offered:
            raise RuntimeError("a stream can be iterated only once: create a new MegaBatchStream for a new run")
        self._offered = True
        yield from self._mega_batches
