"""Cross entropy over a large vocabulary, without storing the logits of all tokens at the same time."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.modules.precision import compute_type

# Dimensions: T tokens, D model width, V words in the vocabulary, n tokens of one chunk.

TOKENS_PER_CHUNK = {"cpu": 1024, "cuda": 4096}
"""Device type -> number of tokens in a chunk. The logits of one chunk are stored at a time.

With V = 50,000 and bfloat16, the logits of 1024 tokens need 100 MB. The gradient of the weights is read and written
once for each chunk, so small chunks are slower. On a CPU, chunks of 256 tokens take 1.2 times the time of chunks of
1024 tokens, and chunks of 4096 tokens take 5% less time. A GPU needs larger chunks than a CPU, because its arithmetic
is faster in relation to its memory. With chunks of 4096 tokens on an H100, reading and writing the gradient costs an
estimated 7% of the time."""

LOGITS_PER_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Device type -> number of logits that are stored in float32 at a time: 4 MiB of float32 on a CPU, 1 GiB on a GPU.

On a CPU, such a chunk stays in the cache during the softmax: with V = 4000, token_nll takes half the time that it takes
with chunks of 32 MiB. A GPU needs large chunks to be fully used."""


def summed_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int, compiled: bool = False) -> Tensor:
    """Return the negative log-likelihood of the targets under softmax(x W^T), summed over tokens.

    The matrix products are computed in the dtype of autocast if it is on, otherwise in the dtype of x. Everything else
    is float32: log-softmax, the sum, and the sum of the weights' gradients over chunks. The gradients are computed in
    the forward pass, because the logits of a chunk are in memory only then. So a second derivative is not available.

    In float32, this takes two thirds of the time of torch's linear_cross_entropy on a CPU with V = 50k. In bfloat16,
    linear_cross_entropy would round the sum to bfloat16, which is an error of half a percent.

    Args:
        x_TD: features [T, D].
        weight_VD: weights of the output layer, W, [V, D].
        target_T: the target word of each token, int64 [T].
        ignore_index: tokens with this target (padding) do not count.
        compiled: whether the softmax and its gradient are compiled by `torch.compile`: they then read and write the
            logits of a chunk fewer times, and need no copy of them in float32.

    Returns:
        A float32 scalar, in nats.
    """
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad):
        return _SummedNll.apply(x_TD, weight_VD, target_T, ignore_index, compute_type(x_TD), compiled)
    return token_nll(x_TD, weight_VD, target_T, ignore_index).sum()


def token_nll(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of each target under softmax(x W^T), float32 [T], in nats; 0 for padding.

    For the types and the arguments, see `summed_nll`. The logits of all tokens are never stored at the same time. This
    holds only without gradients (torch.no_grad or inference_mode), because the backward pass would need all logits.
    """
    # Convert the tensors once here, because autocast may convert the weights again for every chunk.
    x_TD, weight_VD = (tensor.to(compute_type(x_TD)) for tensor in (x_TD, weight_VD))
    length = _tokens_in_float32(x_TD.device.type, len(weight_VD))
    parts = []
    for x_nD, target_n in zip(*_chunks(x_TD, target_T), strict=True):
        logits_nV = F.linear(x_nD, weight_VD)
        for logits, target in zip(logits_nV.split(length), target_n.split(length), strict=True):
            parts.append(F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none"))
    return torch.cat(parts)


class _SummedNll(torch.autograd.Function):
    """Compute the summed negative log-likelihood and its gradients (see summed_nll)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
        compiled: bool,
    ) -> Tensor:
        """Return the summed negative log-likelihood and store its gradients. The matrix products use `dtype`."""
        ctx.dtypes = x_TD.dtype, weight_VD.dtype
        x_TD, w_VD = x_TD.to(dtype), weight_VD.to(dtype)
        grad_x_TD = torch.empty_like(x_TD)
        grad_w_VD = torch.zeros_like(w_VD, dtype=torch.float32)
        total = torch.zeros((), device=x_TD.device)
        for x_nD, target_n, grad_x_nD in zip(*_chunks(x_TD, target_T, grad_x_TD), strict=True):
            logits_nV = x_nD @ w_VD.t()
            total += _nll_then_gradient(logits_nV, target_n, ignore_index, compiled).sum()
            is_padding_n1 = (target_n == ignore_index).unsqueeze(1)
            torch.mm(logits_nV, w_VD, out=grad_x_nD).masked_fill_(is_padding_n1, 0)
            grad_w_VD += logits_nV.t() @ x_nD.masked_fill(is_padding_n1, 0)
        ctx.save_for_backward(grad_x_TD, grad_w_VD)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients times `grad`."""
        grad_x_TD, grad_w_VD = ctx.saved_tensors
        dtype_x, dtype_w = ctx.dtypes
        return (grad_x_TD * grad).to(dtype_x), (grad_w_VD * grad).to(dtype_w), None, None, None, None


def _nll_then_gradient(logits_nV: Tensor, target_n: Tensor, ignore_index: int, compiled: bool) -> Tensor:
    """Return the negative log-likelihood of each target, float32 [n], in nats; 0 for padding (`ignore_index`).

    The logits [n, V] are overwritten by the gradient with respect to them; rows of padding get values without a
    meaning. Only LOGITS_PER_CHUNK logits at a time are stored in float32.
    """
    length = _tokens_in_float32(logits_nV.device.type, logits_nV.size(1))
    is_padding_n = target_n == ignore_index
    # Replace ignore_index by 0, because `gather` needs valid word indices and ignore_index can be a number like -100.
    index_n = target_n.masked_fill(is_padding_n, 0)
    step = _compiled_step() if compiled else _softmax_step
    parts = [step(*part) for part in zip(logits_nV.split(length), index_n.split(length), strict=True)]
    return torch.cat(parts).masked_fill_(is_padding_n, 0)


def _softmax_step(logits_nV: Tensor, index_n: Tensor) -> Tensor:
    """Return the negative log-likelihood of the words `index_n`, float32 [n], and overwrite the logits as above."""
    values_nV = logits_nV.log_softmax(-1, dtype=torch.float32)
    log_likelihood_n = values_nV.gather(1, index_n.unsqueeze(1)).squeeze(1)
    logits_nV.copy_(values_nV.exp_())
    # On a CPU, scatter_ needs a hundred times as long for numbers in bfloat16.
    rows_n = torch.arange(len(index_n), device=index_n.device)
    logits_nV[rows_n, index_n] = (log_likelihood_n.exp() - 1).to(logits_nV.dtype)
    return -log_likelihood_n


@cache
def _compiled_step() -> Callable[[Tensor, Tensor], Tensor]:
    """Return `_softmax_step`, compiled. torch.compile imports the compiler, which takes a second."""
    return torch.compile(_softmax_step)


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors, each with T tokens in its first dimension, into chunks of TOKENS_PER_CHUNK tokens."""
    length = TOKENS_PER_CHUNK.get(tensors[0].device.type, TOKENS_PER_CHUNK["cpu"])
    return [tensor.split(length) for tensor in tensors]


def _tokens_in_float32(device_type: str, num_words: int) -> int:
    """Return the number of tokens whose logits are stored in float32 at a time."""
    return max(1, LOGITS_PER_CHUNK.get(device_type, LOGITS_PER_CHUNK["cpu"]) // num_words)
