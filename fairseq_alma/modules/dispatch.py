"""Bringing tokens to their experts and back: one sort, one split.

Measured against one-hot einsum dispatch this is 3 to 6 times cheaper, because no expert sees a token
that is not its own and nothing is padded (benchmarks/lm_quick.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# T tokens, K tokens that are kept, E experts, D model width.


@dataclass(frozen=True)
class Plan:
    """Which tokens go where."""

    token_K: Tensor
    """int64: the kept tokens, sorted by expert; within an expert in their order of arrival."""
    count_E: Sequence[int]
    """How many of them each expert takes."""
    load_E: Tensor
    """int64: how many tokens chose each expert, dropped ones included."""


def plan_dispatch(expert_T: Tensor, num_experts: int, capacity: int | None) -> Plan:
    """Sort the tokens by expert and leave out those that find their expert full.

    Of the tokens that chose a full expert the first `capacity` in order of arrival are kept (as in
    the Switch paper): what a token gets never depends on later tokens of its own sequence.
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
    """Each kept token through its expert, times its scale; zero for dropped tokens (the residual carries them)."""
    x_KD = x_TD.index_select(0, plan.token_K)
    y_KD = torch.cat(
        [expert(x) for expert, x in zip(experts, x_KD.split(list(plan.count_E)), strict=True) if len(x)]
        or [x_KD]  # no token at all
    )
    y_KD = y_KD * scale_T.index_select(0, plan.token_K).unsqueeze(1).to(y_KD.dtype)
    return y_KD.new_zeros(x_TD.shape).index_copy(0, plan.token_K, y_KD)
