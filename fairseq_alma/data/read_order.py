"""The order in which the blocks of new and of earlier mega-batches are read, if a share of each batch is replayed.

The order of a stage depends on what earlier stages have read. This is not stored block by block. It is computed
again from the number of updates of each of these stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.mega_batch_set import format_mega_batches, parse_mega_batches

NO_STAGES = "none"
"""The text of a history without stages."""


@dataclass(frozen=True)
class StageReads:
    """How many blocks a stage has read, and from which mega-batches."""

    first: int
    """First of the mega-batches that were new in this stage."""
    last: int
    """Last of the mega-batches that were new in this stage."""
    updates: int
    """Number of updates of the stage."""
    sequences: int
    """Number of blocks in an update."""
    share: float
    """Fraction of the blocks that came from the mega-batches before `first`."""

    @property
    def mega_batches(self) -> list[int]:
        """The mega-batches that were new in this stage."""
        return list(range(self.first, self.last + 1))

    def reads_all_new(self, num_blocks: int) -> bool:
        """Return whether the stage reads all of its `num_blocks` new blocks."""
        full_epochs, left = divmod(self.updates, -(-num_blocks // self.sequences))
        of_epoch, of_rest = (blocks - num_past(blocks, self.share) for blocks in (num_blocks, left * self.sequences))
        return full_epochs * of_epoch + of_rest >= num_blocks


def format_history(history: Sequence[StageReads]) -> str:
    """Return the stages as text: for example "1/452/8/0.0,2-3/452/8/0.25", or "none"."""
    texts = [
        f"{format_mega_batches(stage.mega_batches)}/{stage.updates}/{stage.sequences}/{stage.share!r}"
        for stage in history
    ]
    return ",".join(texts) or NO_STAGES


def parse_history(text: str, num_mega_batches: int) -> list[StageReads]:
    """Return the stages of a text that `format_history` wrote.

    Args:
        text: the text.
        num_mega_batches: number of mega-batches in the stream, B.

    Raises:
        SettingError: if the text cannot be parsed, or names a mega-batch that the stream does not have.
    """
    stages = []
    for part in [] if text == NO_STAGES else text.split(","):
        try:
            mega_batches, updates, sequences, share = part.split("/")
            numbers = int(updates), int(sequences), float(share)
        except ValueError:
            raise SettingError(
                f"--replay-history {text!r} must be {NO_STAGES}, or have for each earlier stage "
                f"MEGA_BATCHES/UPDATES/SEQUENCES/SHARE, for example 1/452/8/0.0,2-3/452/8/0.25"
            ) from None
        ts = parse_mega_batches(mega_batches, num_mega_batches)
        stages.append(StageReads(ts[0], ts[-1], *numbers))
        if stages[-1].updates < 1 or stages[-1].sequences < 1 or not 0 <= stages[-1].share < 1:
            raise SettingError(
                f"--replay-history {text!r}: updates and sequences must be at least 1, and the share at least 0 and "
                f"below 1"
            )
    return stages


def num_past(num_blocks: Any, share: float) -> Any:
    """Return how many of the first `num_blocks` blocks of an epoch are past blocks; an array for an array."""
    # Add 1e-9, because rounding errors may make a product slightly smaller than the exact integer, and floor() would
    # then return an integer that is too small by 1.
    return np.floor(num_blocks * share + 1e-9).astype(int)


class ReadOrder:
    """The order in which a stage reads its new blocks, and the past blocks of earlier mega-batches.

    An epoch has as many blocks as the new data. In each batch, past blocks replace some of the new blocks, so an epoch
    does not contain all new blocks. The next epoch first reads those that were not read: no new block is read again
    before all new blocks have been read, and the same holds for the past blocks. The order is random. It depends only
    on the seed, and the position in it on the number of the epoch.

    Each earlier stage has its part of the replayed blocks, whatever was read. But those of its blocks that no stage has
    read come before its others.

    Blocks are numbered: first the new blocks, then the past blocks.

    Args:
        num_new: number of new blocks.
        past: number of past blocks of each earlier stage. One number for all will do if all count as read.
        share: fraction of past blocks in each batch; 0 if there are no past blocks.
        seed: random seed.
        num_kept: largest number of past blocks that are used; None for all. They are a random sample. The sample does
            not depend on the seed. If more past blocks are added, a block that was not in the sample does not enter it.
        was_read: for each past block, whether an earlier stage has read it. By default, all count as read.
    """

    def __init__(
        self,
        num_new: int,
        past: Sequence[int],
        share: float,
        seed: int,
        num_kept: int | None = None,
        was_read: np.ndarray | None = None,
    ):
        self.num_new = num_new
        self.past = _sample(sum(past), num_kept)
        """Indices of the past blocks that are used, without the number of new blocks."""
        self.share = share
        self.seed = seed
        self._was_read = np.ones(sum(past), dtype=bool) if was_read is None else was_read
        self._stage = np.repeat(np.arange(len(past)), past)
        """For each past block, the index of its stage."""

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Return the blocks of an epoch, counted from 1, in the order in which they are read.

        Among the first n blocks, for any n, the number of past blocks differs from n * share by less than 1.
        """
        num_past_before = num_past(np.arange(self.num_new + 1), self.share)
        is_past = np.diff(num_past_before) > 0
        count = int(num_past_before[-1])
        order = np.empty(self.num_new, dtype=np.int64)
        order[is_past] = self.num_new + self.past[self._next("past", len(self.past), count, epoch)]
        order[~is_past] = self._next("new", self.num_new, self.num_new - count, epoch)
        return order

    def read_in(self, updates: int, sequences: int) -> np.ndarray:
        """Return the blocks that are read in so many updates of `sequences` blocks, as one boolean for each block.

        An epoch ends with a smaller update if its blocks cannot be divided evenly.
        """
        was_read = np.zeros(self.num_new + len(self._was_read), dtype=bool)
        updates_per_epoch = -(-self.num_new // sequences)
        full_epochs, left = divmod(updates, updates_per_epoch)
        for epoch in range(1, full_epochs + 1):
            was_read[self.of_epoch(epoch)] = True
        was_read[self.of_epoch(full_epochs + 1)[: left * sequences]] = True
        return was_read

    def _next(self, kind: Literal["new", "past"], population: int, count: int, epoch: int) -> np.ndarray:
        """Return `count` integers from 0 to population - 1: those that the epoch takes from a random sequence.

        The sequence consists of random permutations. Each epoch starts where the previous epoch ended.
        """
        start = (epoch - 1) * count
        first, last = (start // population, -(-(start + count) // population)) if count else (0, 0)
        permutations = [self._permutation(kind, population, number) for number in range(first, last)]
        sequence = np.concatenate([np.empty(0, dtype=np.int64), *permutations])
        return sequence[start - first * population :][:count]

    def _permutation(self, kind: Literal["new", "past"], population: int, number: int) -> np.ndarray:
        """Return permutation `number` of the sequence. In the first one, past blocks that were not read come first."""
        order = np.random.default_rng([self.seed, kind == "past", number]).permutation(population)
        if kind == "past" and number == 0:
            blocks = self.past[order]
            stage = self._stage[blocks]
            # Only blocks of the same stage change places. The places of a stage are filled with its blocks, those first
            # that were not read.
            order[np.argsort(stage, kind="stable")] = order[np.lexsort((self._was_read[blocks], stage))]
        return order


def blocks_read(
    history: Sequence[StageReads], num_blocks: Sequence[int], seed: int, num_kept: int | None
) -> np.ndarray:
    """Return which blocks the stages of a history have read, as one boolean for each block of their mega-batches.

    Args:
        history: the stages.
        num_blocks: number of new blocks of each stage.
        seed, num_kept: see `ReadOrder`.
    """
    was_read = np.zeros(0, dtype=bool)
    for k, (stage, num_new) in enumerate(zip(history, num_blocks, strict=True)):
        order = ReadOrder(num_new, num_blocks[:k], stage.share, seed, num_kept, was_read)
        now = order.read_in(stage.updates, stage.sequences)
        was_read = np.concatenate([was_read | now[num_new:], now[:num_new]])
    return was_read


def _sample(num_blocks: int, num_kept: int | None) -> np.ndarray:
    """Return the indices of the past blocks that are kept: those with the smallest random numbers.

    The random number of a block does not depend on the number of blocks. This is reservoir sampling (Vitter 1985).
    """
    if num_kept is None or num_kept >= num_blocks:
        return np.arange(num_blocks)
    numbers = np.random.default_rng(0).random(num_blocks)
    return np.sort(np.argsort(numbers, kind="stable")[:num_kept])
