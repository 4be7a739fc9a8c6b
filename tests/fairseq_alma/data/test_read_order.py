"""The order of reading with replay: what no stage has read comes first."""

import numpy as np
import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.read_order import ReadOrder, StageReads, blocks_read, format_history, parse_history


def replayed(num_new: int, was_read: np.ndarray, share: float, epochs: int, seed: int = 1) -> np.ndarray:
    """Return the past blocks that some epochs read, in order."""
    order = ReadOrder(num_new, [len(was_read)], share, seed, was_read=was_read)
    blocks = np.concatenate([order.of_epoch(epoch) for epoch in range(1, epochs + 1)])
    return blocks[blocks >= num_new] - num_new


def test_past_blocks_that_were_not_read_come_first():
    was_read = np.ones(40, dtype=bool)
    was_read[[3, 8, 21, 22, 39]] = False
    past = replayed(20, was_read, share=0.5, epochs=6)
    assert len(past) == 60
    assert set(past[:5]) == {3, 8, 21, 22, 39}
    assert sorted(past[:40]) == list(range(40))  # then those that were read, each once
    others = replayed(20, was_read, share=0.5, epochs=6, seed=2)
    assert (past != others).any()
    assert set(others[:5]) == {3, 8, 21, 22, 39}


def test_if_all_blocks_were_read_the_history_changes_nothing():
    order, known = ReadOrder(30, [20, 30], 0.25, 1), ReadOrder(30, [20, 30], 0.25, 1, was_read=np.ones(50, dtype=bool))
    for epoch in (1, 2, 5):
        assert (order.of_epoch(epoch) == known.of_epoch(epoch)).all()


@pytest.mark.parametrize("updates, num_read", [(3, 24), (4, 30), (5, 30), (6, 30)])
def test_a_first_stage_reads_each_block_once_before_it_reads_one_again(updates, num_read):
    """An epoch of 30 blocks has four updates: three of 8 blocks, and one of 6."""
    was_read = ReadOrder(30, [], 0, 1).read_in(updates, 8)
    assert was_read.sum() == num_read


def test_what_a_stage_has_read_is_what_its_epochs_contain():
    order = ReadOrder(30, [50], 0.5, 3, was_read=np.zeros(50, dtype=bool))
    was_read = order.read_in(updates=6, sequences=8)  # an epoch of 4 updates, and 2 updates
    blocks = np.concatenate([order.of_epoch(1), order.of_epoch(2)[:16]])
    assert set(np.flatnonzero(was_read)) == set(blocks)
    assert was_read[:30].sum() == 23
    assert was_read[30:].sum() == 23


def test_each_stage_is_replayed_in_proportion_to_its_blocks_whatever_was_read():
    """Of three stages with 40, 80 and 40 blocks, the first has read everything, the others the first half."""
    was_read = np.concatenate([np.ones(40, bool), np.arange(80) < 40, np.arange(40) < 20])
    order = ReadOrder(100, [40, 80, 40], 0.4, 1, was_read=was_read)
    plain = ReadOrder(100, [40, 80, 40], 0.4, 1)
    stage = np.repeat([9, 0, 1, 2], [100, 40, 80, 40])  # 9 for new blocks
    for epoch in (1, 2, 3, 4, 5):
        assert (stage[order.of_epoch(epoch)] == stage[plain.of_epoch(epoch)]).all()
    first = order.of_epoch(1)
    for number, unread in ((1, set(range(180, 220))), (2, set(range(240, 260)))):
        assert set(first[stage[first] == number]) <= unread
    # The first 160 past blocks are all of them, each once.
    past = np.concatenate([blocks[blocks >= 100] for blocks in map(order.of_epoch, (1, 2, 3, 4))])
    assert sorted(past) == list(range(100, 260))


def test_what_a_stage_has_left_is_read_by_the_stages_after_it():
    """In each stage, 40 of 80 new blocks are read. The replay of stage 3 has about 20 of the 40 blocks that stage 2 has
    left, and that of stage 4 some of the others."""
    history = [StageReads(1, 1, 10, 8, 0.0), *(StageReads(t, t, 10, 8, 0.5) for t in (2, 3, 4))]
    read = [blocks_read(history[:k], [80] * k, 5, None).reshape(k, 80) for k in (1, 2, 3, 4)]
    assert read[0].all()
    assert read[1].sum(1).tolist() == [80, 40]
    replayed_of_2 = read[2][1].sum() - 40
    assert 10 < replayed_of_2 < 30
    assert read[2].sum(1).tolist() == [80, 40 + replayed_of_2, 40]
    assert read[3].sum(1)[1] > read[2].sum(1)[1]
    assert (read[3][:3] >= read[2]).all()


def test_a_short_first_stage_leaves_blocks_that_the_next_stages_read():
    history = [StageReads(1, 1, 5, 8, 0.0), StageReads(2, 2, 5, 8, 0.5)]
    first, second = blocks_read(history[:1], [80], 5, None), blocks_read(history, [80, 80], 5, None)
    assert (first.sum(), second[:80].sum(), second[80:].sum()) == (40, 60, 20)
    assert second[:80][first].all()


def test_only_blocks_in_the_memory_are_read_again():
    history = [StageReads(1, 1, 5, 8, 0.0), StageReads(2, 2, 10, 8, 0.5)]
    first, both = blocks_read(history[:1], [80], 5, 20), blocks_read(history, [80, 80], 5, 20)
    added = np.flatnonzero(both[:80] & ~first)
    assert 0 < len(added) <= 20
    assert set(added) <= set(ReadOrder(80, [80], 0.5, 5, 20).past)


@pytest.mark.parametrize("num_blocks, sequences, share", [(94, 8, 0.5), (26, 8, 0.5), (94, 192, 0.5), (30, 7, 0.3)])
def test_whether_a_stage_reads_all_new_blocks(num_blocks, sequences, share):
    """The last update of an epoch may have fewer blocks."""
    order = ReadOrder(num_blocks, [50], share, 1)
    found = [order.read_in(updates, sequences)[:num_blocks].all() for updates in range(1, 40)]
    assert found == [StageReads(2, 2, updates, sequences, share).reads_all_new(num_blocks) for updates in range(1, 40)]
    assert not found[0]
    assert found[-1]


def test_a_history_as_text():
    history = [StageReads(1, 1, 452, 8, 0.0), StageReads(2, 3, 452, 8, 1 / 3)]
    assert format_history(history) == "1/452/8/0.0,2-3/452/8/0.3333333333333333"
    assert parse_history(format_history(history), 3) == history
    assert format_history([]) == "none"
    assert parse_history("none", 3) == []


@pytest.mark.parametrize(
    "text, message",
    [
        ("1/452/8", "MEGA_BATCHES/UPDATES/SEQUENCES/SHARE"),
        ("1/many/8/0.5", "MEGA_BATCHES/UPDATES/SEQUENCES/SHARE"),
        ("4/452/8/0.5", "the stream has no mega-batch"),
        ("1/452/0/0.5", "must be at least 1"),
        ("1/-3/8/0.5", "must be at least 1"),
        ("1/452/8/1.0", "below 1"),
    ],
)
def test_a_bad_history_is_refused(text, message):
    with pytest.raises(SettingError, match=message):
        parse_history(text, 3)
