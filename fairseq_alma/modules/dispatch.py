"""Send each token to its expert, and return the outputs of the experts in the original order of the tokens.

The inputs of all experts form one matrix. Each row of this matrix is the input of one token, and the rows of one expert
follow each other. A plan says which token is in which row. There are three ways to lay out the rows. All of them give
the same outputs and gradients:

- "split": one row for each token that is kept. The matrix is split into one part for each expert. The host must know
  the sizes of the parts, so it reads them from the device. This is the fastest way on a CPU, where such a read costs
  nothing.
- "slots": every expert has as many rows as its capacity, and some rows may stay empty. No shape depends on the data,
  so the host never waits for the device. With capacity factor 1 there are as many rows as tokens.
- "grouped": one row for each token. The matrix product `torch.nn.functional.grouped_mm` reads on the device at which
  row each expert ends, so the host does not wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

# Dimensions: T tokens, S rows of the matrix with the inputs of all experts, E experts, D model width.

Way = Literal["split", "slots", "grouped"]
WAYS: tuple[Way, ...] = get_args(Way)

MAX_COUNTED = 64
"""Up to this many experts, tokens are sorted by counting those of each expert, and otherwise by a sort.

Counting needs a matrix [E, T]. On a CPU, a plan takes about half of the time that it takes by a sort with 4 and 12
experts, and about the same with 64."""


@dataclass(frozen=True)
class Plan:
    """The assignment of tokens to experts. A token is kept if its expert processes it, and dropped otherwise."""

    way: Way
    """Layout of the rows: "split", "slots" or "grouped" (explained in the docstring of this module)."""
    token_S: Tensor
    """Index of the token in each row, int64 [S]. Rows are sorted by expert, and for each expert by token index."""
    used_S: Tensor | None
    """False for a row whose output is not used, bool [S]; None if all rows are used."""
    row_T: Tensor
    """Index of the row of each token, int64 [T]. For dropped tokens, the index is arbitrary."""
    kept_T: Tensor | None
    """False for dropped tokens, True for all others, bool [T]; None if no token can have been dropped."""
    load_E: Tensor
    """Number of tokens that the router sent to each expert, including dropped tokens. int64 [E]."""
    dropped_E: Tensor
    """Number of dropped tokens of each expert, int64 [E]."""
    counts: tuple[int, ...] | None
    """Number of rows of each expert, [E]. None with way="grouped", so that the host need not wait for the GPU."""


def choose_way(device: torch.device, dtype: torch.dtype, capacity: int | None, widths: Sequence[int] = ()) -> Way:
    """Return the fastest layout of the experts' rows: "split", "slots" or "grouped" (see the module's docstring).

    Args:
        device: the device of the tokens.
        dtype: the data type in which the outputs of the experts are computed.
        capacity: maximum number of tokens for each expert; None for no limit.
        widths: number of inputs and of hidden units of each expert.
    """
    if device.type != "cuda":
        return "split"
    if capacity is not None:
        return "slots"
    # grouped_mm has fast kernels only for bfloat16, and only since the A100 (compute capability 8.0). It refuses rows
    # whose size in bytes is not a multiple of 16. On a Blackwell (10.0 and above), its gradient for an expert without
    # tokens was not 0 (pytorch/pytorch#172439).
    if any(width % 8 for width in widths):
        return "split"
    if dtype == torch.bfloat16 and (8, 0) <= torch.cuda.get_device_capability(device) < (10, 0):
        return "grouped"
    return "split"


def count_tokens(expert_T: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens of each of E experts, int64 [E], given the expert of each token, int64 [T].

    Unlike torch.bincount, this does not make the host wait for a CUDA device.
    """
    return (expert_T == torch.arange(num_experts, device=expert_T.device).unsqueeze(1)).sum(dim=1)


