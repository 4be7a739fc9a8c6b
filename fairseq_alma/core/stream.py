"""What arrives: mega-batches, offered once, in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MegaBatch:
    """One arrival.

    Nothing here assumes that mega-batches are drawn from one distribution: they may be a random
    partition, snapshots, dates or folders.
    """

    t: int
    """When it arrives, counted from 1 (the paper's t0 is our t = 1)."""
    digest: str
    """Names its content: two mega-batches with one digest hold the same data."""
    data: Any = field(default=None, compare=False, repr=False)
    """Training (and, in vision, validation) data, or where they lie: the learner's business."""
    counts: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """How much it holds: documents, words, tokens, examples."""


class MegaBatchStream:
    """B mega-batches, offered once, in order.

    A second pass over the same stream raises RuntimeError: a learner that wants the past keeps it
    (Algorithm 1 hands it over as `Stage.past`).
    """

    def __init__(self, mega_batches: Sequence[MegaBatch]):
        for position, mega_batch in enumerate(mega_batches, start=1):
            if mega_batch.t != position:
                raise ValueError(f"mega-batch number {position} of the stream says t={mega_batch.t}")
        self._mega_batches = tuple(mega_batches)
        self._offered = False

    @property
    def digests(self) -> list[str]:
        """The identity of each arrival: what a run folder remembers of the stream it was made from."""
        return [mega_batch.digest for mega_batch in self._mega_batches]

    def __len__(self) -> int:
        return len(self._mega_batches)

    def __iter__(self) -> Iterator[MegaBatch]:
        if self._offered:
            raise RuntimeError("a stream is offered once: make a new one for a new run")
        self._offered = True
        yield from self._mega_batches
