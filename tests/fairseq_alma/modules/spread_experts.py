"""One rank of test_expert_parallel.py: python -m tests.fairseq_alma.modules.spread_experts RANK WORLD PORT

Prints "equal CASE" for each case in which the mixture with spread experts equals the mixture with all experts.
"""

import sys
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_alma.modules.expert_parallel import ExpertGroup, digests_of_experts, keep_own_experts
from fairseq_alma.modules.switch_feed_forward import EXPERT_WEIGHTS, SwitchFeedForward

DIM, WIDTH = 8, 16


@dataclass(frozen=True)
class Case:
    """A mixture, and how its experts are spread."""

    name: str
    num_experts: int = 4
    capacity_factor: float = 1.0
    way: str = "split"
    num_tokens: tuple[int, ...] = (12, 12, 12, 12)
    """Number of tokens of each rank."""
    dtype: torch.dtype = torch.float64
    wrapped: bool = False
    """Whether torch's DistributedDataParallel averages the gradients of the router."""


CASES = (
    Case("with a capacity"),
    Case("without a capacity", capacity_factor=0),
    Case("slots", way="slots"),
    Case("slots, other numbers of tokens", way="slots", num_tokens=(12, 4, 7, 1)),
    Case("experts not divisible", num_experts=5),
    Case("slots, experts not divisible", num_experts=5, way="slots"),
    Case("a rank without tokens", num_tokens=(0, 12, 5, 3)),
    Case("no tokens at all", num_tokens=(0, 0, 0, 0)),
    Case("float32", dtype=torch.float32),
    Case("wrapped", wrapped=True),
)


def inputs_of(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a rank, and the gradient of the loss with respect to the outputs."""
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, case.num_tokens[rank], DIM, generator=generator, dtype=torch.float64).to(case.dtype)
    return x.requires_grad_(), grad


def mixture_of(case: Case, group: ExpertGroup | None) -> SwitchFeedForward:
    torch.manual_seed(3)
    mixture = SwitchFeedForward(DIM, WIDTH, case.num_experts, case.capacity_factor, group=group).to(case.dtype)
    mixture.way = case.way
    return mixture


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter. It is 0 if no token used the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def check(case: Case, rank: int, world: int, group: ExpertGroup) -> None:
    whole, spread = mixture_of(case, None), mixture_of(case, group)
    own = spread.shard.own
    # The same random numbers give the same initial weights.
    for name in EXPERT_WEIGHTS:
        assert torch.equal(getattr(spread, name), getattr(whole, name)[own]), name
    with torch.no_grad():
        for bias in (whole.fc1_bias, whole.fc2_bias):
            bias.normal_(generator=torch.Generator().manual_seed(5))
    spread.load_state_dict(whole.state_dict())
    outputs, inputs = [], []
    for i in range(world):
        x, grad = inputs_of(case, i)
        outputs.append(whole(x))
        inputs.append(x)
        (outputs[i].y_TD * grad).sum().add(outputs[i].routing.balance_loss).backward()
    model: nn.Module = spread
    if case.wrapped:
        model = nn.Sequential(spread)
        keep_own_experts(model)
        model = DistributedDataParallel(model)
    x, grad = inputs_of(case, rank)
    output = model(x)
    (output.y_TD * grad).sum().add(output.routing.balance_loss).backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(output.y_TD, outputs[rank].y_TD, **tolerance)
    torch.testing.assert_close(x.grad, inputs[rank].grad, **tolerance)
    assert output.num_dropped == outputs[rank].num_dropped
    kept_E = output.plan.load_E - output.plan.dropped_E
    of_group = outputs[group.first_rank : group.first_rank + group.size]
    kept_of_group_E = sum(o.plan.load_E - o.plan.dropped_E for o in of_group)
    tokens_N = [kept_of_group_E[spread.shard.slice_of(i)].sum().item() for i in range(group.size)]
    busiest = max(tokens_N) * group.size / max(1, sum(tokens_N))
    assert abs(group.busiest_rank_load(torch.stack([kept_E, kept_E])).item() - busiest) < 1e-6
    for name in EXPERT_WEIGHTS:
        parameter = getattr(spread, name)
        gradient = gradient_of(parameter)
        group.average_gradient(gradient)
        torch.testing.assert_close(gradient, gradient_of(getattr(whole, name))[own] / world, **tolerance)
        collected = spread.shard.collect_checked(parameter.detach())
        assert (collected is None) == (rank != 0)
        if collected is not None:
            assert torch.equal(collected.values, getattr(whole, name))
            assert collected.digests == digests_of_experts(getattr(whole, name))
    assert group.sum_of_experts(torch.tensor(2.0 + group.position)) == sum(2 + i for i in range(group.size))
    if case.wrapped:
        torch.testing.assert_close(spread.router.weight.grad, whole.router.weight.grad / world, **tolerance)
    assert group.take_seconds() > 0
    assert group.take_seconds() == 0


def main() -> None:
    rank, world, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for size in (2, 4):
        if world % size == 0:
            group = ExpertGroup(size)
            for case in CASES:
                check(case, rank, world, group)
                print("equal", size, case.name)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
