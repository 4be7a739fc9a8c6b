"""The order of reading with replay: what no stage has read comes first."""

import numpy as np
import pytest

from fairseq_alma.core.errors import SettingError
from fairseq_alma.data.read_order import ReadOrder, StageReads, blocks_read, format_history, parse_history


def replayed(num_new: int, was_read: np.ndarray, share: float, epochs: int, seed: int = 1) -> np.ndarray:
    """Return the past blocks that some epochs read, in order."""
    order = ReadOrder(num_new, len(was_read), share, seed, was_read=was_read)
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
    order, known = ReadOrder(30, 50, 0.25, 1), ReadOrder(30, 50, 0.25, 1, was_read=np.ones(50, dtype=bool))
    for epoch in (1, 2, 5):
        assert (order.of_epoch(epoch) == known.of_epoch(epoch)).all()


@pytest.mark.parametrize("updates, num_read", [(3, 24), (4, 30), (5, 30), (6, 30)])
def test_a_first_stage_reads_each_block_once_before_it_reads_one_again(updates, num_read):
    """An epoch of 30 blocks has four updates: three of 8 blocks, and one of 6."""
    was_read = ReadOrder(30, 0, 0, 1).read_in(updates, 8)
    assert was_read.sum() == num_read


def test_what_a_stage_has_read_is_what_its_epochs_contain():
    order = ReadOrder(30, 50, 0.5, 3, was_read=np.zeros(50, dtype=bool))
    was_read = order.read_in(updates=6, sequences=8)  # an epoch of 4 updates, and 2 updates
    blocks = np.concatenate([order.of_epoch(1), order.of_epoch(2)[:16]])
    assert set(np.flatnonzero(was_read)) == set(blocks)
    assert was_read[:30].sum() == 23
    assert was_read[30:].sum() == 23


def test_each_stage_continues_where_the_stages_before_have_stopped():
    """In each stage, 40 of 80 new blocks are read, and as many of the past: the 40 that the stage before has not read.
    The first stage reads all of its blocks."""
    history = [StageReads(1, 1, 10, 8, 0.0), *(StageReads(t, t, 10, 8, 0.5) for t in (2, 3, 4))]
    assert blocks_read(history[:1], [80], 5, None).all()
    for stages in (2, 3, 4):
        was_read = blocks_read(history[:stages], [80] * stages, 5, None).reshape(stages, 80)
        assert was_read[:-1].all()
        assert was_read[-1].sum() == 40


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
    assert set(added) <= set(ReadOrder(80, 80, 0.5, 5, 20).past)


@pytest.mark.parametrize("num_blocks, sequences, share", [(94, 8, 0.5), (26, 8, 0.5), (94, 192, 0.5), (30, 7, 0.3)])
def test_whether_a_stage_reads_all_new_blocks(num_blocks, sequences, share):
    """The last update of an epoch may have fewer blocks."""
    order = ReadOrder(num_blocks, 50, share, 1)
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
