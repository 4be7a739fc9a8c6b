"""The multilayer perceptron (MLP) whose two hidden layers are mixtures of experts. The mixtures can grow."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vision.flops import Flops, linear_flops
from vision.networks.gated import GatedStack
from vision.networks.gates import Gates, check_trees
from vision.networks.linear import linear_layers, relu_backward
from vision.networks.modules import MixtureLayerModule, MixtureModule, linear_module
from vision.networks.parameters import Parameters, draw_layers, draw_linear, layer_shapes


class MixtureStack(GatedStack):
    """M MLPs whose hidden layers are mixtures of experts.

    An expert is a linear layer with ReLU. A mixture is the weighted sum of the outputs of experts. Gates compute
    the weights.

    The weights of the experts and the gates of a mixture are stored in one matrix: h rows for each expert, then one row
    for each branch of the gates. So one matrix product computes the outputs of all experts and the logits of all
    branches.

    Shapes: M networks, b examples, i inputs, h hidden units of an expert, E experts, K branches of the gates, C
    classes.

    Args:
        sizes: number of inputs, width of each hidden layer, number of classes.
        gates: gates of each hidden layer.
        parameters: weight_1, bias_1, weight_2, bias_2, and so on for all layers.
    """

    def __init__(self, sizes: Sequence[int], gates: Sequence[Gates], parameters: Parameters):
        self.sizes = tuple(sizes)
        self.gates = list(gates)
        self.parameters = parameters
        self.gradient = parameters.zeros_like()
        self.expert_weights: list[Tensor] = []
        self._layers = linear_layers(parameters, self.gradient)
        self._saved: list[tuple[Tensor, ...]] = []

    @classmethod
    def initialised(
        cls,
        sizes: Sequence[int],
        num_experts: int,
        hard: bool,
        generators: Sequence[torch.Generator],
        device: torch.device,
    ) -> "MixtureStack":
        """Return untrained networks. Experts and gates have the initialisation of torch.nn.Linear.

        Args:
            sizes: number of inputs, width of each hidden layer, number of classes.
            num_experts: number of experts in each hidden layer. If it is larger than 1, the root of the gates has
                one branch per expert.
            hard: if True, the gates are hard, see `Gates`.
        """
        root = num_experts if num_experts > 1 else 0
        gates = [Gates(root, [[] for _ in generators], hard, device) for _ in sizes[1:-1]]
        stack = cls(sizes, gates, Parameters(_shapes(sizes, gates), len(generators), device))
        stack.reset_parameters(generators)
        return stack

    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        draw_layers(self.parameters, generators)

    @cached_property
    def flops(self) -> Flops:
        mixtures = list(zip(self.gates, self.sizes, self.sizes[1:], strict=False))
        layers = [(num_in, gates.num_experts * width + gates.num_branches) for gates, num_in, width in mixtures]
        # With hard gates, a prediction needs only one expert of each mixture. So the FLOPs of the other experts are
        # subtracted from the FLOPs of a prediction.
        unused = sum(2 * num_in * (gates.num_experts - 1) * width for gates, num_in, width in mixtures if gates.hard)
        return linear_flops([*layers, (self.sizes[-2], self.sizes[-1])], unused)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        saved, self.expert_weights = [], []
        for gates, layer, width in zip(self.gates, self._layers, self.sizes[1:], strict=False):
            num_rows = gates.num_experts * width
            y = self._add_axis(layer.forward(self._drop_axis(x)))
            out_MbEh = y[..., :num_rows].clamp_min(0).unflatten(-1, (gates.num_experts, width))
            if gates.num_branches:
                weights_MbE = gates.weights(y[..., num_rows:], training)
                x_next = torch.einsum("mbe,mbeh->mbh", weights_MbE, out_MbEh)
            else:
                weights_MbE, x_next = y.new_ones(*y.shape[:2], 1), out_MbEh[:, :, 0]
            self.expert_weights.append(weights_MbE)
            saved.append((x, weights_MbE, out_MbEh))
            x = x_next
        if training:
            self._saved = [*saved, (x,)]
        return self._add_axis(self._layers[-1].forward(self._drop_axis(x)))

    def backward(self, d_logits_MbC: Tensor) -> None:
        saved, self._saved = self._saved, []
        head, (x,) = self._layers[-1], saved[-1]
        head.backward(self._drop_axis(x), self._drop_axis(d_logits_MbC))
        dx = self._add_axis(head.input_gradient(self._drop_axis(d_logits_MbC)))
        for number in range(len(self.gates) - 1, -1, -1):
            gates, layer, (x, weights_MbE, out_MbEh) = self.gates[number], self._layers[number], saved[number]
            d_out_MbEh = dx[:, :, None]
            if gates.num_branches:
                d_out_MbEh = weights_MbE[..., None] * d_out_MbEh
            dy = relu_backward(d_out_MbEh.expand_as(out_MbEh), out_MbEh).flatten(-2)
            if gates.num_branches:
                d_weights_MbE = torch.einsum("mbh,mbeh->mbe", dx, out_MbEh)
                dy = torch.cat([dy, gates.backward(d_weights_MbE)], dim=-1)
            layer.backward(self._drop_axis(x), self._drop_axis(dy))
            if number:
                dx = self._add_axis(layer.input_gradient(self._drop_axis(dy)))

    def _drop_axis(self, value: Tensor) -> Tensor:
        """Return `value` without its first axis if the stack has a single network. Else return `value` unchanged."""
        return value[0] if len(self) == 1 else value

    def _add_axis(self, value: Tensor) -> Tensor:
        """Undo `_drop_axis`: if the stack has a single network, return `value` with a first axis of size 1."""
        return value[None] if len(self) == 1 else value

    def split(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool = False
    ) -> "MixtureStack":
        tensors = dict(self.parameters.state())
        new_gates = [gates.with_twins(which, flat) for gates, which in zip(self.gates, experts, strict=True)]
        networks_M1 = torch.arange(len(self))[:, None]
        for number, (old, new) in enumerate(zip(self.gates, new_gates, strict=True)):
            width = self.sizes[number + 1]
            num_rows, num_new_rows = old.num_experts * width, new.num_branches - old.num_branches
            names = f"weight_{number + 1}", f"bias_{number + 1}"
            rows_Mh = torch.tensor(experts[number])[:, None] * width + torch.arange(width)
            # In the weight matrix, the rows of all experts come first, then the rows of the branches of the gates. So
            # insert the rows of the twin (the copy of the expert) between them. Append the rows of the new branches at
            # the end, because `Gates` gives the new branches the last indices.
            drawn = draw_linear(num_new_rows, tensors[names[0]].shape[2], generators)
            for name, new_rows in zip(names, drawn, strict=True):
                value = tensors[name]
                parts = [value[:, :num_rows], value[networks_M1, rows_Mh], value[:, num_rows:], new_rows]
                tensors[name] = torch.cat(parts, dim=1)
        return MixtureStack(self.sizes, new_gates, Parameters.from_state(tensors, self.parameters.device))

    def state(self) -> dict[str, Any]:
        return {
            "kind": "mixture",
            "sizes": list(self.sizes),
            "hard": self.gates[0].hard,
            "gates": [gates.tree for gates in self.gates],
            "parameters": self.parameters.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "MixtureStack":
        sizes, trees = state["sizes"], state["gates"]
        check_trees(trees, max(len(bias_Mh[0]) for bias_Mh in state["parameters"].values()))
        gates = [Gates(tree["root"], tree["splits"], state["hard"], device) for tree in trees]
        return cls(sizes, gates, Parameters.from_state(state["parameters"], device, _shapes(sizes, gates)))

    def to_module(self, network: int) -> nn.Module:
        layers: list[nn.Module] = []
        for number, gates in enumerate(self.gates, start=1):
            weight, bias = (self.parameters[f"{name}_{number}"][network] for name in ("weight", "bias"))
            width, num_rows = self.sizes[number], gates.num_experts * self.sizes[number]
            pairs = zip(weight[:num_rows].split(width), bias[:num_rows].split(width), strict=True)
            experts, num_inputs = [linear_module(w, b) for w, b in pairs], weight.shape[1]
            splits = gates.splits[network]
            layer = MixtureLayerModule(experts, nn.Identity(), num_inputs, gates.root, splits, gates.hard, nn.ReLU())
            if gates.num_branches:
                layer.gate = linear_module(weight[num_rows:], bias[num_rows:])
            layers.append(layer)
        last = len(self.sizes) - 1
        head = linear_module(self.parameters[f"weight_{last}"][network], self.parameters[f"bias_{last}"][network])
        return MixtureModule(layers, head)


def _shapes(sizes: Sequence[int], gates: Sequence[Gates]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of one network."""
    # the experts and gates of each hidden layer
    num_rows = [one.num_experts * width + one.num_branches for one, width in zip(gates, sizes[1:], strict=False)]
    return layer_shapes(sizes, [*num_rows, sizes[-1]])
