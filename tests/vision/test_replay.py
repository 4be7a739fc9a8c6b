"""The setting `replay`: which earlier examples a stage reads."""

import torch

from fairseq_alma.core import catalogue
from fairseq_alma.core.protocol import Stage
from tests.vision.tiny_runs import flat, networks, small_run
from vision.batches import Memory
from vision.datasets import load_dataset
from vision.inputs import Vectors
from vision.learners import LEARNERS, SingleModel, register_learner
from vision.stream import partition, stacked_stream

DIGITS = load_dataset("digits", ".")


def mega_batches(seeds=(0, 1)):
    return list(stacked_stream([partition(DIGITS, 10, 0.1, seed) for seed in seeds]))


def test_a_stage_reads_new_examples_and_earlier_ones():
    stream = mega_batches((0,))
    memory = Memory(Vectors(DIGITS.pixels), 10, 1, torch.device("cpu"))
    for t in range(1, 6):
        data = memory.stage_data(stream[t - 1 : t], stream[: t - 1], "uniform")
        new = len(stream[t - 1].data[0].training)
        assert (data.num_past, data.num_new) == (sum(len(one.data[0].training) for one in stream[: t - 1]), new)
        assert data.validation.num_examples == sum(len(one.data[0].validation) for one in stream[:t])
    assert torch.equal(data.training.labels[0, data.num_past :], stream[4].data[0].training.labels)


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
    (rows,) = small_run(tmp_path / "none")
    assert [row.scores.num_stored for row in rows] == [None] * 5
    assert rows[1].spent.num_updates == rows[4].spent.num_updates


def test_a_learner_can_choose_what_a_stage_reads(tmp_path):
    """This one leaves out what replay=all would add, so it ends as without replay."""

    class Forgetful(SingleModel):
        def stage_data(self, stage):
            return self.memory.stage_data(stage.new, (), False)

    register_learner("forgetful")(Forgetful)
    try:
        small_run(tmp_path / "own", learner="forgetful", replay="all")
    finally:
        del LEARNERS["forgetful"]
        catalogue.remove_learner("forgetful")
    small_run(tmp_path / "sm")
    assert flat(networks(tmp_path / "own", 4)).equal(flat(networks(tmp_path / "sm", 4)))
