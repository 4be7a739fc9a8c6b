"""Blocks of tokens in batches that every rank gets as many of."""

from fairseq.data import MonolingualDataset


def fill_shards(batches: list, num_shards: int) -> list:
    """Repeat the first batches until there is one for each of `num_shards` ranks in every step."""
    missing = -len(batches) % num_shards
    return [*batches, *(batches[i % len(batches)] for i in range(missing))]


class Blocks(MonolingualDataset):
    """Non-overlapping blocks of a stage's token stream."""

    num_shards = 1
    """Ranks that share the batches; set by the task for training data."""

    def batch_by_size(self, indices, **kwargs) -> list:
        return fill_shards(super().batch_by_size(indices, **kwargs), self.num_shards)
