"""Dispatch of tokens to their experts and back, by one sort and one split.

It is 3 to 6 times faster than dispatch by one-hot einsum (benchmarks/lm_quick.py), because each expert computes only
its own tokens and nothing is padded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# T tokens, K of them kept (not dropped), E experts, D model width.


@dataclass(frozen=True)
class Plan:
    """Which tokens each expert computes."""

    token_K: Tensor
    """int64 [K]: indices of the kept tokens, sorted by expert; for each expert in the order of the tokens."""
    count_E: Sequence[int]
    """[E]: number of kept tokens of each expert."""
    load_E: Tensor
    """int64 [E]: number of tokens that the router sent to each expert, dropped ones included."""


def plan_dispatch(expert_T: Tensor, num_experts: int, capacity: int | None) -> Plan:
    """Return the plan that sorts tokens by expert and drops those that exceed its capacity.

    A full expert keeps its first `capacity` tokens (as in the Switch paper), so that the output for a token never
    depends on later tokens of its sequence.

    Args:
        expert_T: int64 [T], the expert of each token.
        num_experts: E.
        capacity: largest number of tokens of an expert; None for no limit.
    """
    load_E = torch.bincount(expert_T, minlength=num_experts)
    token_T = torch.argsort(expert_T, stable=True)
    if capacity is None:
        return Plan(token_T, load_E.tolist(), load_E)
    count_E = load_E.clamp(max=capacity)
    counts = count_E.tolist()
    if sum(counts) == expert_T.numel():
        return Plan(token_T, counts, load_E)
    first_E = load_E.cumsum(0) - load_E
    rank_T = torch.arange(expert_T.numel(), device=expert_T.device) - first_E[expert_T[token_T]]
    return Plan(token_T[rank_T < capacity], counts, load_E)


def apply_experts(x_TD: Tensor, scale_T: Tensor, plan: Plan, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Return the output [T, D] of each token's expert times its scale; 0 for dropped tokens.

    The residual connection of the layer passes dropped tokens on unchanged.

    Args:
        x_TD: inputs [T, D].
        scale_T: factor of each token's output, [T].
        plan: from plan_dispatch.
        experts: E functions from [n, D] to [n, D].
    """
    x_KD = x_TD.index_select(0, plan.token_K)
    y_KD = torch.cat(
        [expert(x) for expert, x in zip(experts, x_KD.split(list(plan.count_E)), strict=True) if len(x)]
        or [x_KD]  # there is no token
    )
    y_KD = y_KD * scale_T.index_select(0, plan.token_K).unsqueeze(1).to(y_KD.dtype)
    return y_KD.new_zeros(x_TD.shape).index_copy(0, plan.token_K, y_KD)
