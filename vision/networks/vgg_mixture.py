"""The reduced VGG19 whose blocks are mixtures of experts, and its growth.

Blocks 2 to 5, each up to and with its pooling, are mixtures of blocks of one shape; the first is not, as in the
original code (the paper says which modules for MNIST alone). Gates read the block's input, averaged to 4 x 4 places.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from vision.flops import Flops, count_flops
from vision.networks.block import ConvBlock
from vision.networks.gated import GatedStack
from vision.networks.gates import Gates
from vision.networks.parameters import Parameters, draw_linear
from vision.networks.plain import PlainMixture, PlainMixtureLayer, linear_of, set_nodes
from vision.networks.vgg import (
    BLOCKS,
    SIDE,
    add_conv_shapes,
    blocks_of,
    draw_conv_layer,
    draw_head,
    plain_conv,
)

PLACES = 4
"""Of each side of what gates read."""

# M networks, b examples, s side, C channels, E experts, K branches of gates, f = 16 C features.


class VGGMixtureStack(GatedStack):
    """M networks whose blocks, but the first, are mixtures with soft or hard gates.

    Args:
        num_inputs: channels of an image.
        width: of all convolutions.
        gates: of blocks 2, 3, ...
        parameters: of layer l of expert e of block k: conv_k_e_l, scale_k_e_l, shift_k_e_l (the first block: e = 0);
            of its gates gate_k [M, K, 4 x 4 x C] and gate_bias_k [M, K]; weight_head, bias_head.
        statistics: mean_k_e_l, variance_k_e_l.
        blocks: how many convolutions there are before each pooling.
    """

    statistics: Parameters

    def __init__(
        self,
        num_inputs: int,
        width: int,
        gates: Sequence[Gates],
        parameters: Parameters,
        statistics: Parameters,
        blocks: Sequence[int] = BLOCKS,
    ):
        self.num_inputs, self.width, self.gates, self.blocks = num_inputs, width, list(gates), list(blocks)
        self.parameters, self.statistics = parameters, statistics
        self.gradient = parameters.empty_like()
        self.expert_weights: list[Tensor] = []
        self.examples_at_once = max(50, min(2000, 40_000 // width))
        self._experts = [
            [self._block(network, number, expert) for expert in range(self._num_experts(number))]
            for network in range(len(self))
            for number in range(len(blocks))
        ]
        self._kept: list[list[tuple[Tensor, ...]]] = []

    @classmethod
    def drawn(
        cls,
        num_inputs: int,
        width: int,
        num_classes: int,
        num_experts: int,
        hard: bool,
        generators: Sequence[torch.Generator],
        device: torch.device,
        blocks: Sequence[int] = BLOCKS,
    ) -> "VGGMixtureStack":
        """With `num_experts` in each mixture under one root; all drawn as torch's modules are.

        The original code's experts begin as copies of one another; ours differ from the start.
        """
        root = num_experts if num_experts > 1 else 0
        gates = [Gates(root, [[] for _ in generators], hard, device) for _ in blocks[1:]]
        shapes: dict[str, tuple[int, ...]] = {}
        statistics: dict[str, tuple[int, ...]] = {}
        for number, count in enumerate(blocks):
            for expert in range(num_experts if number else 1):
                for layer in range(count):
                    num_in = num_inputs if number == layer == 0 else width
                    add_conv_shapes(f"{number}_{expert}_{layer}", num_in, width, shapes, statistics)
            if number:
                shapes |= {f"gate_{number}": (root, PLACES * PLACES * width), f"gate_bias_{number}": (root,)}
        shapes |= {"weight_head": (num_classes, width), "bias_head": (num_classes,)}
        parameters, gathered = (Parameters(s, len(generators), device) for s in (shapes, statistics))
        stack = cls(num_inputs, width, gates, parameters, gathered, blocks)
        stack.draw(generators)
        return stack

    def draw(self, generators: Sequence[torch.Generator]) -> None:
        for name in self.parameters.shapes:
            if name.startswith("conv_"):
                draw_conv_layer(name.removeprefix("conv_"), self.parameters, self.statistics, generators)
        for number, gates in enumerate(self.gates, start=1):
            weight, bias = draw_linear(gates.num_branches, PLACES * PLACES * self.width, generators)
            self.parameters[f"gate_{number}"].copy_(weight)
            self.parameters[f"gate_bias_{number}"].copy_(bias)
        draw_head(self.parameters, generators)

    def compute_in(self, dtype: torch.dtype) -> None:
        for blocks in self._experts:
            for block in blocks:
                block.compute_in(dtype)

    @property
    def plain_input_shape(self) -> tuple[int, ...]:
        return (self.num_inputs, SIDE, SIDE)

    @cached_property
    def flops(self) -> Flops:
        counted = count_flops(self.plain(0), self.plain_input_shape)
        if not self.gates[0].hard:
            return counted
        # A prediction of hard gates computes one expert of each mixture alone.
        sides = [SIDE >> number for number in range(len(self.blocks))]
        of_block = [2 * 9 * self.width**2 * side**2 * count for side, count in zip(sides, self.blocks, strict=True)]
        unused = sum((gates.num_experts - 1) * of_block[number] for number, gates in enumerate(self.gates, start=1))
        return Flops(counted.forward, counted.training, counted.forward - unused)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        num_networks, kept = len(self), []
        self.expert_weights = []
        inputs = [x[network * len(x) // num_networks] for network in range(num_networks)]
        inputs = [self._at(network, 0)[0].forward(one, training) for network, one in enumerate(inputs)]
        for number, gates in enumerate(self.gates, start=1):
            features_Mbf = torch.stack([pooled(one) for one in inputs])
            weights_MbE = self._weights(number, gates, features_Mbf, training)
            self.expert_weights.append(weights_MbE)
            outputs: list[Tensor] = []
            layer_kept: list[tuple[Tensor, ...]] = []
            for network, one in enumerate(inputs):
                of_experts = torch.stack([block.forward(one, training) for block in self._at(network, number)], dim=1)
                outputs.append(torch.einsum("be,behwc->bhwc", weights_MbE[network], of_experts))
                layer_kept.append((one, of_experts))
            kept.append([(features_Mbf, weights_MbE), *layer_kept])
            inputs = outputs
        x_MbC = torch.stack([one.flatten(1) for one in inputs])
        if training:
            self._kept = [*kept, [(x_MbC,)]]
        weight, bias = self.parameters["weight_head"], self.parameters["bias_head"]
        return torch.baddbmm(bias[:, None], x_MbC, weight.transpose(1, 2))

    def forget(self) -> None:
        super().forget()
        self._kept = []
        for blocks in self._experts:
            for block in blocks:
                block.forget()

    def backward(self, d_logits_MbC: Tensor) -> None:
        ((x_MbC,),) = self._kept[-1]
        torch.bmm(d_logits_MbC.transpose(1, 2), x_MbC, out=self.gradient["weight_head"])
        torch.sum(d_logits_MbC, 1, out=self.gradient["bias_head"])
        dx = torch.bmm(d_logits_MbC, self.parameters["weight_head"])
        d_outputs = [one.view(len(one), 1, 1, -1) for one in dx]
        for number in range(len(self.gates), 0, -1):
            gates, ((features_Mbf, weights_MbE), *kept) = self.gates[number - 1], self._kept[number - 1]
            d_weights_MbE = torch.stack(
                [
                    torch.einsum("bhwc,behwc->be", dy, of_experts)
                    for dy, (_, of_experts) in zip(d_outputs, kept, strict=True)
                ]
            )
            d_features_Mbf = self._gates_backward(number, gates, features_Mbf, d_weights_MbE)
            for network, (one, _) in enumerate(kept):
                dy, d_input = d_outputs[network], None
                for expert, block in enumerate(self._at(network, number)):
                    d_part = block.backward(dy * weights_MbE[network, :, expert, None, None, None])
                    assert d_part is not None
                    d_input = d_part if d_input is None else d_input.add_(d_part)
                assert d_input is not None
                if d_features_Mbf is not None:
                    d_input = d_input + pooled_backward(d_features_Mbf[network], one.shape[1])
                d_outputs[network] = d_input
        for network, dy in enumerate(d_outputs):
            self._at(network, 0)[0].backward(dy, wants_dx=False)

    def _weights(self, number: int, gates: Gates, features_Mbf: Tensor, training: bool) -> Tensor:
        if not gates.num_branches:
            return features_Mbf.new_ones(*features_Mbf.shape[:2], 1)
        weight, bias = self.parameters[f"gate_{number}"], self.parameters[f"gate_bias_{number}"]
        return gates.weights(torch.baddbmm(bias[:, None], features_Mbf, weight.transpose(1, 2)), training)

    def _gates_backward(self, number: int, gates: Gates, features_Mbf: Tensor, d_weights_MbE: Tensor) -> Tensor | None:
        if not gates.num_branches:
            return None
        d_logits_MbK = gates.backward(d_weights_MbE)
        torch.bmm(d_logits_MbK.transpose(1, 2), features_Mbf, out=self.gradient[f"gate_{number}"])
        torch.sum(d_logits_MbK, 1, out=self.gradient[f"gate_bias_{number}"])
        return torch.bmm(d_logits_MbK, self.parameters[f"gate_{number}"])

    def _grown(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool
    ) -> "VGGMixtureStack":
        tensors, statistics = self.parameters.state(), self.statistics.state()
        networks_M, new_gates = torch.arange(len(self)), []
        for number, gates in enumerate(self.gates, start=1):
            which = experts[number - 1]
            for of_kind, kinds in ((tensors, ("conv", "scale", "shift")), (statistics, ("mean", "variance"))):
                for kind in kinds:
                    for layer in range(self.blocks[number]):
                        of_experts = torch.stack(
                            [of_kind[f"{kind}_{number}_{expert}_{layer}"] for expert in range(gates.num_experts)]
                        )
                        of_kind[f"{kind}_{number}_{gates.num_experts}_{layer}"] = of_experts[which, networks_M]
            grown, num_new = gates.with_twins(which, flat)
            rows = draw_linear(num_new, PLACES * PLACES * self.width, generators)
            for name, new in zip((f"gate_{number}", f"gate_bias_{number}"), rows, strict=True):
                tensors[name] = torch.cat([tensors[name], new], dim=1)
            new_gates.append(grown)
        device = self.parameters.device
        parameters, gathered = (Parameters.from_state(state, device) for state in (tensors, statistics))
        return VGGMixtureStack(self.num_inputs, self.width, new_gates, parameters, gathered, self.blocks)

    def state(self) -> dict:
        return {
            "kind": "vgg_mixture",
            "num_inputs": self.num_inputs,
            "width": self.width,
            "blocks": self.blocks,
            "hard": self.gates[0].hard,
            "gates": [{"root": one.root, "splits": one.splits} for one in self.gates],
            "parameters": self.parameters.state(),
            "statistics": self.statistics.state(),
        }

    @classmethod
    def from_state(cls, state: dict, device: torch.device) -> "VGGMixtureStack":
        gates = [Gates(one["root"], one["splits"], state["hard"], device) for one in state["gates"]]
        parameters, statistics = (Parameters.from_state(state[name], device) for name in ("parameters", "statistics"))
        return cls(state["num_inputs"], state["width"], gates, parameters, statistics, state["blocks"])

    def plain(self, network: int) -> nn.Module:
        def block(number: int, expert: int) -> nn.Module:
            names = [f"{number}_{expert}_{layer}" for layer in range(self.blocks[number])]
            convs = [module for name in names for module in plain_conv(name, network, self.parameters, self.statistics)]
            return nn.Sequential(*convs, nn.MaxPool2d(2))

        layers = [block(0, 0)]
        for number, gates in enumerate(self.gates, start=1):
            experts = [block(number, expert) for expert in range(gates.num_experts)]
            features = nn.Sequential(nn.AdaptiveAvgPool2d(PLACES), nn.Flatten())
            num_features = PLACES * PLACES * self.width
            layer = PlainMixtureLayer(experts, features, num_features, gates.root, gates.splits[network], gates.hard)
            if gates.num_branches:
                # Ours are places first, torch's channels first.
                rows = self.parameters[f"gate_{number}"][network].unflatten(1, (-1, self.width))
                set_nodes(layer, rows.transpose(1, 2).flatten(1), self.parameters[f"gate_bias_{number}"][network])
            layers.append(layer)
        head = linear_of(self.parameters["weight_head"][network], self.parameters["bias_head"][network])
        return PlainMixture(layers, nn.Sequential(nn.Flatten(), head))

    def _at(self, network: int, number: int) -> list[ConvBlock]:
        """The experts of block `number` of one network."""
        return self._experts[network * len(self.blocks) + number]

    def _num_experts(self, number: int) -> int:
        return self.gates[number - 1].num_experts if number else 1

    def _block(self, network: int, number: int, expert: int) -> ConvBlock:
        names = [f"{number}_{expert}_{layer}" for layer in range(self.blocks[number])]
        return blocks_of(names, [len(names)], network, self.parameters, self.gradient, self.statistics)[0]


def pooled(x_bssC: Tensor) -> Tensor:
    """Means over 4 x 4 places of an image, [b, 16 C], as torch.nn.AdaptiveAvgPool2d(4), places first.

    Args:
        x_bssC: [b, s, s, C], s a multiple of 4, or 2 or 1: then a pixel is several places.
    """
    num_examples, side, _, channels = x_bssC.shape
    if side < PLACES:
        times = PLACES // side
        return x_bssC.repeat_interleave(times, 1).repeat_interleave(times, 2).flatten(1)
    size = side // PLACES
    return x_bssC.view(num_examples, PLACES, size, PLACES, size, channels).mean((2, 4)).flatten(1)


def pooled_backward(d_features_bf: Tensor, side: int) -> Tensor:
    """The gradient of the image, [b, s, s, C], from that of its means."""
    places = d_features_bf.view(len(d_features_bf), PLACES, PLACES, -1)
    if side < PLACES:
        times = PLACES // side
        return places.view(len(places), side, times, side, times, -1).sum((2, 4))
    size = side // PLACES
    each = places / (size * size)
    return each.repeat_interleave(size, 1).repeat_interleave(size, 2)
