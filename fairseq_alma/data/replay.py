"""Replay by share: a fixed part of every batch comes from the past, the number of steps unchanged."""

import math

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset, data_utils

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.blocks import fill_shards


class ReplayShareDataset(BaseWrapperDataset):
    """New blocks, one pass an epoch, with past blocks mixed in at a constant share of every batch.

    An epoch has as many batches as the new data alone would make, so a stage takes the steps it would
    take without replay: the past replaces new blocks in each batch, and the new blocks it replaces wait
    for a later epoch. Which past and which new blocks an epoch sees is drawn from (seed, epoch).

    Args:
        new, past: datasets of blocks.
        share: of each batch, in (0, 1).
    """

    num_shards = 1
    """Ranks that share the batches; set by the task."""

    def __init__(self, new: FairseqDataset, past: FairseqDataset, share: float, seed: int):
        super().__init__(ConcatDataset([new, past]))
        if not 0 < share < 1:
            raise SettingError(f"replay share {share} must lie between 0 and 1")
        self.num_new, self.num_past = len(new), len(past)
        self.share = share
        self.seed = seed
        self.epoch = 1

    def __getitem__(self, index: int) -> dict:
        return {**self.dataset[index], "id": index}  # a block's own id counts within new or past

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch

    def ordered_indices(self) -> np.ndarray:
        """As many blocks as there are new ones; `batch_by_size` mixes them."""
        return np.arange(self.num_new)

    def batch_by_size(self, indices, max_tokens=None, max_sentences=None, required_batch_size_multiple=1):
        """Batches of `max_sentences` blocks, `share` of each from the past, to the nearest block.

        Where the share of a batch is no whole number of blocks, batches take turns (2, 2, 3, 2 ... of 8 for
        0.3): no batch is off by more than one block, and the sum of all by less than one.

        Raises:
            SettingError: no --batch-size.
        """
        if max_sentences is None:
            raise SettingError("replay by share needs --batch-size (blocks a batch)")
        num_batches = -(-len(indices) // max_sentences)
        past_ends = [math.floor(i * self.share * max_sentences + 1e-9) for i in range(num_batches + 1)]
        new_ends = [i * max_sentences - end for i, end in enumerate(past_ends)]
        with data_utils.numpy_seed(self.seed, self.epoch):
            past = (self.num_new + _draw(self.num_past, past_ends[-1])).tolist()
            new = _draw(self.num_new, new_ends[-1]).tolist()
        batches = [
            new[new_ends[i] : new_ends[i + 1]] + past[past_ends[i] : past_ends[i + 1]] for i in range(num_batches)
        ]
        return fill_shards(batches, self.num_shards)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False


def _draw(population: int, count: int) -> np.ndarray:
    """`count` indices: shuffled passes over the population, so that none comes twice before all came once."""
    passes = [np.random.permutation(population) for _ in range(-(-count // population))]
    return np.concatenate([np.empty(0, dtype=np.int64), *passes])[:count]
