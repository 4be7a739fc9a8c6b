"""Cross entropy over a large vocabulary without the whole table of logits in memory."""

import torch
from torch import Tensor
from torch.nn import functional as F

# T tokens, D model width, V words.


def summed_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of the targets under softmax(x W^T), summed over tokens.

    In float32 this uses torch's linear_cross_entropy, which takes the tokens in chunks and never stores all T x V
    logits. On a CPU at V = 8000 it takes half the time of a matrix product followed by cross_entropy. In bf16 it rounds
    the sum to bf16, an error of half a percent. So the two plain steps are used in bf16, under autocast, and in
    versions of torch without linear_cross_entropy.

    Args:
        x_TD: features [T, D].
        weight_VD: output weights [V, D].
        target_T: int64 [T].
        ignore_index: target of tokens that are left out (padding).

    Returns:
        A float32 scalar, in nats.
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
