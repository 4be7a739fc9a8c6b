"""The parameters of M networks of one shape, stored in one flat tensor."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


class Parameters:
    """Named tensors of M networks. Each tensor is a view of one flat tensor and has shape [M, *shape].

    The flat tensor contains one named tensor after the other, each with the values of network 0, network 1, and so on.
    So an optimizer can update all networks in a few operations, and the first layers of networks that read the same
    examples can be used as one matrix.

    Args:
        shapes: name -> shape of this tensor in one network.
        dtype: dtype of the tensors. None means torch's default dtype.
        alignment: the values of each network in each tensor begin at a multiple of this number of values. The gaps
            contain zeros. With more than 1, the tensors of the networks do not follow each other without gaps.
    """

    def __init__(
        self,
        shapes: Shapes,
        num_networks: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        alignment: int = 1,
    ):
        self.shapes = dict(shapes)
        self.num_networks = num_networks
        self.alignment = alignment
        sizes = {name: prod(shape) for name, shape in self.shapes.items()}
        stored = {name: -(-size // alignment) * alignment for name, size in sizes.items()}  # with the gap after it
        self.flat = torch.zeros(num_networks * sum(stored.values()), device=device, dtype=dtype)
        parts = self.flat.split([num_networks * size for size in stored.values()])
        self._tensors = {
            name: part.view(num_networks, stored[name])[:, : sizes[name]].view(num_networks, *self.shapes[name])
            for name, part in zip(stored, parts, strict=True)
        }

    @property
    def size(self) -> int:
        """Number of parameters of one network."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def device(self) -> torch.device:
        """Device on which the tensors are stored."""
        return self.flat.device

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor with this name, [M, *shape]. It is a view of the flat tensor."""
        return self._tensors[name]

    def zeros_like(self) -> "Parameters":
        """Return new `Parameters` with the same names, shapes, device and dtype, filled with zeros."""
        return Parameters(self.shapes, self.num_networks, self.device, self.flat.dtype, self.alignment)

    def copy(self) -> "Parameters":
        """Return a copy of these parameters that shares no memory with this object."""
        copy = self.zeros_like()
        copy.flat.copy_(self.flat)
        return copy

    def copy_networks(self, other: "Parameters", which_M: Tensor) -> None:
        """Copy the parameters of those networks for which `which_M` is True from `other`, which has the same shapes."""
        if bool(which_M.all()):
            self.flat.copy_(other.flat)
        else:
            for name, tensor in self._tensors.items():
                tensor[which_M] = other[name][which_M]

    def state(self) -> dict[str, Tensor]:
        """Return copies of all tensors on the CPU, by name."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors.items()}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], device: torch.device | str = "cpu", expected: Shapes | None = None
    ) -> "Parameters":
        """Return new `Parameters` with copies of the tensors that `state()` returned.

        Raise ValueError if they do not have the names and shapes `expected`.
        """
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in state.items()}
        if expected is not None and shapes != expected:
            raise ValueError("the sizes of the networks do not fit their tensors")
        num_networks = len(next(iter(state.values())))
        parameters = cls(shapes, num_networks, device)
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
        return parameters


def layer_shapes(sizes: Sequence[int], num_rows: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of linear layers. Layer n has the parameters weight_n and bias_n.

    Args:
        sizes: number of inputs of each layer.
        num_rows: number of rows of the weights of each layer.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (num_in, num_out) in enumerate(zip(sizes, num_rows, strict=False), start=1):
        shapes |= {f"weight_{layer}": (num_out, num_in), f"bias_{layer}": (num_out,)}
    return shapes


def draw_linear(num_out: int, num_in: int, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Return weights [M, out, in] and biases [M, out] for M networks, with the initialisation of torch.nn.Linear.

    Weights and biases are random and uniform between -1/sqrt(in) and 1/sqrt(in). There is one random generator per
    network, so a network gets the same numbers, whether it is initialised alone or together with others.
    """
    bound = num_in**-0.5
    rows_Moi = torch.stack([torch.rand(num_out, num_in + 1, generator=generator) for generator in generators])
    rows_Moi.mul_(2 * bound).sub_(bound)
    return rows_Moi[..., :num_in], rows_Moi[..., num_in]


def draw_layers(parameters: Parameters, generators: Sequence[torch.Generator]) -> None:
    """Initialise all linear layers in place, with `draw_linear`. Layer n has the parameters weight_n and bias_n."""
    for layer in range(1, len(parameters.shapes) // 2 + 1):
        num_out, num_in = parameters.shapes[f"weight_{layer}"]
        weight, bias = draw_linear(num_out, num_in, generators)
        parameters[f"weight_{layer}"].copy_(weight)
        parameters[f"bias_{layer}"].copy_(bias)
