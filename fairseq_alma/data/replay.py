"""Replay by share: in every batch, a fixed fraction (the share) of the blocks comes from earlier mega-batches.

The number of updates is the same as without replay.
"""

import math

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset, data_utils

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.blocks import fill_shards


class ReplayShareDataset(BaseWrapperDataset):
    """A dataset whose batches mix new blocks and past blocks (from earlier mega-batches) in a constant proportion.

    An epoch has as many batches as the new data alone would have, so replay does not change the number of updates. In
    each batch, past blocks replace some of the new blocks, so an epoch does not contain all new blocks. The blocks of
    an epoch are selected at random. The selection depends only on the seed and on the number of the epoch.

    Args:
        new, past: datasets of the new blocks and of the past blocks.
        share: fraction of past blocks in each batch, between 0 and 1.
        seed: random seed for the selection of blocks.

    Raises:
        SettingError: if the share is not above 0 and below 1.
    """

    num_shards = 1
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
        """Set the epoch whose batches `batch_by_size` returns. Epochs are counted from 1."""
        super().set_epoch(epoch)
        self.epoch = epoch

    def ordered_indices(self) -> np.ndarray:
        """Return one index for each new block.

        `batch_by_size` uses only the number of these indices, because it selects the blocks itself.
        """
        return np.arange(self.num_new)

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[list[int]]:
        """Return batches of `max_sentences` block indices, in which a fraction `share` of the blocks are past blocks.

        If share * max_sentences is not an integer, the number of past blocks varies from batch to batch: for a share of
        0.3 and 8 blocks it is 2, 2, 3, 2, ... In each batch, and in total over the epoch, the number of past blocks
        differs from share * (number of blocks) by less than 1.

        Args:
            indices: return value of `ordered_indices`. Only the number of indices is used.
            max_sentences: number of blocks in a batch.
            max_tokens, required_batch_size_multiple: part of fairseq's interface; ignored.

        Raises:
            SettingError: if max_sentences (--batch-size) is not given.
        """
        if max_sentences is None:
            raise SettingError("replay by share needs --batch-size (number of blocks in a batch)")
        num_batches = -(-len(indices) // max_sentences)
        # past_ends[i] and new_ends[i] are the numbers of past and new blocks in the first i batches together. Add 1e-9,
        # because rounding errors may make a product slightly smaller than the exact integer, and floor() would then
        # return an integer that is too small by 1.
        past_ends = [math.floor(i * self.share * max_sentences + 1e-9) for i in range(num_batches + 1)]
        new_ends = [i * max_sentences - end for i, end in enumerate(past_ends)]
        with data_utils.numpy_seed(self.seed, self.epoch):
            # Add num_new to the indices of the past blocks, because this dataset contains first all new blocks and then
            # all past blocks.
            past = (self.num_new + _draw(self.num_past, past_ends[-1])).tolist()
            new = _draw(self.num_new, new_ends[-1]).tolist()
        batches = [
            new[new_ends[i] : new_ends[i + 1]] + past[past_ends[i] : past_ends[i + 1]] for i in range(num_batches)
        ]
        return fill_shards(batches, self.num_shards)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether fairseq may use the same batches in all epochs. False, because every epoch has different batches."""
        return False


def _draw(population: int, count: int) -> np.ndarray:
    """Return `count` random integers from 0 to population - 1. No integer is repeated before all have occurred."""
    passes = [np.random.permutation(population) for _ in range(-(-count // population))]
    return np.concatenate([np.empty(0, dtype=np.int64), *passes])[:count]
