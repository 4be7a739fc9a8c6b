"""The data of a stage: the memory of a run, orders of examples, replay by share, bootstrap samples."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from fairseq_alma.core.protocol import Stage
from tests.vision.rows import UNCHANGED, numbered, numbered_mega_batch
from vision.batches import Batches, Memory
from vision.datasets import Pixels
from vision.inputs import Vectors
from vision.seeds import generator

CPU = torch.device("cpu")


def orders(num_orders, first=0):
    return [generator(number, "order") for number in range(first, first + num_orders)]


def epoch_pixels(batches):
    """Return the pixels of the next epoch, for each batch [R, b] as lists."""
    return [x[..., 0].int().tolist() for x, _ in batches.epoch()]


def joined(batches):
    """Return for each order the pixels of all batches."""
    return [[pixel for batch in batches for pixel in batch[order]] for order in range(len(batches[0]))]


# ---- An epoch.


def test_every_example_comes_once_an_epoch_and_the_last_batch_may_be_smaller():
    batches = Batches(numbered(1, 10), orders(1), batch_size=4)
    assert batches.updates_per_epoch == 3
    first, second = epoch_pixels(batches), epoch_pixels(batches)
    for epoch in (first, second):
        assert [len(batch[0]) for batch in epoch] == [4, 4, 2]
        assert sorted(joined(epoch)[0]) == list(range(10))
    assert joined(first) != joined(second)


@pytest.mark.parametrize(("num_examples", "sizes"), [(9, [4, 5]), (10, [4, 4, 2]), (5, [5]), (1, [1])])
def test_a_last_batch_of_one_example_is_joined_to_the_batch_before(num_examples, sizes):
    batches = Batches(numbered(1, num_examples), orders(1), 4)
    assert [x.shape[1] for x, _ in batches.epoch()] == sizes
    assert batches.updates_per_epoch == len(sizes)


def test_a_batch_size_above_the_number_of_examples_gives_one_batch():
    batches = Batches(numbered(1, 5), orders(1), batch_size=128)
    assert batches.updates_per_epoch == 1
    assert [sorted(batch[0]) for batch in epoch_pixels(batches)] == [[0, 1, 2, 3, 4]]


def test_labels_stay_with_their_examples():
    for x, one_hot in Batches(numbered(2, 10), orders(4), batch_size=4).epoch():
        assert one_hot.shape == (*x.shape[:2], 3)
        assert torch.equal(one_hot.sum(-1), torch.ones(x.shape[:2]))
        assert torch.equal(one_hot.argmax(-1), x[..., 0].long() % 1000 % 3)


def test_the_orders_of_a_seed_read_its_data_only():
    # Two seeds with three networks each. Every network has its own order.
    epoch = joined(epoch_pixels(Batches(numbered(2, 7), orders(6), batch_size=4)))
    assert [sorted(pixels) for pixels in epoch] == [list(range(7))] * 3 + [list(range(1000, 1007))] * 3
    assert all(sorted(pixels) != pixels for pixels in epoch)
    assert epoch[0] != epoch[1]


@pytest.mark.parametrize("settings", [{}, {"bagging": True}, {"past_share": 0.5}, {"past_share": 0.5, "bagging": True}])
def test_a_seed_has_the_same_order_in_a_stack_and_alone(settings):
    num_past = 20 if settings.get("past_share") else 0
    together = Batches(numbered(3, 33, num_past), orders(3), batch_size=8, **settings)
    alone = Batches(numbered(1, 33, num_past), orders(1, first=1), batch_size=8, **settings)
    for _ in range(3):
        expected = [pixel + 1000 for pixel in joined(epoch_pixels(alone))[0]]
        assert joined(epoch_pixels(together))[1] == expected


# ---- Replay by share.


@pytest.mark.parametrize(
    ("share", "batch_size"), [(0.5, 8), (0.25, 8), (0.75, 4), (0.1, 10), (0.7, 10), (0.29, 100), (0.57, 100)]
)
def test_each_batch_has_exactly_its_share_of_replayed_examples(share, batch_size):
    num_past, num_new = 30, 4 * batch_size
    batches = Batches(numbered(2, num_past + num_new, num_past), orders(2), batch_size, past_share=share)
    assert batches.updates_per_epoch == 4
    for _ in range(3):
        epoch = epoch_pixels(batches)
        assert len(epoch) == 4
        for batch in epoch:
            for order in batch:
                assert len(order) == batch_size
                assert sum(pixel % 1000 < num_past for pixel in order) == round(share * batch_size)


def test_a_share_that_does_not_divide_a_batch_is_right_over_the_epoch():
    # A third of 30 examples is 10. Each batch of 4 has 1 or 2 of them.
    batches = Batches(numbered(1, 12 + 30, 12), orders(1), batch_size=4, past_share=1 / 3)
    counts = [sum(pixel < 12 for pixel in batch[0]) for batch in epoch_pixels(batches)]
    assert set(counts[:-1]) == {1, 2}
    assert sum(counts) == 10


@pytest.mark.parametrize(("num_new", "share"), [(3, 0.25), (9, 0.1), (5, 0.5), (1, 0.5), (7, 2 / 3), (100, 0.29)])
def test_the_share_is_right_over_many_epochs_also_if_each_of_them_is_small(num_new, share):
    batches = Batches(numbered(1, 12 + num_new, 12), orders(1), batch_size=4, past_share=share)
    num_past = [sum(pixel < 12 for batch in epoch_pixels(batches) for pixel in batch[0]) for _ in range(60)]
    for epochs in range(1, 61):
        assert abs(sum(num_past[:epochs]) - epochs * num_new * share) < 1
    assert sum(num_past) == round(60 * num_new * share)


def test_no_example_is_read_again_before_all_have_been_read():
    batches = Batches(numbered(2, 5 + 40, 5), orders(2), batch_size=8, past_share=0.3)
    read = [joined(epoch_pixels(batches)) for _ in range(10)]  # each epoch reads 28 new examples and 12 earlier ones
    for order in range(2):
        pixels = [pixel % 1000 for epoch in read for pixel in epoch[order]]
        new, past = [pixel for pixel in pixels if pixel >= 5], [pixel for pixel in pixels if pixel < 5]
        assert (len(new), len(past)) == (280, 120)
        for kind, numbers in ((new, range(5, 45)), (past, range(5))):
            passes = [kind[first : first + len(numbers)] for first in range(0, len(kind), len(numbers))]
            assert all(sorted(one) == list(numbers) for one in passes)
            assert len({tuple(one) for one in passes}) > 1  # in another order each time


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_without_past_examples_every_example_comes_once(share):
    batches = Batches(numbered(1, 10), orders(1), batch_size=4, past_share=share)
    assert sorted(joined(epoch_pixels(batches))[0]) == list(range(10))


# ---- Bagging.


def test_bagging_draws_n_examples_with_replacement_once():
    batches = Batches(numbered(1, 100), orders(2), batch_size=30, bagging=True)
    first, second = joined(epoch_pixels(batches)), joined(epoch_pixels(batches))
    for order in range(2):
        assert len(first[order]) == 100
        assert 50 < len(set(first[order])) < 76  # the expected number is 63
        assert Counter(first[order]) == Counter(second[order])
        assert first[order] != second[order]
    assert Counter(first[0]) != Counter(first[1])


def test_bagging_with_replay_by_share_samples_the_new_examples():
    batches = Batches(numbered(1, 20 + 60, 20), orders(1), batch_size=20, past_share=0.25, bagging=True)
    new = set()
    for _ in range(30):
        epoch = epoch_pixels(batches)
        assert [sum(pixel < 20 for pixel in batch[0]) for batch in epoch] == [5, 5, 5]
        new.update(pixel for pixel in joined(epoch)[0] if pixel >= 20)
    assert 25 < len(new) < 51  # the expected number is 38; all epochs have the same sample


# ---- Memory.


def memory(num_seeds=1):
    return Memory(UNCHANGED, 3, num_seeds, CPU)


def held(data):
    """Return the training pixels and the validation pixels of each seed, and the number of past examples."""
    return [rows.examples[..., 0].int().tolist() for rows in (data.training, data.validation)] + [data.num_past]


BATCHES = {t: numbered_mega_batch(t) for t in range(1, 8)}


def mega_batches(*times):
    return [BATCHES[t] for t in times]


def test_without_replay_only_new_mega_batches_are_stored():
    kept = memory()
    assert held(kept.stage_data(mega_batches(1, 2), [], False)) == [[[10, 11, 12, 20, 21, 22]], [[13, 23]], 0]
    assert held(kept.stage_data(mega_batches(3), mega_batches(1, 2), False)) == [[[30, 31, 32]], [[33]], 0]
    assert held(kept.stage_data(mega_batches(4, 5), mega_batches(1, 2, 3), False)) == [
        [[40, 41, 42, 50, 51, 52]],
        [[43, 53]],
        0,
    ]


def test_full_replay_appends_mega_batches_in_order_of_arrival():
    kept = memory()
    assert held(kept.stage_data(mega_batches(1), [], "all")) == [[[10, 11, 12]], [[13]], 0]
    assert held(kept.stage_data(mega_batches(2), mega_batches(1), "all")) == [[[10, 11, 12, 20, 21, 22]], [[13, 23]], 0]
    third = held(kept.stage_data(mega_batches(3), mega_batches(1, 2), "all"))
    assert third == [[[10, 11, 12, 20, 21, 22, 30, 31, 32]], [[13, 23, 33]], 0]


def test_replay_by_share_counts_past_examples():
    kept = memory()
    assert held(kept.stage_data(mega_batches(1, 2), [], 0.5))[2] == 0
    data = kept.stage_data(mega_batches(3), mega_batches(1, 2), 0.5)
    assert held(data) == [[[10, 11, 12, 20, 21, 22, 30, 31, 32]], [[13, 23, 33]], 6]
    assert data.num_new == 3


@pytest.mark.parametrize("replay", ["all", 0.5])
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_memory_that_was_appended_to_equals_a_new_one(replay, num_seeds):
    batches = [numbered_mega_batch(t, num_seeds) for t in range(1, 7)]
    kept = memory(num_seeds)
    for t in range(6):
        data = kept.stage_data(batches[t : t + 1], batches[:t], replay)
        fresh = memory(num_seeds).stage_data(batches[t : t + 1], batches[:t], replay)
        assert held(data) == held(fresh)
        assert held(data)[0][-1][-1] == 50 * (num_seeds - 1) + 10 * (t + 1) + 2
        for rows, expected in ((data.training, fresh.training), (data.validation, fresh.validation)):
            assert torch.equal(rows.labels, expected.labels)
        # The table has unused rows between two seeds. No batch reads them.
        pixels, expected = (
            joined(epoch_pixels(Batches(stage_data, orders(num_seeds), 4, 0.0 if replay == "all" else replay)))
            for stage_data in (data, fresh)
        )
        assert pixels == expected


def test_the_data_of_a_stage_stay_the_same_when_more_are_appended():
    kept = memory(num_seeds=2)
    batches = [numbered_mega_batch(t, 2) for t in range(1, 6)]
    given = [kept.stage_data(batches[t : t + 1], batches[:t], "all") for t in range(5)]
    assert held(given[0]) == [[[10, 11, 12], [60, 61, 62]], [[13], [63]], 0]
    assert held(given[2]) == held(memory(2).stage_data(batches[2:3], batches[:2], "all"))


def test_labels_and_pixels_of_each_seed_stay_together():
    rows = memory(2).stage_data([numbered_mega_batch(t, 2) for t in (1, 2)], [], False).training
    assert rows.labels.tolist() == [[1, 1, 1, 2, 2, 2]] * 2
    assert rows.one_hot.argmax(-1).tolist() == [1, 1, 1, 2, 2, 2] * 2


def test_the_data_of_the_previous_stage():
    for replay, expected in (
        (False, [[[30, 31, 32, 40, 41, 42]], [[33, 43]], 0]),
        (0.5, [[[10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]], [[13, 23, 33, 43]], 6]),
        ("all", [[[10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]], [[13, 23, 33, 43]], 0]),
    ):
        stage = Stage(3, tuple(mega_batches(5)), tuple(mega_batches(1, 2, 3, 4)), replay, Path())
        kept, fresh = memory(), memory()
        kept.stage_data(mega_batches(3, 4), mega_batches(1, 2), replay)
        assert held(kept.previous_stage_data(stage, 2)) == held(fresh.previous_stage_data(stage, 2)) == expected
        assert held(kept.stage_data(stage.new, stage.past, replay)) == held(
            memory().stage_data(stage.new, stage.past, replay)
        )


def test_pixels_are_normalised_once():
    kept = Memory(Vectors(Pixels(largest=10.0, mean=0.5, deviation=2.0)), 3, 1, CPU)
    rows = kept.stage_data(mega_batches(1), [], "all").training
    torch.testing.assert_close(rows.examples[0, :, 0], torch.tensor([0.25, 0.3, 0.35]))  # (1.0 - 0.5) / 2 ...
    rows = kept.stage_data(mega_batches(2), mega_batches(1), "all").training
    torch.testing.assert_close(rows.examples[0, :, 0], torch.tensor([0.25, 0.3, 0.35, 0.75, 0.8, 0.85]))
