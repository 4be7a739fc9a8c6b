"""Replay by share: in which order new and past blocks are read."""

import numpy as np
import pytest
import torch
from fairseq.data import FairseqDataset

from fairseq_alma.data.replay import ReplayShareDataset


class Numbers(FairseqDataset):
    """A dataset of blocks of one number each."""

    def __init__(self, size: int):
        self.sizes = np.ones(size, dtype=np.int64)

    def __getitem__(self, index: int) -> dict:
        return {"id": index, "source": torch.tensor([index])}

    def __len__(self) -> int:
        return len(self.sizes)


def test_all_blocks_are_read_before_one_is_read_again():
    """An epoch of 40 blocks has 10 of the 40 past blocks and 30 new ones."""
    dataset = ReplayShareDataset(Numbers(40), Numbers(40), 0.25, 1)
    orders = []
    for epoch in range(1, 9):
        dataset.set_epoch(epoch)
        orders.append(dataset.ordered_indices())
    read_blocks = np.concatenate(orders)
    new, past = read_blocks[read_blocks < 40], read_blocks[read_blocks >= 40] - 40
    assert (len(new), len(past)) == (240, 80)
    for blocks in (new, past):
        passes = blocks.reshape(-1, 40)
        assert (np.sort(passes) == np.arange(40)).all()  # each block once in each pass
        assert len(np.unique(passes, axis=0)) == len(passes)  # in another order
    dataset.set_epoch(3)
    assert (dataset.ordered_indices() == orders[2]).all()


@pytest.mark.parametrize(("num_new", "share"), [(1, 0.9), (3, 0.25), (10, 0.05), (7, 0.5)])
def test_few_new_blocks_are_mixed_with_the_share_that_was_asked_for(num_new, share):
    """A share of less than one block in an epoch adds up over the epochs."""
    dataset = ReplayShareDataset(Numbers(num_new), Numbers(40), share, 1)
    order = []
    for epoch in range(1, 101):
        dataset.set_epoch(epoch)
        order += dataset.ordered_indices().tolist()
    num_past = np.cumsum(np.array(order) >= num_new)
    assert np.abs(num_past - share * np.arange(1, len(order) + 1)).max() < 1 + 1e-9
    new = [index for index in order if index < num_new]
    assert all(sorted(new[i : i + num_new]) == list(range(num_new)) for i in range(0, len(new) - num_new + 1, num_new))
