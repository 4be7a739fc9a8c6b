"""FLOPs of a language model, counted by torch and multiplied."""

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# L tokens in a row.
SHORT, LONG = 16, 32


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of one row of L tokens: per_token * L + per_token_pair * L^2, exactly.

    All of a transformer is linear in L but attention, which is quadratic; and all is linear in the
    number of rows. So two counts give the FLOPs of every batch shape.
    """

    per_token: int
    per_token_pair: int

    def of_row(self, length: int) -> int:
        return self.total(length, length * length)

    def total(self, num_tokens: int, num_token_pairs: int) -> int:
        """Of any set of rows: their tokens (padding included) and the sum of their squared lengths."""
        return self.per_token * num_tokens + self.per_token_pair * num_token_pairs


def count_forward_flops(model) -> RowFlops:
    """Forward pass, as torch's flop counter counts it: 2 for a multiply-add in matrix products."""
    return _solve(model, backward=False)


def count_training_flops(model) -> RowFlops:
    """Forward and backward pass.

    Every token is counted as going through one expert, dropped or not: a count that depended on the
    router would not be comparable between runs. Recomputation (--checkpoint-activations) is not counted.
    """
    return _solve(model, backward=True)


def _solve(model, backward: bool) -> RowFlops:
    short, long = _count(model, SHORT, backward), _count(model, LONG, backward)
    # long - 2 short = per_token_pair (LONG^2 - 2 SHORT^2), for LONG = 2 SHORT
    per_token_pair, remainder = divmod(long - 2 * short, LONG**2 - 2 * SHORT**2)
    per_token, remainder_2 = divmod(short - per_token_pair * SHORT**2, SHORT)
    if remainder or remainder_2:
        raise ValueError(f"{type(model).__name__}: FLOPs of a row are not a L + b L^2 ({short}, {long})")
    return RowFlops(per_token, per_token_pair)


def _count(model, length: int, backward: bool) -> int:
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
        # MATH: the fused kernels of some devices have no formula in torch's counter.
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
