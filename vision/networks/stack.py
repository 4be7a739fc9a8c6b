"""What a stack of networks can do."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from vision.flops import Flops, count_flops
from vision.networks.parameters import Parameters


class Stack(ABC):
    """M networks of one shape. Its subclasses write `logits` and `backward`.

    Shapes: M networks, G groups of M / G networks that see the same examples, b examples, i inputs, C classes.
    """

    parameters: Parameters
    gradient: Parameters
    """Of the same shapes: what `backward` fills."""

    def __len__(self) -> int:
        """M."""
        return self.parameters.num_networks

    @property
    def num_params(self) -> int:
        """Of one network."""
        return self.parameters.size

    @property
    def num_experts(self) -> int | None:
        """In each mixture of a network; None where there is none."""
        return None

    @cached_property
    def flops(self) -> Flops:
        """Of one network: by torch's counter, unless a subclass knows the closed form."""
        return count_flops(self.plain(0), self.parameters.shapes["weight_1"][1])

    @abstractmethod
    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        """[M, b, C].

        Args:
            x: examples, [M, b, i] or [G, b, i].
            training: keep what `backward` needs.
        """

    @abstractmethod
    def backward(self, d_logits_MbC: Tensor) -> None:
        """Fill `gradient` from the gradient with respect to the last training logits."""

    @abstractmethod
    def state(self) -> dict:
        """Plain values and tensors on the CPU, for a file."""

    @abstractmethod
    def draw(self, generators: Sequence[torch.Generator]) -> None:
        """All parameters anew, one generator a network; the structure stays."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict, device: torch.device) -> "Stack":
        """What `state` gave."""

    @abstractmethod
    def plain(self, network: int) -> nn.Module:
        """One network as a torch.nn.Module of its own: [b, i] to [b, C]."""
