"""The perceptron whose two hidden layers are mixtures of experts, and its growth."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from vision.flops import Flops, linear_flops
from vision.networks.gated import GatedStack
from vision.networks.gates import Gates
from vision.networks.linear import layers_of, through_relu
from vision.networks.parameters import Parameters, draw_layers, draw_linear
from vision.networks.plain import PlainMixture, PlainMixtureLayer, linear_of, set_nodes


class MixtureStack(GatedStack):
    """M perceptrons with mixtures. An expert is a linear layer and ReLU; a layer gives its experts' weighted sum.

    A layer's parameters are one matrix: the rows of its experts, h each, then those of its gates, one a branch.

    Shapes: M networks, b examples, i inputs, h width, E experts, K branches of gates, C classes.

    Args:
        sizes: inputs, hidden widths, classes.
        gates: one for each hidden layer.
        parameters: of all layers.
    """

    def __init__(self, sizes: Sequence[int], gates: Sequence[Gates], parameters: Parameters):
        self.sizes = tuple(sizes)
        self.gates = list(gates)
        self.parameters = parameters
        self.gradient = parameters.empty_like()
        self.expert_weights: list[Tensor] = []
        self._layers = layers_of(parameters, self.gradient)
        self._kept: list[tuple[Tensor, ...]] = []

    @classmethod
    def drawn(
        cls,
        sizes: Sequence[int],
        num_experts: int,
        hard: bool,
        generators: Sequence[torch.Generator],
        device: torch.device,
    ) -> "MixtureStack":
        """With `num_experts` in each hidden layer, under one root; experts and gates drawn as torch.nn.Linear is."""
        root = num_experts if num_experts > 1 else 0
        gates = [Gates(root, [[] for _ in generators], hard, device) for _ in sizes[1:-1]]
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(1, len(sizes)):
            num_rows = num_experts * sizes[layer] + root if layer < len(sizes) - 1 else sizes[layer]
            shapes[f"weight_{layer}"], shapes[f"bias_{layer}"] = (num_rows, sizes[layer - 1]), (num_rows,)
        stack = cls(sizes, gates, Parameters(shapes, len(generators), device))
        stack.draw(generators)
        return stack

    def draw(self, generators: Sequence[torch.Generator]) -> None:
        draw_layers(self.parameters, generators)

    @cached_property
    def flops(self) -> Flops:
        widths = list(zip(self.gates, self.sizes, self.sizes[1:], strict=False))
        layers = [(num_in, gates.num_experts * width + gates.num_branches) for gates, num_in, width in widths]
        unused = sum(2 * num_in * (gates.num_experts - 1) * width for gates, num_in, width in widths if gates.hard)
        return linear_flops([*layers, (self.sizes[-2], self.sizes[-1])], unused)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        kept, self.expert_weights = [], []
        for gates, layer, width in zip(self.gates, self._layers, self.sizes[1:], strict=False):
            num_rows = gates.num_experts * width
            y = self._of_all(layer.forward(self._of_one(x)))
            out_MbEh = y[..., :num_rows].clamp_min(0).unflatten(-1, (gates.num_experts, width))
            if gates.num_branches:
                weights_MbE = gates.weights(y[..., num_rows:], training)
                x_next = torch.einsum("mbe,mbeh->mbh", weights_MbE, out_MbEh)
            else:
                weights_MbE, x_next = y.new_ones(*y.shape[:2], 1), out_MbEh[:, :, 0]
            self.expert_weights.append(weights_MbE)
            kept.append((x, weights_MbE, out_MbEh))
            x = x_next
        if training:
            self._kept = [*kept, (x,)]
        return self._of_all(self._layers[-1].forward(self._of_one(x)))

    def forget(self) -> None:
        super().forget()
        self._kept = []

    def backward(self, d_logits_MbC: Tensor) -> None:
        head, (x,) = self._layers[-1], self._kept[-1]
        head.backward(self._of_one(x), self._of_one(d_logits_MbC))
        dx = self._of_all(head.input_gradient(self._of_one(d_logits_MbC)))
        for number in range(len(self.gates) - 1, -1, -1):
            gates, layer, (x, weights_MbE, out_MbEh) = self.gates[number], self._layers[number], self._kept[number]
            d_out_MbEh = dx[:, :, None]
            if gates.num_branches:
                d_out_MbEh = weights_MbE[..., None] * d_out_MbEh
            dy = through_relu(d_out_MbEh.expand_as(out_MbEh), out_MbEh).flatten(-2)
            if gates.num_branches:
                d_weights_MbE = torch.einsum("mbh,mbeh->mbe", dx, out_MbEh)
                dy = torch.cat([dy, gates.backward(d_weights_MbE)], dim=-1)
            layer.backward(self._of_one(x), self._of_one(dy))
            if number:
                dx = self._of_all(layer.input_gradient(self._of_one(dy)))

    def _of_one(self, value: Tensor) -> Tensor:
        """As layers want it: of a single network without its dimension."""
        return value[0] if len(self) == 1 else value

    def _of_all(self, value: Tensor) -> Tensor:
        return value[None] if len(self) == 1 else value

    def _grown(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool
    ) -> "MixtureStack":
        tensors, new_gates = dict(self.parameters.state()), []
        for layer, gates in enumerate(self.gates, start=1):
            num_rows, width = gates.num_experts * self.sizes[layer], self.sizes[layer]
            weight, bias = tensors[f"weight_{layer}"], tensors[f"bias_{layer}"]
            which_M = torch.tensor(experts[layer - 1])
            rows_Mh = which_M[:, None] * width + torch.arange(width)
            networks_M1 = torch.arange(len(self))[:, None]
            grown, num_new_rows = gates.with_twins(experts[layer - 1], flat)
            new_weight, new_bias = draw_linear(num_new_rows, weight.shape[2], generators)
            tensors[f"weight_{layer}"] = torch.cat(
                [weight[:, :num_rows], weight[networks_M1, rows_Mh], weight[:, num_rows:], new_weight], dim=1
            )
            tensors[f"bias_{layer}"] = torch.cat(
                [bias[:, :num_rows], bias[networks_M1, rows_Mh], bias[:, num_rows:], new_bias], dim=1
            )
            new_gates.append(grown)
        return MixtureStack(self.sizes, new_gates, Parameters.from_state(tensors, self.parameters.device))

    def state(self) -> dict:
        gates = [{"root": one.root, "splits": one.splits} for one in self.gates]
        return {
            "kind": "mixture",
            "sizes": list(self.sizes),
            "hard": self.gates[0].hard,
            "gates": gates,
            "parameters": self.parameters.state(),
        }

    @classmethod
    def from_state(cls, state: dict, device: torch.device) -> "MixtureStack":
        gates = [Gates(one["root"], one["splits"], state["hard"], device) for one in state["gates"]]
        return cls(state["sizes"], gates, Parameters.from_state(state["parameters"], device))

    def plain(self, network: int) -> nn.Module:
        layers: list[nn.Module] = []
        for number, gates in enumerate(self.gates, start=1):
            weight, bias = (self.parameters[f"{name}_{number}"][network] for name in ("weight", "bias"))
            width, num_rows = self.sizes[number], gates.num_experts * self.sizes[number]
            pairs = zip(weight[:num_rows].split(width), bias[:num_rows].split(width), strict=True)
            experts, num_inputs = [linear_of(w, b) for w, b in pairs], weight.shape[1]
            layer = PlainMixtureLayer(experts, nn.Identity(), num_inputs, gates.root, gates.splits[network], gates.hard)
            if gates.num_branches:
                set_nodes(layer, weight[num_rows:], bias[num_rows:])
            layers.append(layer)
        last = len(self.sizes) - 1
        head = linear_of(self.parameters[f"weight_{last}"][network], self.parameters[f"bias_{last}"][network])
        return PlainMixture(layers, head)