def plan_dispatch(expert_T: Tensor, num_experts: int, capacity: int | None, way: Way = "split") -> Plan:
    """Return the plan that sorts tokens by expert and drops the tokens that exceed the capacity of their expert.

    If an expert gets more than `capacity` tokens, it processes only the first ones (as in the Switch paper). So the
    output for a token never depends on later tokens of the same sequence.

    Args:
        expert_T: the expert of each token, int64 [T].
        num_experts: number of experts, E; at most 32768.
        capacity: maximum number of tokens for each expert, at least 1 if there is a token; None for no limit.
        way: how to lay out the rows (see choose_way).
    """
    num_tokens, device = expert_T.numel(), expert_T.device
    limit = num_tokens if capacity is None else capacity
    load_E, position_T = _positions(expert_T, num_experts)
    dropped_E = (load_E - limit).clamp(min=0)
    # first_E: the position of the first token of each expert. rank_T: the number of its earlier tokens.
    first_E = load_E.cumsum(0) - load_E
    rank_T = position_T - first_E.index_select(0, expert_T)
    is_kept_T = rank_T < limit
    kept_T = None if capacity is None else is_kept_T
    sorted_T = torch.empty_like(position_T).scatter_(0, position_T, torch.arange(num_tokens, device=device))
    if way == "slots":
        column_C = torch.arange(limit, device=device)
        has_token_S = (column_C < load_E.unsqueeze(1)).flatten()
        position_S = (first_E.unsqueeze(1) + column_C).flatten().clamp(max=max(num_tokens - 1, 0))
        row_T = expert_T * limit + rank_T.clamp(max=limit - 1)
        token_S, counts = sorted_T.index_select(0, position_S), (limit,) * num_experts
        return Plan(way, token_S, has_token_S, row_T, kept_T, load_E, dropped_E, counts)
    if way == "grouped":
        used_S = None if kept_T is None else kept_T.index_select(0, sorted_T)
        return Plan(way, sorted_T, used_S, position_T, kept_T, load_E, dropped_E, None)
    kept_E = load_E - dropped_E
    counts = tuple(kept_E.tolist())
    if sum(counts) == num_tokens:
        return Plan(way, sorted_T, None, position_T, None, load_E, dropped_E, counts)
    token_S = sorted_T[is_kept_T.index_select(0, sorted_T)]
    row_T = (kept_E.cumsum(0) - kept_E).index_select(0, expert_T) + rank_T.clamp(max=limit - 1)
    return Plan(way, token_S, None, row_T, kept_T, load_E, dropped_E, counts)


def _positions(expert_T: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the number of tokens of each of E experts, int64 [E], and the position of each token, int64 [T], if the
    tokens are sorted by expert, and for each expert by index.
    """
    if num_experts > MAX_COUNTED:
        # A sort of 16-bit numbers needs a quarter of the passes over the data that a sort of 64-bit numbers needs.
        sorted_T = torch.argsort(expert_T.to(torch.int16), stable=True)
        position_T = torch.empty_like(sorted_T)
        position_T.scatter_(0, sorted_T, torch.arange(expert_T.numel(), device=expert_T.device))
        return count_tokens(expert_T, num_experts), position_T
    is_expert_ET = expert_T == torch.arange(num_experts, device=expert_T.device).unsqueeze(1)
    load_E = is_expert_ET.sum(dim=1)
    # The number of tokens of the same expert up to each token, 1 for the first.
    number_T = is_expert_ET.cumsum(dim=1, dtype=torch.int32).gather(0, expert_T.unsqueeze(0)).squeeze(0)
    return load_E, (load_E.cumsum(0) - load_E).index_select(0, expert_T) + number_T - 1


def to_rows(x_TD: Tensor, plan: Plan) -> Tensor:
    """Return the inputs of the experts, [S, D], given those of the tokens, [T, D]. Row s is token `plan.token_S[s]`."""
    return _Move.apply(x_TD, plan.token_S, None, plan.row_T, plan.kept_T)


def from_rows(y_SD: Tensor, plan: Plan) -> Tensor:
    """Return the output of each token, [T, D], given those of the rows, [S, D]. Dropped tokens have output 0.

    The residual connection of the layer passes dropped tokens on unchanged.
    """
    return _Move.apply(y_SD, plan.row_T, plan.kept_T, plan.token_S, plan.used_S)


class _Move(torch.autograd.Function):
    """Select rows of a matrix. The backward pass also selects rows, and needs no additions.

    The backward pass of torch's index_select adds rows of the gradient, because a row of the input can be selected
    several times. The additions are slow in bfloat16 on a GPU, and the result depends on their order. Here, each row is
    selected at most once. So the backward pass only selects rows of the gradient, with the inverse index.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, valid: Tensor | None, inverse: Tensor, inverse_valid: Tensor | None
    ) -> Tensor:
        """Return x[index], with 0 in the rows in which `valid` is False. None means that all rows are valid.

        Args:
            ctx: torch's context.
            x: a matrix [n, D].
            index: for each row of the result, the index of a row of x, int64 [m].
            valid: bool [m] or None.
            inverse: for each row of x, the row of the result to which it moved, int64 [n].
            inverse_valid: False for each row of x that is in no valid row of the result, bool [n] or None.
        """
        ctx.save_for_backward(inverse, inverse_valid)
        return _select(x, index, valid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient with respect to `x`, given the gradient with respect to the result."""
        return _select(grad, *ctx.saved_tensors), None, None, None, None


def _select(x: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
    """Return x[index], with 0 in the rows in which `valid` is False."""
    # If x has no rows, index_select raises an error. In this case, no row of the result is valid, so return zeros.
    if len(x) == 0:
        return x.new_zeros(len(index), x.size(1))
    selected = x.index_select(0, index)
    return selected if valid is None else selected.masked_fill_(~valid.unsqueeze(1), 0)
