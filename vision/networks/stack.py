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

    Shapes: M networks, G groups of M / G networks that see the same examples, b examples, C classes. An example is i
    inputs, or an image of s x s pixels, channels last.
    """

    parameters: Parameters
    gradient: Parameters
    """Of the same shapes: what `backward` fills."""
    statistics: Parameters | None = None
    """What training gathers besides: running means and variances of normalised networks."""
    examples_at_once: int = 2000
    """In passes over data of any size: what bounds their memory."""

    def __len__(self) -> int:
        """M."""
        return self.parameters.num_networks

    def compute_in(self, dtype: torch.dtype) -> None:  # noqa: B027 (most stacks have nothing to do)
        """What costly products are computed in: float32, or bfloat16 where a stack knows how (those of the VGG)."""

    @property
    def tensors(self) -> list[Parameters]:
        """All that an epoch leaves behind."""
        return [self.parameters] if self.statistics is None else [self.parameters, self.statistics]

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
        return count_flops(self.plain(0), self.plain_input_shape)

    @property
    def plain_input_shape(self) -> tuple[int, ...]:
        """Of one example, as `plain` reads it."""
        return (self.parameters.shapes["weight_1"][1],)

    def logits_of_many(self, x: Tensor) -> Tensor:
        """[M, n, C] of any number of examples, in parts.

        Args:
            x: [M, n, ...] or [G, n, ...].
        """
        if x.shape[1] <= self.examples_at_once:
            return self.logits(x)
        return torch.cat([self.logits(part) for part in x.split(self.examples_at_once, dim=1)], dim=1)

    @abstractmethod
    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        """[M, b, C].

        Args:
            x: examples, [M, b, ...] or [G, b, ...].
            training: keep what `backward` needs.
        """

    @abstractmethod
    def forget(self) -> None:
        """Let go of what `backward` needed: a stack may be kept for long."""

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
        """One network as a torch.nn.Module of its own: [b, i], or images [b, channels, s, s], to [b, C]."""
