"""The layers of a switch_lm model for one new token of each sequence, in NumPy, on a CPU.

In a small model, most of the time of a token is spent in calls of torch and not in arithmetic. Calls of NumPy take a
third of the time.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_alma.modules.key_value_cache import LayerCache

# Dimensions: B sequences, S tokens so far (the new one too), H attention heads, C width of a head, D model width.

Arrays = tuple[np.ndarray, ...]


class NumpyStep:
    """Computes the features of one new token of each sequence, as `SwitchDecoder` does in evaluation in float32.

    The arrays have the memory of the weights, so they change with them. Only for mixtures whose router is flat, and of
    which this process has all experts.

    Args:
        layers: the layers of the decoder, of the class SwitchDecoderLayer.
        norm: its final layer norm.
    """

    def __init__(self, layers: Iterable[nn.Module], norm: nn.LayerNorm):
        self._layers = [_Layer(layer) for layer in layers]
        self._norm, self._eps = _arrays(norm.weight, norm.bias), norm.eps

    def __call__(self, x: Tensor, attends: Tensor | None, caches: Sequence[LayerCache]) -> Tensor:
        """Return the features [B, 1, D] for the embeddings of the new tokens, [B, 1, D].

        Args:
            x: the embeddings.
            attends: the tokens to which the new ones attend, bool [B, 1, 1, S]; None: to all.
            caches: the keys and values of the tokens before, for each layer. Those of the new tokens are added.
        """
        x_BD = x.detach().numpy()[:, 0]
        mask = None if attends is None else attends.numpy()
        for layer, cache in zip(self._layers, caches, strict=True):
            x_BD = layer(x_BD, mask, cache)
        return torch.from_numpy(_normed(x_BD, self._norm, self._eps)[:, np.newaxis])


class _Layer:
    """One layer. See `SwitchDecoderLayer`."""

    def __init__(self, layer: Any):
        attention, mixture = layer.self_attn, layer.mixture
        norms = (layer.self_attn_layer_norm, layer.final_layer_norm)
        self._norms, self._eps = [_arrays(norm.weight, norm.bias) for norm in norms], norms[0].eps
        self._num_heads = attention.num_heads
        self._qkv, self._out = (_arrays(one.weight, one.bias) for one in (attention.qkv_proj, attention.out_proj))
        self._router: np.ndarray | None = None
        if mixture is None:
            stacked = _arrays(*(one[None] for part in (layer.fc1, layer.fc2) for one in (part.weight, part.bias)))
        else:
            stacked = _arrays(mixture.fc1_weight, mixture.fc1_bias, mixture.fc2_weight, mixture.fc2_bias)
            (self._router,) = _arrays(mixture.router.weight)
        self._experts = list(zip(*stacked, strict=True))

    def __call__(self, x_BD: np.ndarray, mask: np.ndarray | None, cache: LayerCache) -> np.ndarray:
        x_BD = x_BD + self._attended(_normed(x_BD, self._norms[0], self._eps), mask, cache)
        h_BD = _normed(x_BD, self._norms[1], self._eps)
        if self._router is None:
            return x_BD + _fed_forward(h_BD, self._experts[0])
        logits_BE = h_BD @ self._router.T
        expert_B = logits_BE.argmax(1)
        probability_B1 = _softmax(logits_BE).max(1, keepdims=True)
        if len(x_BD) == 1:
            return x_BD + probability_B1 * _fed_forward(h_BD, self._experts[expert_B[0]])
        y_BD = np.empty_like(h_BD)
        for expert in np.unique(expert_B):
            y_BD[expert_B == expert] = _fed_forward(h_BD[expert_B == expert], self._experts[expert])
        return x_BD + probability_B1 * y_BD

    def _attended(self, x_BD: np.ndarray, mask: np.ndarray | None, cache: LayerCache) -> np.ndarray:
        """Return the output of the attention, [B, D]. See `CausalSelfAttention`."""
        num, dim = x_BD.shape
        qkv = _linear(x_BD, self._qkv).reshape(num, 3, self._num_heads, 1, -1)
        known = cache.extend_array(qkv[:, 1:])
        keys, values = known[:, 0], known[:, 1]  # [B, H, S, C]
        scores = qkv[:, 0] @ keys.swapaxes(2, 3)
        scores *= (dim // self._num_heads) ** -0.5
        if mask is not None:
            scores = np.where(mask, scores, np.float32(-np.inf))
        return _linear((_softmax(scores) @ values).reshape(num, dim), self._out)


def _arrays(*tensors: Tensor) -> Arrays:
    """Return arrays with the memory of the tensors."""
    return tuple(tensor.detach().numpy() for tensor in tensors)


def _normed(x_BD: np.ndarray, norm: Arrays, eps: float) -> np.ndarray:
    """Return the layer norm of each row."""
    weight, bias = norm
    # x.mean() would take longer than all of this.
    x_BD = x_BD - np.add.reduce(x_BD, 1, keepdims=True) / np.float32(x_BD.shape[1])
    variance_B1 = np.add.reduce(x_BD * x_BD, 1, keepdims=True) / np.float32(x_BD.shape[1])
    return x_BD * (weight / np.sqrt(variance_B1 + np.float32(eps))) + bias


def _linear(x_BD: np.ndarray, layer: Arrays) -> np.ndarray:
    """Return the output of a linear layer, given by its weight and its bias."""
    weight, bias = layer
    return x_BD @ weight.T + bias


def _fed_forward(x_BD: np.ndarray, expert: Arrays) -> np.ndarray:
    """Return the output of a feed-forward network, given by the weights and the biases of its two layers."""
    return _linear(np.maximum(_linear(x_BD, expert[:2]), 0), expert[2:])


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over the last dimension."""
    p = np.exp(scores - np.maximum.reduce(scores, -1, keepdims=True))
    p /= np.add.reduce(p, -1, keepdims=True)
    return p
