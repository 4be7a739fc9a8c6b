"""The multilayer perceptron: two hidden layers of width h, ReLU (appendix B of the paper)."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from vision.flops import Flops, linear_flops
from vision.networks.linear import layers_of, through_relu
from vision.networks.parameters import Parameters, draw_layers
from vision.networks.stack import Stack


class MLPStack(Stack):
    """M perceptrons.

    Args:
        sizes: inputs, hidden widths, classes: (784, h, h, 10).
        parameters: of all layers: weight_1 [M, h, 784], bias_1 [M, h] ...
    """

    def __init__(self, sizes: Sequence[int], parameters: Parameters):
        self.sizes = tuple(sizes)
        self.parameters = parameters
        self.gradient = parameters.empty_like()
        self._layers = layers_of(parameters, self.gradient)
        self._is_single = parameters.num_networks == 1
        self._kept: list[Tensor] = []

    @classmethod
    def drawn(cls, sizes: Sequence[int], generators: Sequence[torch.Generator], device: torch.device) -> "MLPStack":
        """Initialised as torch.nn.Linear is, one generator a network."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(1, len(sizes)):
            shapes[f"weight_{layer}"] = (sizes[layer], sizes[layer - 1])
            shapes[f"bias_{layer}"] = (sizes[layer],)
        stack = cls(sizes, Parameters(shapes, len(generators), device))
        stack.draw(generators)
        return stack

    def draw(self, generators: Sequence[torch.Generator]) -> None:
        draw_layers(self.parameters, generators)

    @cached_property
    def flops(self) -> Flops:
        return linear_flops(list(pairwise(self.sizes)))

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        x = x[0] if self._is_single else x
        kept = [x]
        for layer in self._layers[:-1]:
            x = layer.forward(x).relu_()
            kept.append(x)
        if training:
            self._kept = kept
        y = self._layers[-1].forward(x)
        return y[None] if self._is_single else y

    def forget(self) -> None:
        self._kept = []

    def backward(self, d_logits_MbC: Tensor) -> None:
        dy = d_logits_MbC[0] if self._is_single else d_logits_MbC
        for number in range(len(self._layers) - 1, -1, -1):
            layer, x = self._layers[number], self._kept[number]
            layer.backward(x, dy)
            if number:
                dy = through_relu(layer.input_gradient(dy), x)

    def state(self) -> dict:
        return {"kind": "mlp", "sizes": list(self.sizes), "parameters": self.parameters.state()}

    @classmethod
    def from_state(cls, state: dict, device: torch.device) -> "MLPStack":
        return cls(state["sizes"], Parameters.from_state(state["parameters"], device))

    def plain(self, network: int) -> nn.Module:
        layers: list[nn.Module] = []
        for layer in range(1, len(self.sizes)):
            linear_layer = nn.Linear(self.sizes[layer - 1], self.sizes[layer])
            with torch.no_grad():
                linear_layer.weight.copy_(self.parameters[f"weight_{layer}"][network])
                linear_layer.bias.copy_(self.parameters[f"bias_{layer}"][network])
            layers += [linear_layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])
