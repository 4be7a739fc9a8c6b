"""The interface of all stacks of networks. A stack is a set of M networks that are computed together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vision.flops import Flops, count_flops
from vision.networks.parameters import Parameters

LossGradient = Callable[[Tensor, Tensor], Tensor]


class Stack(ABC):
    """M networks of one shape that are computed together.

    Shapes: M networks in G groups, b examples of one batch, n examples (any number), C classes. The M / G networks of a
    group read the same examples. An example is a vector of i inputs, or an image of s x s pixels with channels last.
    """

    parameters: Parameters
    """Parameters of all networks, which the optimizer trains."""
    gradient: Parameters
    """Gradients with respect to `parameters`, with the same names and shapes. `backward` writes them."""
    statistics: Parameters | None = None
    """Running means and variances of batch normalisation. They are updated during training. None if the networks have
    no batch normalisation."""
    examples_at_once: int = 2000
    """Largest number of examples in one forward pass of `logits_of_many`. It limits the memory of the pass."""

    def __len__(self) -> int:
        """Return M, the number of networks."""
        return self.parameters.num_networks

    def set_compute_dtype(self, dtype: torch.dtype) -> None:  # noqa: B027 (most stacks have nothing to set)
        """Set the dtype of the convolutions: float32 or bfloat16. Networks without convolutions do not change."""

    @property
    def tensors(self) -> list[Parameters]:
        """All tensors that training changes: the parameters and the running statistics of batch normalisation."""
        return [self.parameters] if self.statistics is None else [self.parameters, self.statistics]

    @property
    def num_params(self) -> int:
        """Number of parameters of one network."""
        return self.parameters.size

    @property
    def num_experts(self) -> int | None:
        """Number of experts in each mixture of a network, or None for networks without mixtures."""
        return None

    @cached_property
    def flops(self) -> Flops:
        """FLOPs of one network for one example, by default counted by torch's FLOP counter."""
        return count_flops(self.to_module(0), self.module_input_shape)

    @property
    def module_input_shape(self) -> tuple[int, ...]:
        """Shape of one example for the modules that `to_module` returns."""
        return (self.parameters.shapes["weight_1"][1],)

    def logits_of_many(self, x: Tensor) -> Tensor:
        """Return the logits of any number of examples, [M, n, C], in several forward passes if they are many.

        The examples are [M, n, ...], or [G, n, ...] if the networks of a group read the same.
        """
        return self.logits_of_parts([x] if x.shape[1] <= self.examples_at_once else x.split(self.examples_at_once, 1))

    def logits_of_parts(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the logits of several parts of examples, [M, n, C]. Each part is one forward pass.

        The parts are read one after another, so that they need not all be in memory.
        """
        logits = [self.logits(part) for part in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)

    @abstractmethod
    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        """Return the logits of a batch, [M, b, C].

        Args:
            x: examples, [M, b, ...], or [G, b, ...] if the networks of a group read the same examples.
            training: if True, compute in training mode and save the activations that `backward` needs.
        """

    def recompute_statistics(self, batches: Iterable[Tensor]) -> int:
        """Compute the running statistics of batch normalisation anew, as means over batches of examples.

        Return the number of examples that each network has processed. Without batch normalisation, nothing is computed.
        """
        return 0

    @abstractmethod
    def backward(self, d_logits_MbC: Tensor) -> None:
        """Compute the gradients of the parameters and write them to `gradient`. The saved activations are freed.

        `d_logits_MbC` is the gradient with respect to the logits that the last call with `training=True` returned.
        """

    def compute_gradient(self, x: Tensor, one_hot_UbC: Tensor, loss: LossGradient, unit: int) -> None:
        """Do a forward pass and a backward pass of a training batch, and write the gradients to `gradient`.

        Args:
            x: examples, as for `logits`.
            one_hot_UbC: classes of the examples, as one-hot vectors, for each of the U units of the loss.
            loss: function of logits and `one_hot_UbC` that returns the gradient with respect to the logits.
            unit: number of networks that are trained as one model, which is called a unit.
        """
        self.backward(loss(self.logits(x, training=True), one_hot_UbC))

    @abstractmethod
    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        """Initialise all parameters again, in place, with one random generator per network."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return a dictionary from which `from_state` restores the stack. The tensors in it are copies on the CPU."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "Stack":
        """Return a new stack with the state that `state()` returned."""

    @abstractmethod
    def to_module(self, network: int) -> nn.Module:
        """Return the network with this index as a torch.nn.Module with copies of its parameters.

        The module maps vectors [b, i] or images [b, channels, s, s] to logits [b, C].
        """
