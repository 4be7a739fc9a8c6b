"""Replay by share: in every batch, a fixed fraction (the share) of the blocks comes from earlier mega-batches.

The number of updates is the same as without replay.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset, FairseqDataset

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.blocks import divide
from fairseq_alma.data.read_order import ReadOrder, StageReads, blocks_read


class ReplayShareDataset(BaseWrapperDataset):
    """A dataset whose batches mix new blocks and past blocks (from earlier mega-batches) in a constant proportion.

    An epoch has as many batches as the new data alone would have, so replay does not change the number of updates. See
    `ReadOrder` for the order of the blocks.

    Args:
        new: dataset of the new blocks.
        past: datasets of the past blocks; [] in the first stage. With a history, one for each of its stages.
        share: fraction of past blocks in each batch; between 0 and 1, or 0 if there are no past blocks.
        seed: random seed for the selection of blocks.
        num_kept: largest number of past blocks that are used; None for all.
        history: what earlier stages have read. By default, all past blocks count as read.

    Raises:
        SettingError: if the share is not above 0 and below 1 although there are past blocks, or no past block is used.
    """

    num_ranks = 1
    """Number of ranks (training processes) among which the batches are divided. The task alma_lm sets this number."""

    def __init__(
        self,
        new: FairseqDataset,
        past: Sequence[FairseqDataset],
        share: float,
        seed: int,
        num_kept: int | None = None,
        history: Sequence[StageReads] | None = None,
    ):
        super().__init__(ConcatDataset([new, *past]))
        if past and not 0 < share < 1:
            raise SettingError(f"replay share {share} must be above 0 and below 1")
        if num_kept is not None and num_kept < 1:
            raise SettingError("replay_memory= must be at least one block, that is, tokens_per_sample= tokens")
        num_past = [len(dataset) for dataset in past]
        was_read = None if history is None else blocks_read(history, num_past, seed, num_kept)
        self.order = ReadOrder(len(new), num_past, share, seed, num_kept, was_read)
        self.epoch = 1

    def __getitem__(self, index: int) -> dict:
        # Use the index as the id, because a block of `new` and a block of `past` may have the same id.
        return {**self.dataset[index], "id": index}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches `batch_by_size` returns. Epochs are counted from 1."""
        super().set_epoch(epoch)
        self.epoch = epoch

    def ordered_indices(self) -> np.ndarray:
        """Return the indices of the blocks of this epoch, in the order in which they are read."""
        return self.order.of_epoch(self.epoch)

    def batch_by_size(self, indices: np.ndarray, max_sentences: int | None = None, **kwargs: Any) -> list[list[int]]:
        """Return batches of `max_sentences` blocks, in each of which about a fraction `share` are past blocks.

        If share * max_sentences is not an integer, the number of past blocks varies from batch to batch: for a share of
        0.3 and 8 blocks it is 2, 2, 3, 2, ...

        Args:
            indices: return value of `ordered_indices`.
            max_sentences: number of blocks in a batch.
            kwargs: part of fairseq's interface; ignored.

        Raises:
            SettingError: if max_sentences (--batch-size) is not given.
        """
        if max_sentences is None:
            raise SettingError("replay by share needs --batch-size (number of blocks in a batch)")
        return divide(indices, max_sentences, self.num_ranks)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether fairseq may use the same batches in all epochs. False, because every epoch has different batches."""
        return False
