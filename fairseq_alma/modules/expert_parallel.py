"""Expert parallelism: spread the experts of a mixture over ranks (training processes).

With N = expert_parallel, the W ranks of a training form W / N groups of N consecutive ranks. Each group holds all
experts, and each rank of a group holds about E / N of them. Each rank still has its own sequences and computes the
router and all other layers itself (data parallelism). In each mixture, the ranks of a group exchange the inputs of the
experts, so that every token reaches the rank that holds its expert. A second exchange returns the outputs. An exchange
in which every rank sends something to every other rank is called all-to-all.

The capacity of an expert is computed on each rank from the tokens of this rank, as without expert parallelism. So the
outputs and the gradients do not depend on N.

A rank holds only its own experts, but checkpoints always contain all experts, in the same form for every N. The
optimizer (optim/fused_adam.py) collects the experts before a checkpoint is written. SwitchFeedForward selects the
experts of the rank when a checkpoint is loaded.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fairseq_alma.modules.dispatch import Plan
from fairseq_alma.modules.experts import ExpertWeights, run_experts

# Dimensions: N ranks of a group, E experts, S rows with the inputs of the experts on one rank, D model width.


class ExpertGroup:
    """The group of N = `size` ranks to which this rank belongs. They hold all experts together.

    All ranks of the training must create this object at the same time, because they make process groups together.
    Raises ValueError if their number is not a multiple of N.
    """

    def __init__(self, size: int):
        world = distributed.get_world_size() if distributed.is_initialized() else 1
        if world % size:
            raise ValueError(
                f"expert_parallel={size}: the number of ranks, {world}, must be a multiple of {size}. Train on more "
                f"devices, or lower expert_parallel"
            )
        self.world_size, self.size = world, size
        self.first_rank = distributed.get_rank() // size * size
        """The first rank of the group."""
        self.position = distributed.get_rank() - self.first_rank
        """Position of this rank in the group, counted from 0."""
        groups = [list(range(first, first + size)) for first in range(0, world, size)]
        self._ranks = _join(groups)
        # Use gloo, so that the sizes of messages are exchanged between the hosts, without waiting for a GPU.
        self._hosts = self._ranks if distributed.get_backend() == "gloo" else _join(groups, "gloo")
        # The ranks that hold the same experts: one rank of each group.
        self._replicas = _join([list(range(i, world, size)) for i in range(size)]) if world > size else None
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __deepcopy__(self, memo: Any) -> "ExpertGroup":
        raise ValueError("expert_parallel does not work with --store-ema: leave --store-ema out")

    def num_experts_of_ranks(self, num_experts: int) -> list[int]:
        """Return how many of `num_experts` experts each rank of the group holds. The numbers differ by at most 1."""
        return [num_experts // self.size + (i < num_experts % self.size) for i in range(self.size)]

    def all_gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """Return the `counts` of each rank of the group. They have the same length on all ranks."""
        own = torch.tensor(counts)
        counts_of_ranks = own.new_empty(self.size * len(own))
        distributed.all_gather_into_tensor(counts_of_ranks, own, group=self._hosts)
        return counts_of_ranks.view(self.size, len(own)).tolist()

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Send rows of `x` to each rank of the group, and return the rows that this rank receives.

        Args:
            x: a matrix. Its first rows are for the first rank of the group, the next rows for the second rank, etc.
            received: number of rows that this rank receives from each rank.
            sent: number of rows for each rank.
        """
        rows = x.new_empty(sum(received), x.size(1))
        with self._timed(x.device):
            distributed.all_to_all_single(rows, x.contiguous(), received, sent, group=self._ranks)
        return rows

    def sum_of_experts(self, value: Tensor) -> Tensor:
        """Return the sum of a value of the experts over all experts, given the sum over the experts of this rank.

        The result is exactly the same on all ranks, also of other groups.
        """
        # Sum over all ranks, and not over the ranks of the group, because two groups may sum in another order.
        distributed.all_reduce(value)
        return value / (self.world_size // self.size)

    def busiest_rank_load(self, tokens_ME: Tensor) -> Tensor:
        """Return the number of tokens of the busiest rank, divided by the mean over the ranks, a scalar.

        `tokens_ME` is the number of tokens that this rank sends to each of the E experts of M mixtures, [M, E]. The
        result is the mean over the mixtures.
        """
        tokens_ME = tokens_ME.double()
        distributed.all_reduce(tokens_ME, group=self._ranks)
        numbers = self.num_experts_of_ranks(tokens_ME.size(1))
        tokens_MN = torch.stack([part.sum(dim=1) for part in tokens_ME.split(numbers, dim=1)], dim=1)
        return (tokens_MN.amax(dim=1) / tokens_MN.mean(dim=1).clamp(min=1e-9)).mean()

    def average_gradient(self, grad: Tensor) -> None:
        """Change the gradient of experts, summed over the tokens of this group, to the mean over all ranks.

        fairseq averages the gradients of all other weights over the ranks, too.
        """
        if self._replicas is not None:
            distributed.all_reduce(grad, group=self._replicas)
        grad.div_(self.world_size)

    def send_to_first(self, x: Tensor) -> None:
        """Send a tensor to the first rank of the group, which calls `receive`."""
        distributed.send(x.contiguous(), self.first_rank, group=self._ranks)

    def receive(self, like: Tensor, position: int) -> Tensor:
        """Return the tensor that the rank at `position` in the group sends. It has the shape and device of `like`."""
        received = torch.empty_like(like)
        distributed.recv(received, self.first_rank + position, group=self._ranks)
        return received

    def take_seconds(self) -> float:
        """Return the time in seconds that this rank has spent in all_to_all since the last call.

        On a GPU, exchanges that have not ended yet are counted in a later call, so that the host need not wait.
        """
        while self._events and self._events[0][1].query():
            begin, end = self._events.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        """Measure the time of the operations in the `with` block, for take_seconds."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun


def _join(groups: Iterable[list[int]], backend: str | None = None) -> distributed.ProcessGroup:
    """Make a process group for each list of ranks, and return the process group of this rank."""
    # All ranks must make all process groups, in the same order.
    made = [distributed.new_group(ranks, backend=backend) for ranks in groups]
    # For a group without this rank, new_group returns a number.
    return next(group for group in made if isinstance(group, distributed.ProcessGroup))


@dataclass(frozen=True)
class ExpertShard:
    """The experts of a mixture that this rank holds. The parameters of these experts have it as attribute `expert`.

    fairseq does not sum the gradient of a parameter with an attribute `expert` over the ranks.
    """

    group: ExpertGroup
    """The ranks that hold all experts together."""
    num_experts: int
    """Number of experts of the mixture on all ranks of the group together, E."""

    def __post_init__(self) -> None:
        if self.num_experts < self.group.size:
            raise ValueError(
                f"expert_parallel={self.group.size} needs at least {self.group.size} experts, but the mixtures have "
                f"{self.num_experts}: lower expert_parallel"
            )

    def slice_of(self, position: int) -> slice:
        """Return the slice of the E experts that the rank at `position` in the group holds."""
        numbers = self.group.num_experts_of_ranks(self.num_experts)
        first = sum(numbers[:position])
        return slice(first, first + numbers[position])

    @property
    def own(self) -> slice:
        """The slice of the E experts that this rank holds."""
        return self.slice_of(self.group.position)

    def collect(self, values: Tensor) -> Tensor | None:
        """Return the values of all E experts, on the CPU, on rank 0; None on all other ranks. All ranks must call it.

        `values` are those of the experts that this rank holds, [number of these experts, ...].
        """
        group = self.group
        # The other groups hold the same values.
        if group.first_rank != 0:
            return None
        if group.position > 0:
            group.send_to_first(values)
            return None
        collected = torch.empty(self.num_experts, *values.shape[1:], dtype=values.dtype)
        collected[self.own] = values.cpu()
        for position in range(1, group.size):
            part = self.slice_of(position)
            number = part.stop - part.start
            collected[part] = group.receive(values.new_empty(number, *values.shape[1:]), position).cpu()
        return collected

    def collect_checked(self, values: Tensor) -> "Collected | None":
        """Return the values of all E experts and their digests, like `collect`.

        Each rank sends digests of its values. Raise RuntimeError if the values that have arrived have others.
        """
        # Compute the digests before the exchange, so that all ranks compute them at the same time.
        digests = _as_tensor(digests_of_experts(values) if self.group.first_rank == 0 else []).to(values.device)
        collected, expected = self.collect(values), self.collect(digests)
        if collected is None or expected is None:
            return None
        arrived = digests_of_experts(collected)
        changed = (_as_tensor(arrived) != expected).any(dim=1).nonzero().flatten().tolist()
        if changed:
            raise RuntimeError(
                f"the weights of the experts {changed} were damaged on their way to rank 0, so no checkpoint is "
                f"written. Earlier checkpoints are not changed"
            )
        return Collected(collected, arrived)


@dataclass(frozen=True)
class Collected:
    """The values of all experts of a mixture, collected on rank 0. The parameter has them as attribute `collected`."""

    values: Tensor
    """The values, on the CPU, [E, ...]."""
    digests: list[str]
    """The digests of the experts, see digests_of_experts."""


def keep_own_experts(model: nn.Module) -> None:
    """Tell torch's DistributedDataParallel to leave weights and gradients of spread experts as they are.

    Call it before the model is wrapped. fairseq's legacy_ddp does so for all parameters with an attribute `expert`.
    """
    spread = [name for name, parameter in model.named_parameters() if hasattr(parameter, "expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, spread)


def digests_of_experts(values: Tensor) -> list[str]:
    """Return the SHA-256 digest of the values of each of E experts, in hexadecimal, [E], given the values [E, ...]."""
    rows = values.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    # hashlib lets other threads run while it computes a digest.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda row: hashlib.sha256(row).hexdigest(), rows))


def _as_tensor(digests: list[str]) -> Tensor:
    """Return digests as a tensor, uint8 [E, 32]."""
    return torch.tensor(list(bytes.fromhex("".join(digests))), dtype=torch.uint8).view(len(digests), 32)


def run_spread_experts(
    x_SD: Tensor, plan: Plan, weights: ExpertWeights, shard: ExpertShard, dropout: float = 0.0
) -> Tensor:
    """Return the outputs of the experts, [S, D].

    All ranks of the group must call this function at the same time.

    Args:
        x_SD: inputs of all experts in one matrix, [S, D], as returned by to_rows. It contains tokens of this rank only.
        plan: the return value of plan_dispatch for the tokens of this rank, with way="split" or "slots".
        weights: the weights of the experts that this rank holds.
        shard: the experts that this rank holds.
        dropout: dropout probability after the ReLU.
    """
    assert plan.counts is not None
    group = shard.group
    counts_NE = group.all_gather_counts(plan.counts)
    sent = [sum(plan.counts[shard.slice_of(position)]) for position in range(group.size)]
    # The rows that arrive are sorted by the rank from which they come, and for each rank by expert. Sort them by
    # expert, and for each expert by rank.
    own_counts_Ne = [counts[shard.own] for counts in counts_NE]
    received = [sum(counts) for counts in own_counts_Ne]
    num_own = len(own_counts_Ne[0])
    sizes = [count for counts in own_counts_Ne for count in counts]
    parts = _AllToAll.apply(x_SD, received, sent, group).split(sizes)
    by_expert = [n * num_own + e for e in range(num_own) for n in range(group.size)]
    x_by_expert = torch.cat([parts[i] for i in by_expert])
    totals = tuple(sum(counts) for counts in zip(*own_counts_Ne, strict=True))
    y_by_expert = run_experts(x_by_expert, replace(plan, counts=totals), weights, dropout)
    # Return the outputs in the order in which the inputs have arrived.
    y_parts = y_by_expert.split([sizes[i] for i in by_expert])
    by_rank = [e * group.size + n for n in range(group.size) for e in range(num_own)]
    return _AllToAll.apply(torch.cat([y_parts[i] for i in by_rank]), sent, received, group)


class _AllToAll(torch.autograd.Function):
    """ExpertGroup.all_to_all with a gradient. The gradient goes back in the same way, in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: ExpertGroup) -> Tensor:
        """Return the rows that this rank receives. See ExpertGroup.all_to_all for the arguments."""
        ctx.arguments = sent, received, group
        return group.all_to_all(x, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient with respect to `x`, given the gradient with respect to the result."""
        sent, received, group = ctx.arguments
        return group.all_to_all(grad, sent, received), None, None, None
