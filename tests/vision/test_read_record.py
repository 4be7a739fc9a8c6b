"""Replay by share reads first what no stage has read."""

from types import SimpleNamespace

import pytest
import torch

from tests.vision.rows import numbered
from tests.vision.test_batches import epoch_pixels, joined, orders
from tests.vision.tiny_runs import small_run
from vision.batches import Batches
from vision.read_record import ReadRecord

WAS_READ = torch.ones(2, 20, dtype=torch.bool)
WAS_READ[0, [3, 8, 11]] = False
WAS_READ[1, 15:] = False


def test_past_examples_that_were_not_read_come_first():
    """There are 20 past examples, numbered 0 to 19, and 10 new ones. An epoch has 5 of each."""
    batches = Batches(numbered(1, 20 + 10, 20), orders(2), batch_size=4, past_share=0.5, was_read=WAS_READ)
    epochs = [joined(epoch_pixels(batches)) for _ in range(4)]
    past = [[pixel for epoch in epochs for pixel in epoch[order] if pixel < 20] for order in (0, 1)]
    assert set(past[0][:3]) == {3, 8, 11}
    assert set(past[1][:5]) == {15, 16, 17, 18, 19}
    for pixels in past:
        assert sorted(pixels) == list(range(20))  # then the others, each once
    assert batches.was_read.all()


def test_if_everything_was_read_the_order_is_that_without_a_record():
    known, unknown = (
        Batches(numbered(1, 30, 20), orders(2), batch_size=4, past_share=0.5, was_read=was_read)
        for was_read in (torch.ones(2, 20, dtype=torch.bool), None)
    )
    for _ in range(3):
        assert epoch_pixels(known) == epoch_pixels(unknown)


def test_the_examples_of_a_stage_count_as_read():
    batches = Batches(numbered(1, 20 + 10, 20), orders(2), batch_size=4, past_share=0.5, was_read=WAS_READ)
    read = joined(epoch_pixels(batches))
    for order in (0, 1):
        expected = set(WAS_READ[order].nonzero().flatten().tolist()) | {int(pixel) for pixel in read[order]}
        assert set(batches.was_read[order].nonzero().flatten().tolist()) == expected
        assert batches.was_read[order, 20:].sum() == 5


def stage(replay=0.5, replay_memory=None, past_share=0.5):
    return SimpleNamespace(replay=replay, replay_memory=replay_memory, past_share=past_share)


def test_a_record_that_was_saved_is_the_same():
    batches = Batches(numbered(1, 20 + 10, 20), orders(2), batch_size=4, past_share=0.5, was_read=WAS_READ)
    list(batches.epoch())
    record, loaded = ReadRecord(), ReadRecord()
    assert loaded.before(stage(), 2, 30) is None
    record.after(stage(), batches)
    loaded.load(record.state())
    assert torch.equal(loaded.before(stage(), 2, 30), batches.was_read)
    assert loaded.before(stage(), 2, 31) is None  # a run of an earlier version, which had no record at first
    assert loaded.before(stage(), 1, 30) is None
    loaded.load({})
    assert loaded.state() == {}


@pytest.mark.parametrize("changes", [{"replay": False}, {"replay": "all"}, {"replay_memory": 10}])
def test_what_was_read_is_only_known_if_all_examples_are_kept(changes):
    record = ReadRecord()
    record.after(stage(**changes), Batches(numbered(1, 30, 20), orders(2), batch_size=4))
    assert record.state() == {}


def test_what_a_stage_leaves_is_read_by_the_next_stage(tmp_path, monkeypatch):
    """With one epoch, the stage at arrival t reads 1/t of its new examples, and has room for all that were left."""
    unread, after = [], ReadRecord.after

    def counting(self, stage, batches):
        unread.append(int((~batches.was_read).sum()))
        after(self, stage, batches)

    monkeypatch.setattr(ReadRecord, "after", counting)
    small_run(tmp_path, replay="uniform", epochs=1)
    # There are 323 or 324 training examples in each of the 4 mega-batches.
    assert unread == [pytest.approx(324 * (t - 1) / t, abs=1.5) for t in (1, 2, 3, 4)]
