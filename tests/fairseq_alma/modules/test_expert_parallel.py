"""Experts spread over ranks compute what experts on one rank compute, and are collected whole."""

import contextlib
import copy
import sys

import pytest
import torch

from fairseq_alma.modules import expert_parallel
from fairseq_alma.modules.expert_parallel import Collected, ExpertGroup, ExpertShard, digests_of_experts
from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward
from tests.fairseq_alma.modules.spread_experts import CASES
from tests.fairseq_alma.ranks import free_port, run_ranks


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_rank(num_ranks):
    port, program = free_port(), "tests.fairseq_alma.modules.spread_experts"
    outputs = run_ranks(
        [[sys.executable, "-m", program, str(rank), str(num_ranks), str(port)] for rank in range(num_ranks)]
    )
    sizes = [size for size in (2, 4) if num_ranks % size == 0]
    expected = [f"equal {size} {case.name}" for size in sizes for case in CASES]
    for output in outputs:
        assert [line for line in output.splitlines() if line.startswith("equal")] == expected


def fake_group(position=0, size=2):
    """An ExpertGroup without process groups, for what needs no communication."""
    group = object.__new__(ExpertGroup)
    group.size, group.position, group.first_rank, group.world_size = size, position, 0, size
    return group


def test_every_expert_is_on_one_rank():
    for num_experts in range(4, 12):
        slices = [ExpertShard(fake_group(size=4), num_experts).slice_of(i) for i in range(4)]
        assert [e for part in slices for e in range(num_experts)[part]] == list(range(num_experts))
        sizes = [part.stop - part.start for part in slices]
        assert max(sizes) - min(sizes) <= 1


def test_what_is_impossible_is_refused():
    with pytest.raises(ValueError, match="expert_parallel=2: the number of ranks, 1, must be a multiple of 2"):
        ExpertGroup(2)
    with pytest.raises(ValueError, match="expert_parallel=4 needs at least 4 experts, but the mixtures have 3"):
        ExpertShard(fake_group(size=4), 3)
    with pytest.raises(ValueError, match="--store-ema"):
        copy.deepcopy(fake_group())


def test_experts_of_one_rank_are_not_saved_as_if_they_were_all():
    mixture = SwitchFeedForward(8, 16, 4, group=fake_group())
    assert [len(p) for p in (mixture.fc1_weight, mixture.fc2_bias)] == [2, 2]
    with pytest.raises(RuntimeError, match="only the experts 0 to 1 of 4: all ranks must collect them first"):
        mixture.state_dict()
    whole = SwitchFeedForward(8, 16, 4)
    for name, value in whole.named_parameters():
        if not name.startswith("router"):
            getattr(mixture, name).collected = Collected(value.detach(), [])
    state = mixture.state_dict()
    assert torch.equal(state["fc1_weight"], whole.fc1_weight)
    assert torch.equal(state["fc2_bias"], whole.fc2_bias)
    with pytest.raises(RuntimeError, match="must collect them first"):
        mixture.state_dict()  # what was collected is used once, because the next update changes the weights
    try:
        raise FloatingPointError("the loss is nan")
    except FloatingPointError:
        # fairseq writes crash.pt on one rank only.
        assert len(mixture.state_dict()["fc1_weight"]) == 2


def test_an_expert_that_arrives_damaged_is_found():
    values = torch.randn(4, 3)
    shard = ExpertShard(fake_group(), 4)
    damaged = pytest.raises(RuntimeError, match=r"experts \[2\] were damaged on their way")
    for error, expected in ((0.0, contextlib.nullcontext()), (1e-3, damaged)):
        sent = values[2:].clone()
        sent[0, 1] += error
        arriving = iter([sent, expert_parallel._as_tensor(digests_of_experts(values[2:]))])
        shard.group.receive = lambda like, position, arriving=arriving: next(arriving)
        with expected:
            collected = shard.collect_checked(values[:2])
            assert torch.equal(collected.values, values)
            assert collected.digests == digests_of_experts(values)
