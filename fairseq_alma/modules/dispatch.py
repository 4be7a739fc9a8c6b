"""Send each token to its expert, and return the outputs of the experts in the original order of the tokens.

The tokens are sorted by expert and split into one part for each expert. This is 3 to 6 times faster than a one-hot
einsum (benchmarks/lm_quick.py), because each expert processes only the tokens that it got, without padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Dimensions: T tokens, of which K are kept (not dropped), E experts, D model width.


@dataclass(frozen=True)
class Plan:
    """The assignment of tokens to experts. A token is kept if its expert processes it, and dropped otherwise."""

    token_K: Tensor
    """Indices of the K kept tokens, sorted by expert and, within an expert, in the order of the tokens. int64 [K]."""
    count_E: Sequence[int]
    """Number of kept tokens of each expert, [E]."""
    load_E: Tensor
    """Number of tokens that the router sent to each expert, including dropped tokens. int64 [E]."""


def plan_dispatch(expert_T: Tensor, num_experts: int, capacity: int | None) -> Plan:
    """Return the plan that sorts tokens by expert and drops the tokens that exceed the capacity of their expert.

    If an expert gets more than `capacity` tokens, it processes only the first ones (as in the Switch paper). So the
    output for a token never depends on later tokens of the same sequence.

    Args:
        expert_T: the expert of each token, int64 [T].
        num_experts: number of experts, E.
        capacity: maximum number of tokens for each expert; None for no limit.
    """
    load_E = torch.bincount(expert_T, minlength=num_experts)
    token_T = torch.argsort(expert_T, stable=True)
    if capacity is None:
        return Plan(token_T, load_E.tolist(), load_E)
    count_E = load_E.clamp(max=capacity)
    counts = count_E.tolist()
    if sum(counts) == expert_T.numel():
        return Plan(token_T, counts, load_E)
    # first_E: position in token_T of each expert's first token. rank_T: for each token in token_T, the number of tokens
    # before it that go to the same expert. A token is kept if this number is smaller than the capacity.
    first_E = load_E.cumsum(0) - load_E
    rank_T = torch.arange(expert_T.numel(), device=expert_T.device) - first_E[expert_T[token_T]]
    return Plan(token_T[rank_T < capacity], counts, load_E)


def apply_experts(x_TD: Tensor, scale_T: Tensor, plan: Plan, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """For each token, return the output of its expert times `scale_T`, [T, D]. Dropped tokens have output 0.

    The residual connection of the layer passes dropped tokens on unchanged.

    Args:
        x_TD: inputs [T, D].
        scale_T: factor for the output of each token, [T].
        plan: the return value of plan_dispatch.
        experts: one function for each of the E experts. It maps the inputs [n, D] of n tokens to outputs [n, D].
    """
    x_KD = x_TD.index_select(0, plan.token_K)
    y_KD = torch.cat(
        [expert(x) for expert, x in zip(experts, x_KD.split(list(plan.count_E)), strict=True) if len(x)]
        or [x_KD]  # torch.cat needs a tensor even if there is no token
    )
    y_KD = y_KD * scale_T.index_select(0, plan.token_K).unsqueeze(1).to(y_KD.dtype)
    return y_KD.new_zeros(x_TD.shape).index_copy(0, plan.token_K, y_KD)
