"""The reduced VGG19 whose blocks are mixtures of experts. The mixtures can grow.

All blocks except the first are mixtures, as in the original ALMA code. (The paper describes mixtures for MNIST only.)
An expert of a mixture is a complete block including the pooling. All experts of a mixture have the same shape. The
gates of a mixture divide the input of the mixture into a grid of 4 x 4 cells and read the mean of each cell.

Shapes: M networks in G groups, b examples, s x s pixels of an image, C channels, E experts, K branches of the gates,
f = 16 C features that the gates read. The M / G networks of a group read the same examples.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vision.flops import Flops, count_flops
from vision.networks.block import ConvBlock
from vision.networks.gated import GatedStack
from vision.networks.gates import Gates
from vision.networks.modules import MixtureLayerModule, MixtureModule, linear_module, set_nodes
from vision.networks.parameters import Parameters, draw_linear
from vision.networks.vgg import (
    BLOCKS,
    SIDE,
    add_conv_shapes,
    conv_modules,
    make_blocks,
    reset_conv_layer,
    reset_head,
)

GRID = 4
"""Number of cells along each side of the grid. The gates read the mean of each cell."""


class VGGMixtureStack(GatedStack):
    """M networks in which all blocks except the first are mixtures.

    Args:
        num_inputs: number of channels of an image.
        width: number of output channels of each convolution.
        gates: gates of each mixture, that is, of all blocks except the first.
        parameters: conv_k_e_l, scale_k_e_l and shift_k_e_l for layer l of expert e of block k; gate_k [M, K, 4 x 4 x C]
            and gate_bias_k [M, K] for the gates of block k, which have K branches and read C channels; weight_head and
            bias_head. The indices k, e and l start at 0. The first block (k = 0) has one expert and no gates.
        statistics: mean_k_e_l and variance_k_e_l, the running statistics of the batch normalisation of layer l of
            expert e of block k.
        blocks: number of convolutions in each block. Pooling follows every block.
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
        self.gradient = parameters.zeros_like()
        self.expert_weights: list[Tensor] = []
        self.examples_at_once = max(50, min(2000, 40_000 // width))
        self._experts = [
            [self._make_block(network, number, expert) for expert in range(self._num_experts(number))]
            for network in range(len(self))
            for number in range(len(blocks))
        ]
        self._saved: list[list[tuple[Tensor, ...]]] = []
        """Tensors that `backward` needs: one list for each mixture, then one list for the head.

        The list of a mixture begins with the pair (features that the gates read, weights of the experts). Then it
        contains one pair for each network: (input of the mixture, outputs of the experts). The list of the head
        contains the input of the head."""

    @classmethod
    def initialised(
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
        """Return untrained networks, with the initialisation of the corresponding torch modules.

        In the original ALMA code, the experts of a mixture start with equal weights. Here they start with different
        random weights.

        Args:
            num_inputs: number of channels of an image.
            width: number of output channels of each convolution.
            num_classes: number of classes.
            num_experts: number of experts in each mixture. If it is larger than 1, the root of the gates has one
                branch per expert.
            hard: if True, the gates are hard, see `Gates`.
            generators: random generators, one per network.
            device: device on which the networks are stored.
            blocks: number of convolutions in each block. Pooling follows every block.
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
                shapes |= {f"gate_{number}": (root, GRID * GRID * width), f"gate_bias_{number}": (root,)}
        shapes |= {"weight_head": (num_classes, width), "bias_head": (num_classes,)}
        parameters, gathered = (Parameters(s, len(generators), device) for s in (shapes, statistics))
        stack = cls(num_inputs, width, gates, parameters, gathered, blocks)
        stack.reset_parameters(generators)
        return stack

    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        for name in self.parameters.shapes:
            if name.startswith("conv_"):
                reset_conv_layer(name.removeprefix("conv_"), self.parameters, self.statistics, generators)
        for number, gates in enumerate(self.gates, start=1):
            weight, bias = draw_linear(gates.num_branches, GRID * GRID * self.width, generators)
            self.parameters[f"gate_{number}"].copy_(weight)
            self.parameters[f"gate_bias_{number}"].copy_(bias)
        reset_head(self.parameters, generators)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        for blocks in self._experts:
            for block in blocks:
                block.set_compute_dtype(dtype)

    @property
    def module_input_shape(self) -> tuple[int, ...]:
        return (self.num_inputs, SIDE, SIDE)

    @cached_property
    def flops(self) -> Flops:
        counted = count_flops(self.to_module(0), self.module_input_shape)
        if not self.gates[0].hard:
            return counted
        # `counted` contains the FLOPs of all experts. With hard gates, a prediction needs only one expert of each
        # mixture, so subtract the FLOPs of the other experts.
        sides = [SIDE >> number for number in range(len(self.blocks))]
        block_flops = [2 * 9 * self.width**2 * side**2 * count for side, count in zip(sides, self.blocks, strict=True)]
        unused = sum((gates.num_experts - 1) * block_flops[number] for number, gates in enumerate(self.gates, start=1))
        return Flops(counted.forward, counted.training, counted.forward - unused)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        num_networks, saved = len(self), []
        self.expert_weights = []
        inputs = [x[network * len(x) // num_networks] for network in range(num_networks)]
        inputs = [self._experts_of(network, 0)[0].forward(x_bssC, training) for network, x_bssC in enumerate(inputs)]
        for number, gates in enumerate(self.gates, start=1):
            features_Mbf = torch.stack([pooled_features(x_bssC) for x_bssC in inputs])
            weights_MbE = self._weights(number, gates, features_Mbf, training)
            self.expert_weights.append(weights_MbE)
            outputs: list[Tensor] = []
            layer_saved: list[tuple[Tensor, ...]] = []
            for network, x_bssC in enumerate(inputs):
                experts = self._experts_of(network, number)
                expert_outputs = torch.stack([block.forward(x_bssC, training) for block in experts], dim=1)
                outputs.append(torch.einsum("be,behwc->bhwc", weights_MbE[network], expert_outputs))
                layer_saved.append((x_bssC, expert_outputs))
            saved.append([(features_Mbf, weights_MbE), *layer_saved])
            inputs = outputs
        x_MbC = torch.stack([x_bssC.flatten(1) for x_bssC in inputs])
        if training:
            self._saved = [*saved, [(x_MbC,)]]
        weight, bias = self.parameters["weight_head"], self.parameters["bias_head"]
        return torch.baddbmm(bias[:, None], x_MbC, weight.transpose(1, 2))

    def free_activations(self) -> None:
        super().free_activations()
        self._saved = []
        for blocks in self._experts:
            for block in blocks:
                block.free_activations()

    def backward(self, d_logits_MbC: Tensor) -> None:
        ((x_MbC,),) = self._saved[-1]
        torch.bmm(d_logits_MbC.transpose(1, 2), x_MbC, out=self.gradient["weight_head"])
        torch.sum(d_logits_MbC, 1, out=self.gradient["bias_head"])
        dx = torch.bmm(d_logits_MbC, self.parameters["weight_head"])
        d_outputs = [dx_bC.view(len(dx_bC), 1, 1, -1) for dx_bC in dx]
        for number in range(len(self.gates), 0, -1):
            gates, ((features_Mbf, weights_MbE), *saved) = self.gates[number - 1], self._saved[number - 1]
            d_weights_MbE = torch.stack(
                [
                    torch.einsum("bhwc,behwc->be", dy, expert_outputs)
                    for dy, (_, expert_outputs) in zip(d_outputs, saved, strict=True)
                ]
            )
            d_features_Mbf = self._gates_backward(number, gates, features_Mbf, d_weights_MbE)
            for network, (x_bssC, _) in enumerate(saved):
                dy, d_input = d_outputs[network], None
                for expert, block in enumerate(self._experts_of(network, number)):
                    d_part = block.backward(dy * weights_MbE[network, :, expert, None, None, None])
                    assert d_part is not None
                    d_input = d_part if d_input is None else d_input.add_(d_part)
                assert d_input is not None
                if d_features_Mbf is not None:
                    d_input = d_input + pooled_features_backward(d_features_Mbf[network], x_bssC.shape[1])
                d_outputs[network] = d_input
        for network, dy in enumerate(d_outputs):
            self._experts_of(network, 0)[0].backward(dy, wants_dx=False)

    def _weights(self, number: int, gates: Gates, features_Mbf: Tensor, training: bool) -> Tensor:
        """Return the weights of the experts in block `number` (0 is the first block), [M, b, E].

        If the block has a single expert, the block has no gates, and all weights are 1.
        """
        if not gates.num_branches:
            return features_Mbf.new_ones(*features_Mbf.shape[:2], 1)
        weight, bias = self.parameters[f"gate_{number}"], self.parameters[f"gate_bias_{number}"]
        return gates.weights(torch.baddbmm(bias[:, None], features_Mbf, weight.transpose(1, 2)), training)

    def _gates_backward(self, number: int, gates: Gates, features_Mbf: Tensor, d_weights_MbE: Tensor) -> Tensor | None:
        """Return the gradient with respect to the features that the gates of block `number` read.

        Also write the gradients of the parameters of these gates to `gradient`.

        If the block has a single expert, the block has no gates. In this case, write nothing and return None.
        """
        if not gates.num_branches:
            return None
        d_logits_MbK = gates.backward(d_weights_MbE)
        torch.bmm(d_logits_MbK.transpose(1, 2), features_Mbf, out=self.gradient[f"gate_{number}"])
        torch.sum(d_logits_MbK, 1, out=self.gradient[f"gate_bias_{number}"])
        return torch.bmm(d_logits_MbK, self.parameters[f"gate_{number}"])

    def _with_twins(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool
    ) -> "VGGMixtureStack":
        tensors, statistics = self.parameters.state(), self.statistics.state()
        networks_M, new_gates = torch.arange(len(self)), []
        for number, gates in enumerate(self.gates, start=1):
            which = experts[number - 1]
            # Add a twin as the last expert of the block: in each network, copy the tensors of the expert that is split.
            for group, kinds in ((tensors, ("conv", "scale", "shift")), (statistics, ("mean", "variance"))):
                for kind in kinds:
                    for layer in range(self.blocks[number]):
                        tensors_EM = torch.stack(
                            [group[f"{kind}_{number}_{expert}_{layer}"] for expert in range(gates.num_experts)]
                        )
                        group[f"{kind}_{number}_{gates.num_experts}_{layer}"] = tensors_EM[which, networks_M]
            grown, num_new = gates.with_twins(which, flat)
            rows = draw_linear(num_new, GRID * GRID * self.width, generators)
            for name, new in zip((f"gate_{number}", f"gate_bias_{number}"), rows, strict=True):
                tensors[name] = torch.cat([tensors[name], new], dim=1)
            new_gates.append(grown)
        device = self.parameters.device
        parameters, gathered = (Parameters.from_state(state, device) for state in (tensors, statistics))
        return VGGMixtureStack(self.num_inputs, self.width, new_gates, parameters, gathered, self.blocks)

    def state(self) -> dict[str, Any]:
        return {
            "kind": "vgg_mixture",
            "num_inputs": self.num_inputs,
            "width": self.width,
            "blocks": self.blocks,
            "hard": self.gates[0].hard,
            "gates": [{"root": gates.root, "splits": gates.splits} for gates in self.gates],
            "parameters": self.parameters.state(),
            "statistics": self.statistics.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "VGGMixtureStack":
        gates = [Gates(tree["root"], tree["splits"], state["hard"], device) for tree in state["gates"]]
        parameters, statistics = (Parameters.from_state(state[name], device) for name in ("parameters", "statistics"))
        return cls(state["num_inputs"], state["width"], gates, parameters, statistics, state["blocks"])

    def to_module(self, network: int) -> nn.Module:
        def block(number: int, expert: int) -> nn.Module:
            names = [f"{number}_{expert}_{layer}" for layer in range(self.blocks[number])]
            convs = [
                module for name in names for module in conv_modules(name, network, self.parameters, self.statistics)
            ]
            return nn.Sequential(*convs, nn.MaxPool2d(2))

        layers = [block(0, 0)]
        for number, gates in enumerate(self.gates, start=1):
            experts = [block(number, expert) for expert in range(gates.num_experts)]
            features = nn.Sequential(nn.AdaptiveAvgPool2d(GRID), nn.Flatten())
            num_features = GRID * GRID * self.width
            layer = MixtureLayerModule(experts, features, num_features, gates.root, gates.splits[network], gates.hard)
            if gates.num_branches:
                # Reorder the gate weights: the features of this stack are ordered by cell, then by channel, but the
                # features of the torch modules are ordered by channel, then by cell.
                rows = self.parameters[f"gate_{number}"][network].unflatten(1, (-1, self.width))
                set_nodes(layer, rows.transpose(1, 2).flatten(1), self.parameters[f"gate_bias_{number}"][network])
            layers.append(layer)
        head = linear_module(self.parameters["weight_head"][network], self.parameters["bias_head"][network])
        return MixtureModule(layers, nn.Sequential(nn.Flatten(), head))

    def _experts_of(self, network: int, number: int) -> list[ConvBlock]:
        """Return the experts of block `number` of one network."""
        return self._experts[network * len(self.blocks) + number]

    def _num_experts(self, number: int) -> int:
        """Return the number of experts of block `number`."""
        return self.gates[number - 1].num_experts if number else 1

    def _make_block(self, network: int, number: int, expert: int) -> ConvBlock:
        """Return one expert of block `number` of one network. Its tensors are views of the tensors of the stack."""
        names = [f"{number}_{expert}_{layer}" for layer in range(self.blocks[number])]
        return make_blocks(names, [len(names)], network, self.parameters, self.gradient, self.statistics)[0]


def pooled_features(x_bssC: Tensor) -> Tensor:
    """Return the mean of each cell of a 4 x 4 grid, [b, 16 C].

    The means are equal to the output of torch.nn.AdaptiveAvgPool2d(4), but are ordered by cell, then by channel.

    Args:
        x_bssC: images or activations. The side s is 1, 2 or a multiple of 4. If s is less than 4, a pixel fills several
            cells.
    """
    num_examples, side, _, channels = x_bssC.shape
    if side < GRID:
        repeats = GRID // side
        return x_bssC.repeat_interleave(repeats, 1).repeat_interleave(repeats, 2).flatten(1)
    size = side // GRID
    return x_bssC.view(num_examples, GRID, size, GRID, size, channels).mean((2, 4)).flatten(1)


def pooled_features_backward(d_features_bf: Tensor, side: int) -> Tensor:
    """Return the gradient with respect to the input of `pooled_features`, [b, s, s, C].

    Args:
        d_features_bf: gradient with respect to the result of `pooled_features`, [b, 16 C].
        side: side of the input in pixels, s.
    """
    cells = d_features_bf.view(len(d_features_bf), GRID, GRID, -1)
    if side < GRID:
        repeats = GRID // side
        return cells.view(len(cells), side, repeats, side, repeats, -1).sum((2, 4))
    size = side // GRID
    per_pixel = cells / (size * size)
    return per_pixel.repeat_interleave(size, 1).repeat_interleave(size, 2)
