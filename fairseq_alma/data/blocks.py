"""Blocks of tokens, in batches that divide evenly among ranks."""

from typing import Any

from fairseq.data import MonolingualDataset


def fill_shards(batches: list, num_shards: int) -> list:
    """Return the batches, the first ones repeated at the end so that their number is a multiple of `num_shards`.

    Args:
        batches: indices of the blocks of each batch.
        num_shards: number of ranks that share the batches.
    """
    missing = -len(batches) % num_shards
    return [*batches, *(batches[i % len(batches)] for i in range(missing))]


class Blocks(MonolingualDataset):
    """A dataset of non-overlapping blocks of tokens."""

    num_shards = 1
    """Number of ranks that share the batches. The task sets it for training data."""

    def batch_by_size(self, indices: Any, **kwargs: Any) -> list:
        """Return fairseq's batches, filled up so that every rank gets the same number."""
        return fill_shards(super().batch_by_size(indices, **kwargs), self.num_shards)
