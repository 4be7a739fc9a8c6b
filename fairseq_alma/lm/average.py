"""Average the weights of a language model over updates (`fairseq_alma.core.averaging`).

A checkpoint of the trained model carries the average in `extra_state`, under the key AVERAGE, so that a training that
continues from the checkpoint continues the average, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_alma.core.averaging import AverageWeights


class Average:
    """The average of a model's weights.

    Args:
        model: the model in training.
        average_weights: the weights of the average.
        entry: the entry AVERAGE of the checkpoint from which the training continues; None to begin a new average. An
            average of another shape, from before a growth, is not continued.
    """

    def __init__(self, model: nn.Module, average_weights: AverageWeights, entry: Mapping[str, Any] | None):
        self._average_weights = average_weights
        self._weights = dict(model.named_parameters())
        # A tied weight has several names in a checkpoint, and only one in `_weights`.
        first = {id(weight): name for name, weight in self._weights.items()}
        self._names = {name: first[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False)}
        entry = entry if entry is not None and _fits(entry["model"], self._weights) else None
        self._count: int = entry["count"] if entry else 0
        self._average = {
            name: (entry["model"][name].to(weight.device, copy=True) if entry else weight.detach().clone())
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def add(self) -> None:
        """Add the current weights to the average."""
        self._count += 1
        names = list(self._weights)
        torch._foreach_lerp_(
            [self._average[name] for name in names],
            [self._weights[name].detach() for name in names],
            self._average_weights.weight_of_newest(self._count),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """Give the model the averaged weights within the `with` block, for example to validate them."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            weight.data, self._average[name] = self._average[name], weight.data

    def entry(self) -> dict[str, Any]:
        """Return the entry AVERAGE of a checkpoint."""
        model = {name: self._average[first].cpu() for name, first in self._names.items()}
        return {"count": self._count, "model": model}


def _fits(average: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Return True if an average has all weights of a model, with the same shapes."""
    return all(name in average and average[name].shape == weight.shape for name, weight in weights.items())
