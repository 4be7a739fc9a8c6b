"""FLOPs of a language model: counted by torch for two short inputs, computed from these for every other."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# L tokens in a row.
SHORT, LONG = 16, 32


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of one row of L tokens: per_token * L + per_token_pair * L^2, exactly.

    In a transformer, only attention is quadratic in L; everything else is linear in L, and everything is linear in the
    number of rows. So two counts give the FLOPs of every batch shape.
    """

    per_token: int
    """FLOPs that grow with L."""
    per_token_pair: int
    """FLOPs that grow with L^2."""

    def of_row(self, length: int) -> int:
        """Return the FLOPs of one row of `length` tokens."""
        return self.total(length, length * length)

    def total(self, num_tokens: int, num_token_pairs: int) -> int:
        """Return the FLOPs of any set of rows.

        Args:
            num_tokens: tokens of all rows, padding included.
            num_token_pairs: sum of the squared lengths of the rows.
        """
        return self.per_token * num_tokens + self.per_token_pair * num_token_pairs


def count_forward_flops(model: Any) -> RowFlops:
    """Return the FLOPs of a forward pass. torch's flop counter counts 2 for each multiply-add of a matrix product.

    Args:
        model: a SwitchLanguageModel. It is left as it was.
    """
    return _solve(model, backward=False)


def count_training_flops(model: Any) -> RowFlops:
    """Return the FLOPs of a forward and a backward pass.

    Every token counts as processed by one expert, also a dropped one: a count that depends on the router could not be
    compared between runs. Recomputation (--checkpoint-activations) is not counted.

    Args:
        model: a SwitchLanguageModel. It is left as it was.
    """
    return _solve(model, backward=True)


def _solve(model: Any, backward: bool) -> RowFlops:
    """Return a and b of a L + b L^2, from counts at two lengths."""
    short, long = _count(model, SHORT, backward), _count(model, LONG, backward)
    # long - 2 short = per_token_pair (LONG^2 - 2 SHORT^2), for LONG = 2 SHORT
    per_token_pair, remainder = divmod(long - 2 * short, LONG**2 - 2 * SHORT**2)
    per_token, remainder_2 = divmod(short - per_token_pair * SHORT**2, SHORT)
    if remainder or remainder_2:
        raise ValueError(
            f"{type(model).__name__}: FLOPs are not a L + b L^2: {short} for L = {SHORT}, {long} for L = {LONG}"
        )
    return RowFlops(per_token, per_token_pair)


def _count(model: Any, length: int, backward: bool) -> int:
    """Return the FLOPs of one row, counted by torch. The state of the model is restored afterwards."""
    device = next(model.parameters()).device
    tokens = torch.full((1, length), model.decoder.dictionary.eos(), device=device)
    was_training = model.training
    limits = [(m, m.capacity_factor, m.eval_capacity_factor) for m in model.mixtures]
    gradients = [(p, p.grad) for p in model.parameters()]
    recompute = model.decoder.checkpoint_activations
    try:
        for mixture, *_ in limits:
            mixture.capacity_factor = mixture.eval_capacity_factor = 0.0
        model.decoder.checkpoint_activations = False
        model.train(backward)
        # MATH: torch's counter has no formula for the fused attention kernels of some devices.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if backward:
                scores, _ = model(tokens)
                scores.sum().backward()
            else:
                with torch.no_grad():
                    model(tokens)
        return counter.get_total_flops()
    finally:
        for mixture, capacity, eval_capacity in limits:
            mixture.capacity_factor, mixture.eval_capacity_factor = capacity, eval_capacity
        for parameter, gradient in gradients:
            parameter.grad = gradient
        model.decoder.checkpoint_activations = recompute
        model.train(was_training)
