"""The interface of all stacks of networks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vision.flops import Flops, count_flops
from vision.networks.parameters import Parameters


class Stack(ABC):
    """M networks of one shape. Subclasses implement `logits` and `backward`.

    Shapes: M networks, G groups of M / G networks that read the same examples, b examples of a batch, n examples of
    any number, C classes. An example is a vector of i inputs, or an image of s x s pixels, channels last.
    """

    parameters: Parameters
    """The trained parameters."""
    gradient: Parameters
    """Gradients of the parameters, of the same shapes. `backward` fills them."""
    statistics: Parameters | None = None
    """Running means and variances of networks with batch normalisation, which training updates too."""
    examples_at_once: int = 2000
    """The largest number of examples in one pass of `logits_of_many`. It bounds the memory of a pass."""

    def __len__(self) -> int:
        """Return M, the number of networks."""
        return self.parameters.num_networks

    def set_compute_dtype(self, dtype: torch.dtype) -> None:  # noqa: B027 (most stacks have nothing to set)
        """Set the dtype in which convolutions are computed: float32 or bfloat16. Perceptrons ignore it."""

    @property
    def tensors(self) -> list[Parameters]:
        """Everything that training changes: the parameters and the statistics."""
        return [self.parameters] if self.statistics is None else [self.parameters, self.statistics]

    @property
    def num_params(self) -> int:
        """The number of parameters of one network."""
        return self.parameters.size

    @property
    def num_experts(self) -> int | None:
        """The number of experts in each mixture of a network, or None for networks without mixtures."""
        return None

    @cached_property
    def flops(self) -> Flops:
        """FLOPs of one network, by torch's counter unless a subclass has a closed form."""
        return count_flops(self.to_module(0), self.module_input_shape)

    @property
    def module_input_shape(self) -> tuple[int, ...]:
        """The shape of one example as the modules of `to_module` read it."""
        return (self.parameters.shapes["weight_1"][1],)

    def logits_of_many(self, x: Tensor) -> Tensor:
        """Return the logits of any number of examples, [M, n, C], computed in parts.

        Args:
            x: [M, n, ...] or [G, n, ...].
        """
        if x.shape[1] <= self.examples_at_once:
            return self.logits(x)
        return torch.cat([self.logits(part) for part in x.split(self.examples_at_once, dim=1)], dim=1)

    @abstractmethod
    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        """Return the logits of a batch, [M, b, C].

        Args:
            x: examples, [M, b, ...] or [G, b, ...].
            training: if True, compute in training mode and save the activations that `backward` needs.
        """

    @abstractmethod
    def backward(self, d_logits_MbC: Tensor) -> None:
        """Fill `gradient`.

        Args:
            d_logits_MbC: the gradient with respect to the logits of the last call with `training=True`.
        """

    @abstractmethod
    def free_activations(self) -> None:
        """Free the activations saved for `backward`. Call it after training, because stacks are kept for long."""

    @abstractmethod
    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        """Initialise all parameters again, in place.

        Args:
            generators: one per network.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything that a file needs: Python values, and copies of all tensors on the CPU."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "Stack":
        """Return the stack whose `state` this is."""

    @abstractmethod
    def to_module(self, network: int) -> nn.Module:
        """Return one network as a torch.nn.Module with copies of its parameters.

        The module maps [b, i], or images [b, channels, s, s], to logits [b, C].

        Args:
            network: its index in the stack.
        """
