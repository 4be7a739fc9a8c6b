"""The loss of a large vocabulary without its table of logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

# T tokens, D model width, V words.


def summed_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Negative log-likelihood of `target_T` under softmax(x W^T): float32, in nats, summed, `ignore_index` left out.

    In float32 torch's chunked linear_cross_entropy takes the tokens piece by piece and never holds all T x V logits:
    on a CPU at V = 8000 half the time of the two plain steps. In bf16 it returns the sum rounded to bf16 (half a
    percent off), so there, under autocast and in torch without it, the plain steps remain.
    """
    plain = torch.is_autocast_enabled(x_TD.device.type) or x_TD.dtype != torch.float32
    if plain or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        logits_TV = F.linear(x_TD, weight_VD).float()
        return F.cross_entropy(logits_TV, target_T, ignore_index=ignore_index, reduction="sum")
    return F.linear_cross_entropy(
        x_TD,
        weight_VD,
        target_T,
        reduction="sum",
        ignore_index=ignore_index,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
