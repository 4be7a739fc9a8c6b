"""The perceptron whose two hidden layers are mixtures of experts, and its growth."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vision.flops import Flops, linear_flops
from vision.networks.gates import Gates, Noise
from vision.networks.linear import layers_of, through_relu
from vision.networks.parameters import Parameters, draw_layers, draw_linear
from vision.networks.plain import PlainMixture
from vision.networks.stack import Stack


class MixtureStack(Stack):
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
        """Of each layer, [M, b, E]: how the last pass weighed its experts."""
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

    @property
    def num_experts(self) -> int:
        return self.gates[0].num_experts

    @cached_property
    def flops(self) -> Flops:
        widths = list(zip(self.gates, self.sizes, self.sizes[1:], strict=False))
        layers = [(num_in, gates.num_experts * width + gates.num_branches) for gates, num_in, width in widths]
        unused = sum(2 * num_in * (gates.num_experts - 1) * width for gates, num_in, width in widths if gates.hard)
        return linear_flops([*layers, (self.sizes[-2], self.sizes[-1])], unused)

    def draw_from(self, noise: Noise) -> None:
        """What hard gates draw from in training."""
        for gates in self.gates:
            gates.noise = noise

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

    def routing(self, x: Tensor) -> list[dict[str, Any]]:
        """How the first layer of each network weighs its experts, and its tree: weights [b, E], root, splits.

        Args:
            x: [1, b, i].
        """
        self.logits(x)
        gates = self.gates[0]
        return [
            {"weights": weights_bE.cpu().numpy(), "root": gates.root, "splits": splits}
            for weights_bE, splits in zip(self.expert_weights[0], gates.splits, strict=True)
        ]

    def _of_one(self, value: Tensor) -> Tensor:
        """As layers want it: of a single network without its dimension."""
        return value[0] if len(self) == 1 else value

    def _of_all(self, value: Tensor) -> Tensor:
        return value[None] if len(self) == 1 else value

    def split(self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator]) -> "MixtureStack":
        """A new stack in which one expert of each layer has a twin; this one is not changed.

        The twins are equal, and share what the one had by a new gate, drawn at random: every output stays as it
        was, to rounding, with soft gates and with hard ones in testing.

        Args:
            experts: which one, layer by layer and network by network.
            generators: one a network, for its new gates.
        """
        return self._grown(experts, generators, flat=False)

    def split_flat(self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator]) -> "MixtureStack":
        """As `split`, but the twin is a further entry of one flat softmax, its row of the gate drawn at random.

        It takes weight from all experts and not from its twin alone: outputs jump. It is what the tree is for. (A
        copied row would jump too, a weight p becoming 2p / (1 + p), and equal twins with equal rows never part.)

        Raises:
            ValueError: some expert has been split under a tree.
        """
        if any(gates.splits[0] for gates in self.gates):
            raise ValueError("a tree of gates does not become flat: split_flat follows split_flat alone")
        return self._grown(experts, generators, flat=True)

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
            if flat:
                root, splits = gates.num_experts + 1, gates.splits  # of which there are none
                num_new_rows = root - gates.root  # two where there was no gate yet
            else:
                root, num_new_rows = gates.root, 2
                splits = [[*one, expert] for one, expert in zip(gates.splits, experts[layer - 1], strict=True)]
            new_weight, new_bias = draw_linear(num_new_rows, weight.shape[2], generators)
            tensors[f"weight_{layer}"] = torch.cat(
                [weight[:, :num_rows], weight[networks_M1, rows_Mh], weight[:, num_rows:], new_weight], dim=1
            )
            tensors[f"bias_{layer}"] = torch.cat(
                [bias[:, :num_rows], bias[networks_M1, rows_Mh], bias[:, num_rows:], new_bias], dim=1
            )
            new_gates.append(Gates(root, splits, gates.hard, self.parameters.device))
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
        trees = [(gates.root, gates.splits[network]) for gates in self.gates]
        plain = PlainMixture(self.sizes, trees, self.gates[0].hard)
        for layer, gates in enumerate(self.gates, start=1):
            weight, bias = (self.parameters[f"{name}_{layer}"][network] for name in ("weight", "bias"))
            plain_layer = plain.mixture(layer)
            rows = [self.sizes[layer]] * gates.num_experts + plain_layer.branches_of_nodes
            for linear_layer, w, b in zip(plain_layer.all_linear(), weight.split(rows), bias.split(rows), strict=True):
                linear_layer.weight.data.copy_(w)
                linear_layer.bias.data.copy_(b)
        last = len(self.sizes) - 1
        plain.head.weight.data.copy_(self.parameters[f"weight_{last}"][network])
        plain.head.bias.data.copy_(self.parameters[f"bias_{last}"][network])
        return plain
