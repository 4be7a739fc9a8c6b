"""A dataset of token blocks, whose batches can be divided evenly among ranks. A block is one sequence of a batch.

A rank is one of the processes that train one model together, each on its own device.
"""

from typing import Any

import numpy as np
from fairseq.data import MonolingualDataset


def divide(order: np.ndarray, batch_size: int, num_ranks: int) -> list[list[int]]:
    """Return batches of the blocks in `order`. The number of batches is a multiple of `num_ranks`.

    The batches are consecutive parts of `order`. In each forward pass, each rank gets one batch. In all forward passes
    but the last, each batch has `batch_size` blocks. The blocks that are left for the last forward pass are divided
    into batches of `batch_size` and a smaller one. If this gives fewer batches than ranks, the blocks are divided
    evenly among the ranks instead. If there are fewer blocks than ranks, copies of the first blocks are added. So all
    ranks together read the blocks in the same order for every `num_ranks` and `batch_size`.

    Args:
        order: indices of the blocks.
        batch_size: largest number of blocks in a batch.
        num_ranks: number of ranks.
    """
    whole = len(order) // (batch_size * num_ranks) * batch_size * num_ranks
    batches = [order[start : start + batch_size].tolist() for start in range(0, whole, batch_size)]
    if whole < len(order):
        left = order[whole:]
        parts = np.split(left, range(batch_size, len(left), batch_size))  # as on one rank
        if len(parts) < num_ranks:
            left = np.concatenate([left, np.resize(order, max(0, num_ranks - len(left)))])
            parts = np.array_split(left, num_ranks)
        batches += [part.tolist() for part in parts]
    return batches


class Blocks(MonolingualDataset):
    """A dataset of non-overlapping blocks of tokens."""

    num_ranks = 1
    """Number of ranks among which the batches are divided. The task alma_lm sets this number for training data. It is
    1 for other data."""

    says_padding = True
    """Whether batches contain `has_padding`. The task alma_lm sets it to False for models whose method `forward` has no
    such argument."""

    def ordered_indices(self) -> np.ndarray:
        """Return the indices of the blocks, in random order if the dataset is shuffled.

        fairseq's order would begin with the shortest blocks.
        """
        return np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))

    def batch_by_size(self, indices: Any, max_sentences: int | None = None, **kwargs: Any) -> list:
        """Return the batches (see `divide`). Without `max_sentences`, these are fairseq's batches of at most
        `max_tokens` tokens, and copies of the first ones, so that all ranks get equally many batches.
        """
        if max_sentences is None:
            batches = super().batch_by_size(indices, **kwargs)
            missing = -len(batches) % self.num_ranks
            return [*batches, *(batches[i % len(batches)] for i in range(missing))]
        return divide(indices, max_sentences, self.num_ranks)

    def collater(self, samples: list[dict]) -> dict:
        """Return fairseq's batch with two additional entries.

        `net_input["has_padding"]` says whether the blocks of the batch differ in length or contain masked text, which
        is padding (see `fairseq_alma.forget`). It is left out if `says_padding` is False. `block_ids` is the list of
        the ids of the blocks. Both entries are Python objects and not tensors, so they stay on the host when fairseq
        moves the batch to the device. The model and the task can read them without waiting for the device. `ntokens` is
        the number of targets that are not padding.
        """
        batch = super().collater(samples)
        if batch:
            pad = self.vocab.pad()
            batch["ntokens"] = int(batch["target"].ne(pad).sum())
            if self.says_padding:
                batch["net_input"]["has_padding"] = bool(batch["net_input"]["src_tokens"].eq(pad).any())
            batch["block_ids"] = [int(sample["id"]) for sample in samples]
        return batch
