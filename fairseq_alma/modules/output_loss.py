"""Cross entropy over a large vocabulary, without storing the logits of all tokens at the same time."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Dimensions: T tokens, D model width, V words in the vocabulary.


def summed_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of the targets under softmax(x W^T), summed over tokens.

    For float32 inputs, this function calls torch's linear_cross_entropy, which processes the tokens in chunks and never
    stores all T x V logits. On a CPU with V = 8000, linear_cross_entropy takes half the time of a matrix product
    followed by cross_entropy.

    In two cases, this function uses a matrix product and cross_entropy instead:

    - if the inputs have another type than float32, or autocast is on. In bf16, linear_cross_entropy would round the sum
      to bf16, which is an error of half a percent.
    - if the installed version of torch has no linear_cross_entropy.

    Args:
        x_TD: features [T, D].
        weight_VD: weights of the output layer, W, [V, D].
        target_T: the target word of each token, int64 [T].
        ignore_index: tokens with this target (padding) do not count.

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


LOGITS_PER_CHUNK = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Device type -> number of logits that token_nll computes at a time: 32 MiB of float32 on a CPU, 1 GiB on a GPU.

On a CPU, such a chunk stays in the cache between the matrix product and the softmax. With V = 50,000, token_nll takes
1.15 times the time of the matrix product alone. A GPU needs large chunks to be fully used."""


def token_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of each target under softmax(x W^T).

    The logits are computed in the type of autocast if autocast is on, otherwise in the type of the inputs. The softmax
    is computed in float32. The tokens are processed in chunks of LOGITS_PER_CHUNK logits, so that the logits of all
    tokens are never stored at the same time. This holds only without gradients (torch.no_grad or inference_mode),
    because the backward pass would need all logits.

    Args:
        x_TD: features [T, D].
        weight_VD: weights of the output layer, W, [V, D].
        target_T: the target word of each token, int64 [T].
        ignore_index: tokens with this target (padding) get the value 0.

    Returns:
        float32 [T], in nats.
    """
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        # Convert here and not in autocast, which may convert the weights again for every chunk.
        x_TD, weight_VD = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x_TD, weight_VD))
    length = max(1, LOGITS_PER_CHUNK.get(device, LOGITS_PER_CHUNK["cpu"]) // len(weight_VD))
    nll = [
        F.cross_entropy(F.linear(x, weight_VD).float(), target, ignore_index=ignore_index, reduction="none")
        for x, target in zip(x_TD.split(length), target_T.split(length), strict=True)
    ]
    return torch.cat(nll)
