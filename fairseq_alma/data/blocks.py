"""A dataset of token blocks, whose batches can be divided evenly among ranks.

A rank is one of the processes that train one model together, each on its own device.
"""

from typing import Any

from fairseq.data import MonolingualDataset


def fill_shards(batches: list, num_shards: int) -> list:
    """Return `batches`, followed by copies of the first batches until the length is a multiple of `num_shards`.

    The batches can then be divided evenly among ranks, which fairseq calls shards here.

    Args:
        batches: one list of block indices for each batch.
        num_shards: number of ranks among which the batches are divided.
    """
    missing = -len(batches) % num_shards
    return [*batches, *(batches[i % len(batches)] for i in range(missing))]


class Blocks(MonolingualDataset):
    """A dataset of non-overlapping blocks of tokens."""

    num_shards = 1
    """Number of ranks among which the batches are divided. The task alma_lm sets this number for training data. It is
    1 for other data."""

    def batch_by_size(self, indices: Any, **kwargs: Any) -> list:
        """Return fairseq's batches, and add copies of the first batches so that all ranks get equally many batches."""
        return fill_shards(super().batch_by_size(indices, **kwargs), self.num_shards)

    def collater(self, samples: list[dict]) -> dict:
        """Return fairseq's batch with two additional entries.

        `net_input["has_padding"]` says whether the blocks of the batch differ in length. `block_ids` is the list of the
        ids of the blocks. Both entries are Python objects and not tensors, so they stay on the host when fairseq moves
        the batch to the device. The model and the task can read them without waiting for the device.
        """
        batch = super().collater(samples)
        if batch:
            batch["net_input"]["has_padding"] = batch["ntokens"] < batch["target"].numel()
            batch["block_ids"] = [int(sample["id"]) for sample in samples]
        return batch
