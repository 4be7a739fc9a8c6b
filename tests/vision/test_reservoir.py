"""replay=uniform and replay_memory: which earlier examples a stage reads."""

import torch

from fairseq_alma.core.protocol import Stage
from tests.vision.tiny_runs import small_run
from vision.batches import Memory
from vision.datasets import load_dataset
from vision.inputs import Vectors
from vision.reservoir import kept_examples, num_kept_examples
from vision.stream import partition, stacked_stream

DIGITS = load_dataset("digits", ".")


def mega_batches(seeds=(0, 1)):
    return list(stacked_stream([partition(DIGITS, 10, 0.1, seed) for seed in seeds]))


def as_set(selection):
    return set(selection._positions.tolist())


def test_the_memory_has_its_size_and_both_parts():
    (kept,) = kept_examples(mega_batches()[:5], 100, [7, 8])
    assert kept.counts == {"training": 90, "validation": 10}
    for number in (0, 1):
        assert len(kept.data[number].training) == 90
        assert len(kept.data[number].validation) == 10
    assert num_kept_examples(mega_batches()[:5], 100) == 100


def test_everything_is_kept_while_it_fits():
    past = mega_batches()[:2]
    assert kept_examples(past, 1000, [7, 8]) == tuple(past)
    assert num_kept_examples(past, 1000) == num_kept_examples(past, None) == 288


def test_an_example_that_was_dropped_does_not_come_back():
    stream = mega_batches()
    seen = set()
    before = None
    for t in range(2, 10):
        (kept,) = kept_examples(stream[:t], 60, [7, 8])
        now = as_set(kept.data[0].training)
        if before is not None:
            arrived = as_set(stream[t - 1].data[0].training)
            assert now <= before | arrived
        seen |= now
        before = now
    assert len(seen) > len(now)


def test_each_mega_batch_has_about_an_equal_part():
    stream, counts = mega_batches(tuple(range(20))), torch.zeros(8)
    (kept,) = kept_examples(stream[:8], 200, list(range(20)))
    for number in range(20):
        for t in range(8):
            counts[t] += len(as_set(stream[t].data[number].training) & as_set(kept.data[number].training))
    # 20 x 181 training examples of 8 mega-batches: 452 of each expected, with a standard deviation below 20
    assert counts.sum() == 3620
    assert bool(((counts - 452.5).abs() < 100).all())


def test_a_stage_reads_new_examples_and_those_of_the_memory():
    stream = mega_batches((0,))
    memory = Memory(Vectors(DIGITS.pixels), 10, 1, torch.device("cpu"))
    for t in range(1, 6):
        data = memory.stage_data(stream[t - 1 : t], stream[: t - 1], "uniform", 50)
        new = len(stream[t - 1].data[0].training)
        assert (data.num_past, data.num_new) == (0 if t == 1 else 45, new)
        assert data.validation.num_examples == len(stream[t - 1].data[0].validation) + (0 if t == 1 else 5)
    assert torch.equal(data.training.labels[0, 45:], stream[4].data[0].training.labels)


def test_the_share_of_the_past_grows(tmp_path):
    stream = mega_batches((0,))
    for replay, shares in (("uniform", [0, 1 / 2, 2 / 3, 3 / 4]), (0.3, [0, 0.3, 0.3, 0.3]), (False, [0] * 4)):
        stages = [Stage(t, tuple(stream[t - 1 : t]), tuple(stream[: t - 1]), replay, tmp_path) for t in range(1, 5)]
        assert [stage.past_share for stage in stages] == shares
    assert Stage(2, tuple(stream[1:4]), tuple(stream[:1]), "uniform", tmp_path).past_share == 1 / 4
    assert Stage(2, tuple(stream[1:4]), tuple(stream[:1]), "all", tmp_path).past_share == 0


def test_the_ledger_says_how_many_examples_are_stored(tmp_path):
    (rows,) = small_run(tmp_path / "all", replay="uniform")
    assert [row.scores.num_stored for row in rows] == [0, 360, 720, 1079, 1438]
    (rows,) = small_run(tmp_path / "some", replay=0.5, replay_memory=500)
    assert [row.scores.num_stored for row in rows] == [0, 360, 500, 500, 500]
    (rows,) = small_run(tmp_path / "none")
    assert [row.scores.num_stored for row in rows] == [None] * 5
    assert rows[1].spent.num_updates == rows[4].spent.num_updates
