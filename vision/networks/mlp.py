"""The multilayer perceptron (MLP). In the paper it has two hidden layers of width h with ReLU (appendix B)."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vision.flops import Flops, linear_flops
from vision.networks.linear import linear_layers, relu_backward
from vision.networks.modules import linear_module
from vision.networks.parameters import Parameters, draw_layers, layer_shapes
from vision.networks.stack import Stack


class MLPStack(Stack):
    """M multilayer perceptrons of equal sizes.

    Args:
        sizes: number of inputs, width of each hidden layer, number of classes, for example (784, h, h, 10).
        parameters: weight_1 [M, h, 784], bias_1 [M, h], and so on for each layer.
    """

    def __init__(self, sizes: Sequence[int], parameters: Parameters):
        self.sizes = tuple(sizes)
        self.parameters = parameters
        self.gradient = parameters.zeros_like()
        self._layers = linear_layers(parameters, self.gradient)
        self._is_single = parameters.num_networks == 1
        self._saved: list[Tensor] = []

    @classmethod
    def initialised(
        cls, sizes: Sequence[int], generators: Sequence[torch.Generator], device: torch.device
    ) -> "MLPStack":
        """Return untrained networks, one for each random generator, with the initialisation of torch.nn.Linear."""
        stack = cls(sizes, Parameters(layer_shapes(sizes, sizes[1:]), len(generators), device))
        stack.reset_parameters(generators)
        return stack

    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        draw_layers(self.parameters, generators)

    @cached_property
    def flops(self) -> Flops:
        return linear_flops(list(pairwise(self.sizes)))

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        x = x[0] if self._is_single else x
        saved = [x]
        for layer in self._layers[:-1]:
            x = layer.forward(x).relu_()
            saved.append(x)
        if training:
            self._saved = saved
        y = self._layers[-1].forward(x)
        return y[None] if self._is_single else y

    def backward(self, d_logits_MbC: Tensor) -> None:
        saved, self._saved = self._saved, []
        dy = d_logits_MbC[0] if self._is_single else d_logits_MbC
        for number in range(len(self._layers) - 1, -1, -1):
            layer, x = self._layers[number], saved[number]
            layer.backward(x, dy)
            if number:
                dy = relu_backward(layer.input_gradient(dy), x)

    def state(self) -> dict[str, Any]:
        return {"kind": "mlp", "sizes": list(self.sizes), "parameters": self.parameters.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "MLPStack":
        sizes = state["sizes"]
        parameters = Parameters.from_state(state["parameters"], device, layer_shapes(sizes, sizes[1:]))
        return cls(sizes, parameters)

    def to_module(self, network: int) -> nn.Module:
        layers: list[nn.Module] = []
        for layer in range(1, len(self.sizes)):
            weight, bias = (self.parameters[f"{name}_{layer}"][network] for name in ("weight", "bias"))
            layers += [linear_module(weight, bias), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
