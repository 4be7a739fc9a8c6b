"""The parameters of M networks of one shape as one flat tensor."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


class Parameters:
    """Tensors by name, each [M, *shape], all views of one flat tensor.

    Tensor after tensor, and within a tensor network after network: an optimizer touches all of them in a few
    operations, and the first layers of networks that see the same examples are one matrix.

    Args:
        shapes: of each tensor of one network.
        num_networks: M.
        device: where they live.
        dtype: torch's default, if it is not given.
    """

    def __init__(
        self,
        shapes: Shapes,
        num_networks: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ):
        self.shapes = dict(shapes)
        self.num_networks = num_networks
        self.flat = torch.zeros(num_networks * self.size, device=device, dtype=dtype)
        self._tensors = self._views(self.flat)

    @property
    def size(self) -> int:
        """Parameters of one network."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def device(self) -> torch.device:
        return self.flat.device

    def __getitem__(self, name: str) -> Tensor:
        """[M, *shape], a view."""
        return self._tensors[name]

    def empty_like(self) -> "Parameters":
        """Zeros of the same shapes: for gradients."""
        return Parameters(self.shapes, self.num_networks, self.device, self.flat.dtype)

    def copy(self) -> "Parameters":
        copy = self.empty_like()
        copy.flat.copy_(self.flat)
        return copy

    def take(self, other: "Parameters", which_M: Tensor) -> None:
        """Become `other` where `which_M` says so.

        Args:
            other: of the same shapes.
            which_M: [M] of bool.
        """
        if bool(which_M.all()):
            self.flat.copy_(other.flat)
        else:
            for name, tensor in self._tensors.items():
                tensor[which_M] = other[name][which_M]

    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors on the CPU, for a file."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> "Parameters":
        """What `state` gave."""
        num_networks = len(next(iter(state.values())))
        parameters = cls({name: tuple(tensor.shape[1:]) for name, tensor in state.items()}, num_networks, device)
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
        return parameters

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + self.num_networks * prod(shape)
            views[name] = flat[start:end].view(self.num_networks, *shape)
            start = end
        return views


def draw_linear(num_out: int, num_in: int, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Weights [M, out, in] and biases [M, out] as torch.nn.Linear draws them: uniform in +-1/sqrt(in).

    Args:
        num_out: outputs.
        num_in: inputs.
        generators: one a network, so that it draws the same alone and in a stack.
    """
    bound = num_in**-0.5
    rows_Moi = torch.stack([torch.rand(num_out, num_in + 1, generator=generator) for generator in generators])
    rows_Moi.mul_(2 * bound).sub_(bound)
    return rows_Moi[..., :num_in], rows_Moi[..., num_in]


def draw_layers(parameters: Parameters, generators: Sequence[torch.Generator]) -> None:
    """Fill weight_1, bias_1, weight_2, bias_2 ... as `draw_linear`."""
    for layer in range(1, len(parameters.shapes) // 2 + 1):
        num_out, num_in = parameters.shapes[f"weight_{layer}"]
        weight, bias = draw_linear(num_out, num_in, generators)
        parameters[f"weight_{layer}"].copy_(weight)
        parameters[f"bias_{layer}"].copy_(bias)
