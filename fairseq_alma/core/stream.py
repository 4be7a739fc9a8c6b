"""What arrives: mega-batches, offered once, in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MegaBatch:
    """One arrival.

    Nothing here assumes that all mega-batches come from one distribution: they may be a random partition, snapshots,
    dates or folders.
    """

    t: int
    """Position in the stream, counted from 1 (the paper's t0 is our t = 1)."""
    digest: str
    """Identifies the content: two mega-batches with the same digest hold the same data."""
    data: Any = field(default=None, compare=False, repr=False)
    """Training (and, in vision, validation) data, or the place where they are stored. Only the learner reads it."""
    counts: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Numbers of documents, words, tokens or examples."""


class MegaBatchStream:
    """B mega-batches, offered once, in order.

    A learner that needs the past must keep it (Algorithm 1 passes it as `Stage.past`).

    Args:
        mega_batches: the mega-batches t = 1..B.

    Raises:
        ValueError: a mega-batch has another t than its position.
    """

    def __init__(self, mega_batches: Sequence[MegaBatch]):
        for position, mega_batch in enumerate(mega_batches, start=1):
            if mega_batch.t != position:
                raise ValueError(f"mega-batch number {position} of the stream says t={mega_batch.t}")
        self._mega_batches = tuple(mega_batches)
        self._offered = False

    @property
    def digests(self) -> list[str]:
        """The digest of each mega-batch. A run folder stores them to recognise its stream."""
        return [mega_batch.digest for mega_batch in self._mega_batches]

    def __len__(self) -> int:
        return len(self._mega_batches)

    def __iter__(self) -> Iterator[MegaBatch]:
        """Yield the mega-batches in order.

        Raises:
            RuntimeError: the stream has been offered before.
        """
        if self._offered:
            raise RuntimeError("a stream is offered once: make a new one for a new run")
        self._offered = True
        yield from self._mega_batches
