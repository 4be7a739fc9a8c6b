"""Number of floating-point operations (FLOPs) of a language model.

torch counts the FLOPs for two short sequences. The FLOPs for other lengths are computed from these two counts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SHORT = 16
"""Number of tokens in the shorter one of the two sequences for which torch counts the FLOPs. The other one is twice as
long. If the model does not have so many positions, both are shorter."""


@dataclass(frozen=True)
class RowFlops:
    """FLOPs for one sequence. For L tokens, they are exactly per_token * L + per_token_pair * L^2.

    The FLOPs of attention have a part that is quadratic in L. All other FLOPs of a transformer are linear in L. So
    counts for two lengths are enough to compute both coefficients. The FLOPs of a batch are the sum over its sequences.
    """

    per_token: int
    """FLOPs for each token of a sequence, without the part of attention that is quadratic in the length."""
    per_token_pair: int
    """FLOPs of attention for each pair of tokens. A sequence of L tokens has L^2 such pairs."""

    def of_row(self, length: int) -> int:
        """Return the FLOPs for one sequence of `length` tokens."""
        return self.total(length, length * length)

    def total(self, num_tokens: int, num_token_pairs: int) -> int:
        """Return the FLOPs for sequences with these sums of lengths, including padding, and of squared lengths."""
        return self.per_token * num_tokens + self.per_token_pair * num_token_pairs


def count_forward_flops(model: Any) -> RowFlops:
    """Return the FLOPs of a forward pass. A multiplication with its addition in a matrix product counts as two."""
    return _solve(model, backward=False)


def count_training_flops(model: Any) -> RowFlops:
    """Return the FLOPs of a forward and a backward pass.

    Every token counts as processed by one expert, even if it is dropped. Otherwise the count would depend on the router
    and could not be compared between runs. The recomputation of --checkpoint-activations is not counted.
    """
    return _solve(model, backward=True)


def _solve(model: Any, backward: bool) -> RowFlops:
    """Count the FLOPs for two lengths L. Return the a and b for which FLOPs = a * L + b * L^2 at these lengths."""
    length = min(SHORT, model.max_positions() // 2)
    short, long = _count(model, length, backward), _count(model, 2 * length, backward)
    # The terms with per_token cancel in the difference `long - 2 * short`. The difference equals
    # per_token_pair * ((2 * length)^2 - 2 * length^2).
    per_token_pair, remainder = divmod(long - 2 * short, 2 * length**2)
    per_token, remainder_2 = divmod(short - per_token_pair * length**2, length)
    if remainder or remainder_2:
        raise ValueError(
            f"{type(model).__name__}: the FLOPs for a sequence of L tokens do not have the form a * L + b * L^2 with "
            f"integers a and b: they are {short} for L = {length}, {long} for L = {2 * length}. Use a model whose "
            f"FLOPs have this form"
        )
    return RowFlops(per_token, per_token_pair)


def _count(model: Any, length: int, backward: bool) -> int:
    """Let torch count the FLOPs for one sequence of `length` tokens, and return them. The model is not changed.

    During the count, the experts have no capacity limit, so no token is dropped.
    """
    device = next(model.parameters()).device
    tokens = torch.full((1, length), model.decoder.dictionary.eos(), device=device)
    was_training = model.training
    limits = [(m, m.capacity_factor, m.eval_capacity_factor, m.way) for m in model.mixtures]
    gradients = [(p, p.grad) for p in model.parameters()]
    recompute = getattr(model.decoder, "checkpoint_activations", False)
    try:
        for mixture, *_ in limits:
            mixture.capacity_factor = mixture.eval_capacity_factor = 0.0
            # Compute the experts one after the other ("split"), because torch's counter cannot count grouped matrix
            # products.
            mixture.way = "split"
        model.decoder.checkpoint_activations = False
        model.train(backward)
        # Compute attention with torch's plain implementation (MATH), because the counter has no formula for the faster
        # implementations on some devices.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if backward:
                scores, _ = model(tokens)
                scores.sum().backward()
            else:
                with torch.no_grad():
                    model(tokens)
        return counter.get_total_flops()
    finally:
        for mixture, *limit in limits:
            mixture.capacity_factor, mixture.eval_capacity_factor, mixture.way = limit
        for parameter, gradient in gradients:
            parameter.grad = gradient
        model.decoder.checkpoint_activations = recompute
        model.train(was_training)
