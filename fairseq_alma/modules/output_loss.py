"""Cross entropy over a large vocabulary, without storing the logits of all tokens at the same time."""

from typing import Any

import torch
from torch import Tensor

# Dimensions: T tokens, D model width, V words in the vocabulary, n tokens of one chunk.

TOKENS_PER_CHUNK = 1024
"""Number of tokens whose logits are stored at the same time, in the type in which the matrix products compute. With
V = 50k this is 100 MB in bfloat16. Larger chunks are at most 5% faster on a CPU; smaller ones add the gradient of the
weights more often: 256 tokens are 1.2 times slower (one thread, T = 4096, D = 512, bfloat16)."""
FLOAT32_TOKENS = {"cpu": 64}
"""Number of tokens whose logits are stored in float32 at the same time, by type of device; TOKENS_PER_CHUNK elsewhere.
On a CPU, the float32 logits of 64 tokens stay in the cache: 1024 tokens are 1.14 times slower. On a GPU, small parts
would only add kernels."""


def summed_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of the targets under softmax(x W^T), summed over tokens.

    The matrix products compute in the type of autocast if it is on, and otherwise in the type of x. Everything else
    is float32: log-softmax, the sum, and the sum of the weights' gradients over chunks. The gradients are computed in
    the forward pass, while the logits of a chunk are at hand. So a second derivative is not available.

    In float32, this takes two thirds of the time of torch's linear_cross_entropy on a CPU with V = 50k. In bfloat16,
    linear_cross_entropy would round the sum to bfloat16, which is an error of half a percent.

    Args:
        x_TD: features [T, D].
        weight_VD: weights of the output layer, W, [V, D].
        target_T: the target word of each token, int64 [T].
        ignore_index: tokens with this target (padding) do not count.

    Returns:
        A float32 scalar, in nats.
    """
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad):
        return _SummedNll.apply(x_TD, weight_VD, target_T, ignore_index, _compute_type(x_TD))
    return token_nll(x_TD, weight_VD, target_T, ignore_index).sum()


@torch.no_grad()
def token_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of each target in nats, without a gradient. float32 [T].

    Args:
        x_TD, weight_VD, target_T: see summed_nll.
        ignore_index: tokens with this target (padding) get 0.
    """
    dtype = _compute_type(x_TD)
    x_TD, weight_VD = x_TD.to(dtype), weight_VD.to(dtype)
    chunks = zip(x_TD.split(TOKENS_PER_CHUNK), target_T.split(TOKENS_PER_CHUNK), strict=True)
    return torch.cat([_nll(x_nD @ weight_VD.t(), target_n, ignore_index) for x_nD, target_n in chunks])


class _SummedNll(torch.autograd.Function):
    """summed_nll with gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the sum and store the gradients. `dtype` is the type of the matrix products."""
        ctx.dtypes = x_TD.dtype, weight_VD.dtype
        x_TD, w_VD = x_TD.to(dtype), weight_VD.to(dtype)
        grad_x_TD = torch.empty_like(x_TD)
        grad_w_VD = torch.zeros_like(w_VD, dtype=torch.float32)
        total = torch.zeros((), device=x_TD.device)
        chunks = (t.split(TOKENS_PER_CHUNK) for t in (x_TD, target_T, grad_x_TD))
        for x_nD, target_n, grad_x_nD in zip(*chunks, strict=True):
            logits_nV = x_nD @ w_VD.t()
            total += _nll(logits_nV, target_n, ignore_index, overwrite_by_gradient=True).sum()
            is_padding_n1 = (target_n == ignore_index).unsqueeze(1)
            torch.mm(logits_nV, w_VD, out=grad_x_nD).masked_fill_(is_padding_n1, 0)
            grad_w_VD += logits_nV.t() @ x_nD.masked_fill(is_padding_n1, 0)
        ctx.save_for_backward(grad_x_TD, grad_w_VD)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the stored gradients times `grad`."""
        grad_x_TD, grad_w_VD = ctx.saved_tensors
        dtype_x, dtype_w = ctx.dtypes
        return (grad_x_TD * grad).to(dtype_x), (grad_w_VD * grad).to(dtype_w), None, None, None


def _nll(logits_nV: Tensor, target_n: Tensor, ignore_index: int, overwrite_by_gradient: bool = False) -> Tensor:
    """Return the negative log-likelihood of each target, 0 for padding. float32 [n].

    Args:
        logits_nV: logits [n, V].
        target_n: the target words, int64 [n].
        ignore_index: the target that marks padding.
        overwrite_by_gradient: whether to replace the logits by the gradient of each token's negative log-likelihood
            with respect to its logits. The rows of padding get values without a meaning.
    """
    size = FLOAT32_TOKENS.get(logits_nV.device.type, TOKENS_PER_CHUNK)
    is_padding_n = target_n == ignore_index
    index_n1 = target_n.masked_fill(is_padding_n, 0).unsqueeze(1)  # ignore_index need not be a word
    parts = []
    for logits, index in zip(logits_nV.split(size), index_n1.split(size), strict=True):
        values = logits.log_softmax(-1, dtype=torch.float32)
        parts.append(-values.gather(1, index).squeeze(1))
        if overwrite_by_gradient:
            values.exp_().scatter_add_(1, index, values.new_full(index.shape, -1.0))
            logits.copy_(values)
    return torch.cat(parts).masked_fill_(is_padding_n, 0)


def _compute_type(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product of `x` computes."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
