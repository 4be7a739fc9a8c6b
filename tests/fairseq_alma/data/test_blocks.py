import numpy as np
import pytest

from fairseq_alma.data.blocks import divide


def read(batches, num_ranks):
    """Return the blocks that all ranks read in each pass."""
    return [sorted(i for batch in batches[n : n + num_ranks] for i in batch) for n in range(0, len(batches), num_ranks)]


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 8, 9, 31, 32, 94])
@pytest.mark.parametrize(("batch_size", "num_ranks"), [(1, 1), (8, 1), (4, 2), (2, 4), (8, 4), (3, 5)])
def test_ranks_read_the_blocks_in_order_and_have_equally_many_batches(num_blocks, batch_size, num_ranks):
    order = np.random.default_rng(num_blocks).permutation(num_blocks)
    batches = divide(order, batch_size, num_ranks)
    assert len(batches) % num_ranks == 0
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    together = [i for batch in batches for i in batch]
    assert together[:num_blocks] == order.tolist()
    assert len(together) - num_blocks < num_ranks  # copies, only if fewer blocks than ranks are left
    if num_blocks % (batch_size * num_ranks) >= num_ranks or num_blocks % (batch_size * num_ranks) == 0:
        assert len(together) == num_blocks


def test_an_update_has_the_same_blocks_whatever_the_batch_size_and_the_number_of_ranks():
    order = np.random.default_rng(0).permutation(94)
    layouts = [(16, 1), (4, 1), (8, 2), (4, 4), (2, 4), (2, 8)]
    updates = []
    for batch_size, num_ranks in layouts:
        passes = read(divide(order, batch_size, num_ranks), num_ranks)
        per_update = 16 // (batch_size * num_ranks)
        updates.append(read(passes, per_update))
    assert [len(update) for update in updates[0]] == [16, 16, 16, 16, 16, 14]
    assert all(update == updates[0] for update in updates)
