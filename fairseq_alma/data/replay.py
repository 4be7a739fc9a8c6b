"""Replay by share: in every batch, a fixed fraction (the share) of the blocks comes from earlier mega-batches.

The number of updates is the same as without replay.
"""

from typing import Any, Literal

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.blocks import divide


class ReplayShareDataset(BaseWrapperDataset):
    """A dataset whose batches mix new blocks and past blocks (from earlier mega-batches) in a constant proportion.

    An epoch has as many batches as the new data alone would have, so replay does not change the number of updates. In
    each batch, past blocks replace some of the new blocks, so an epoch does not contain all new blocks. The next epoch
    first reads those that were not read: no new block is read again before all new blocks have been read, and the same
    holds for the past blocks. The order is random. It depends only on the seed, and the position in it on the number of
    the epoch.

    Args:
        new, past: datasets of the new blocks and of the past blocks.
        share: fraction of past blocks in each batch, between 0 and 1.
        seed: random seed for the selection of blocks.

    Raises:
        SettingError: if the share is not above 0 and below 1.
    """

    num_ranks = 1
    """Number of ranks (training processes) among which the batches are divided. The task alma_lm sets this number."""

    def __init__(self, new: FairseqDataset, past: FairseqDataset, share: float, seed: int):
        super().__init__(ConcatDataset([new, past]))
        if not 0 < share < 1:
            raise SettingError(f"replay share {share} must be above 0 and below 1")
        self.num_new, self.num_past = len(new), len(past)
        self.share = share
        self.seed = seed
        self.epoch = 1

    def __getitem__(self, index: int) -> dict:
        # Use the index as the id, because a block of `new` and a block of `past` may have the same id.
        return {**self.dataset[index], "id": index}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 1, whose batches `batch_by_size` returns."""
        super().set_epoch(epoch)
        self.epoch = epoch

    def ordered_indices(self) -> np.ndarray:
        """Return the indices of the blocks of this epoch, in the order in which they are read.

        Their number is that of the new blocks. Among the first n blocks of all epochs together, for any n, the number
        of past blocks differs from n * share by less than 1.
        """
        # The blocks are counted over all epochs. If each epoch began to count anew, epochs of few blocks would have too
        # few past blocks: with 3 new blocks and a share of 0.25, none.
        first = (self.epoch - 1) * self.num_new
        # Add 1e-9, because rounding errors may make a product slightly smaller than the exact integer, and floor()
        # would then return an integer that is too small by 1.
        num_past_before = np.floor((first + np.arange(self.num_new + 1)) * self.share + 1e-9).astype(int)
        is_past = np.diff(num_past_before) > 0
        start, num_past = int(num_past_before[0]), int(num_past_before[-1] - num_past_before[0])
        order = np.empty(self.num_new, dtype=np.int64)
        # Add num_new to the indices of the past blocks, because this dataset contains first all new blocks and then all
        # past blocks.
        order[is_past] = self.num_new + self._part("past", self.num_past, start, num_past)
        order[~is_past] = self._part("new", self.num_new, first - start, self.num_new - num_past)
        return order

    def _part(self, kind: Literal["new", "past"], population: int, start: int, count: int) -> np.ndarray:
        """Return `count` integers from 0 to population - 1: those from place `start` on in a random sequence.

        The sequence consists of random permutations. Each epoch starts where the previous epoch ended.
        """
        first, last = start // population, -(-(start + count) // population)
        permutations = [
            np.random.default_rng([self.seed, kind == "past", number]).permutation(population)
            for number in range(first, last)
        ]
        sequence = np.concatenate([np.empty(0, dtype=np.int64), *permutations])
        return sequence[start - first * population :][:count]

    def batch_by_size(self, indices: np.ndarray, max_sentences: int | None = None, **kwargs: Any) -> list[list[int]]:
        """Return batches of `max_sentences` (--batch-size) blocks, in each of which about a fraction `share` are past
        blocks.

        If share * max_sentences is not an integer, the number of past blocks varies from batch to batch: for a share of
        0.3 and 8 blocks it is 2, 2, 3, 2, ... Raise SettingError without `max_sentences`.
        """
        if max_sentences is None:
            raise SettingError("replay by share needs --batch-size (number of blocks in a batch)")
        return divide(indices, max_sentences, self.num_ranks)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether fairseq may use the same batches in all epochs. False, because every epoch has different batches."""
        return False
