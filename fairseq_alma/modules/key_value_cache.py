"""The keys and values of tokens that a decoder has processed, so that generation computes each token once."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Dimensions: B sequences, H attention heads, L new tokens, S tokens so far (the new ones too), C width of a head.

FIRST_CAPACITY = 64
"""Smallest number of tokens for which memory is allocated."""


class LayerCache:
    """The keys and values of one layer.

    The memory doubles when it is full. So each value is copied about once, however many tokens follow one another.
    """

    def __init__(self) -> None:
        self._length = 0
        self._stored = torch.empty(0, 2, 0, 0, 0)
        """Keys and values, [B, 2, H, capacity, C]."""

    def extend(self, new: Tensor) -> Tensor:
        """Add the keys and values of new tokens, [B, 2, H, L, C]. Return those of all tokens, [B, 2, H, S, C]."""
        start = self._make_room(new)
        known = self._stored.narrow(3, 0, self._length)
        known.narrow(3, start, new.size(3)).copy_(new)
        return known

    def extend_array(self, new: np.ndarray) -> np.ndarray:
        """Like `extend`, for arrays on a CPU. The tensors of `extend` and these arrays have the same memory."""
        start = self._make_room(torch.from_numpy(new))
        known = self._stored.numpy()[:, :, :, : self._length]
        known[:, :, :, start:] = new
        return known

    def _make_room(self, new: Tensor) -> int:
        """Count new tokens, and allocate memory if there is too little for them. Return where they begin."""
        start, self._length = self._length, self._length + new.size(3)
        if self._length > self._stored.size(3):
            larger = new.new_empty(*new.shape[:3], max(FIRST_CAPACITY, 2 * self._length), new.size(4))
            if start:
                larger[:, :, :, :start] = self._stored[:, :, :, :start]
            self._stored = larger
        return start

    def select(self, order: Tensor) -> None:
        """Replace the sequences by those with the indices `order`, int64 [B']."""
        self._stored = self._stored.index_select(0, order)


class KeyValueCache:
    """The cache of a decoder: a LayerCache for each layer, and which of the tokens are padding.

    Args:
        num_layers: number of layers.
    """

    def __init__(self, num_layers: int):
        self.layers = [LayerCache() for _ in range(num_layers)]
        self.length = 0
        """Number of tokens of each sequence so far, padding included, S."""
        self.step: Any = None
        """What the decoder has prepared to compute single tokens (see `NumpyStep`)."""
        self._num_sequences = 0
        self._is_token: Tensor | None = None
        """False for padding, bool [B, S]; None if there is no padding."""

    def extend(self, num_sequences: int, num_tokens: int, token_mask: Tensor | None) -> Tensor | None:
        """Count L new tokens of each of B sequences. Return which of all tokens are not padding, bool [B, S], or None.

        Args:
            num_sequences: number of sequences, B.
            num_tokens: number of new tokens, L.
            token_mask: False for padding among the new tokens, bool [B, L]; None if there is none.
        """
        if token_mask is not None and self._is_token is None:
            self._is_token = token_mask.new_ones(num_sequences, self.length)
        if self._is_token is not None:
            new = self._is_token.new_ones(num_sequences, num_tokens) if token_mask is None else token_mask
            self._is_token = torch.cat([self._is_token, new], dim=1)
        self._num_sequences = num_sequences
        self.length += num_tokens
        return self._is_token

    def select(self, order: Tensor) -> None:
        """Replace the sequences by those with the indices `order`, int64 [B']."""
        # Greedy search gives the same order after each token. Then copy nothing.
        if len(order) == self._num_sequences and torch.equal(order, torch.arange(len(order), device=order.device)):
            return
        self._num_sequences = len(order)
        if self._is_token is not None:
            self._is_token = self._is_token.index_select(0, order)
        for layer in self.layers:
            layer.select(order)
