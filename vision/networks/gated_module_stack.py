"""Stacks of torch modules whose blocks are mixtures of experts. The mixtures can grow.

The network without mixtures must be a torch.nn.Sequential of at least three blocks. As in the original ALMA code, all
blocks but the first and the last (the head) become mixtures. (The paper describes mixtures for MNIST only.) An expert
of a mixture is a complete block. If the input of a mixture is an image, its gates divide it into a grid of 4 x 4 cells
and read the mean of each cell.

In the original ALMA code, the experts of a mixture start with equal weights. Here they start with different random
weights.

Shapes: M networks, b examples, E experts, K branches of the gates, f features that the gates read.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_alma.core.errors import SettingError
from vision.flops import Flops, count_flops
from vision.networks.architectures import CHANNELS_LAST, Structure, architecture_of, num_stored, untrained_module
from vision.networks.gated import GatedStack
from vision.networks.gates import Gates, check_trees
from vision.networks.module_stack import ModuleStack
from vision.networks.modules import MixtureLayerModule, MixtureModule
from vision.networks.parameters import draw_linear
from vision.networks.stack import LossGradient

GRID = 4
"""Number of cells along each side of the grid. The gates read the mean of each cell."""


class GatedModuleStack(ModuleStack, GatedStack):
    """M networks in which all blocks except the first and the last are mixtures.

    Args:
        modules: the networks, instances of `MixtureModule`. The stack takes them over.
        structure: what the networks consist of.
        gates: gates of each mixture.
        device: device on which the networks are stored.
    """

    def __init__(
        self, modules: Sequence[nn.Module], structure: Structure, gates: Sequence[Gates], device: torch.device
    ):
        self.gates = list(gates)
        trees = [{"root": one.root, "splits": one.splits} for one in self.gates]
        super().__init__(modules, replace(structure, mixture={"hard": self.gates[0].hard, "gates": trees}), device)
        self.expert_weights = []
        self._uniforms: list[Tensor] | None = None

    @classmethod
    def of_experts(
        cls,
        structure: Structure,
        num_experts: int,
        hard: bool,
        generators: Sequence[torch.Generator],
        device: torch.device,
    ) -> "GatedModuleStack":
        """Return untrained networks with mixtures.

        Args:
            structure: what a network without mixtures consists of.
            num_experts: number of experts in each mixture. If it is larger than 1, the root of the gates has one
                branch per expert.
            hard: if True, the gates are hard, see `Gates`.
            generators: random generators, one per network.
            device: device on which the networks are stored.

        Raises:
            SettingError: if the network is not a torch.nn.Sequential of at least three blocks.
        """
        root = num_experts if num_experts > 1 else 0
        trees = [{"root": root, "splits": [[] for _ in generators]} for _ in range(_num_mixtures(structure))]
        structure = replace(structure, mixture={"hard": hard, "gates": trees})
        modules = [_untrained_mixtures(structure, number, one) for number, one in enumerate(generators)]
        return cls(modules, structure, _gates_of(structure, device), device)

    def _untrained(self, generators: Sequence[torch.Generator]) -> "GatedModuleStack":
        modules = [_untrained_mixtures(self.structure, number, one) for number, one in enumerate(generators)]
        return GatedModuleStack(modules, self.structure, self.gates, self.parameters.device)

    def _count_flops(self) -> Flops:
        module = self.to_module(0).cpu()
        counted = count_flops(module, self.module_input_shape)
        if not self.gates[0].hard:
            return counted
        # `counted` contains the FLOPs of all experts. With hard gates, a prediction needs only one expert of each
        # mixture, so subtract the FLOPs of the other experts.
        assert isinstance(module, MixtureModule)
        unused, x = 0, torch.zeros(1, *self.module_input_shape)
        for layer in module.layers:
            if isinstance(layer, MixtureLayerModule):
                unused += (len(layer.experts) - 1) * count_flops(layer.experts[0], tuple(x.shape[1:])).forward
            with torch.no_grad():
                x = layer(x)
        return Flops(counted.forward, counted.training, counted.forward - unused)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        self._uniforms = self._draw(x.shape[1]) if training and self.gates[0].hard else None
        logits_MbC = super().logits(x, training)
        weights = [[layer.last_weights_bE for layer in self._mixtures(number)] for number in range(len(self))]
        self.expert_weights = [torch.stack(of_layer) for of_layer in zip(*weights, strict=True)]  # type: ignore[arg-type]
        return logits_MbC

    def _update_statistics(self, x: Tensor) -> None:
        self._uniforms = self._draw(x.shape[1]) if self.gates[0].hard else None
        super()._update_statistics(x)

    def compute_gradient(self, x: Tensor, one_hot_UbC: Tensor, loss: LossGradient, unit: int) -> None:
        self._uniforms = self._draw(x.shape[1]) if self.gates[0].hard else None
        super().compute_gradient(x, one_hot_UbC, loss, unit)

    @property
    def can_be_graphed(self) -> bool:
        return not self.gates[0].hard  # the random numbers of hard gates are drawn on the CPU

    def _draw(self, num_examples: int) -> list[Tensor]:
        """Return the random numbers with which the hard gates choose branches, [M, b, nodes] for each mixture."""
        device, drawn = self.parameters.device, []
        for gates in self.gates:
            if gates.noise is None:
                raise RuntimeError("hard gates need random numbers in training: call set_gate_noise() first")
            num_nodes = bool(gates.root) + len(gates.splits[0])
            drawn.append(gates.noise((num_examples, num_nodes)).to(device))
        return drawn

    def _output_of(self, number: int, x_bCss: Tensor) -> Tensor:
        uniforms = None if self._uniforms is None else [uniform[number] for uniform in self._uniforms]
        return self._networks[number](x_bCss, uniforms=uniforms)

    def _mixtures(self, number: int) -> list[MixtureLayerModule]:
        """Return the mixtures of one network, in order."""
        module = self._networks[number]
        assert isinstance(module, MixtureModule)
        return module.mixtures

    def _with_twins(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool
    ) -> "GatedModuleStack":
        new_gates, rows = [], []
        for number, gates in enumerate(self.gates):
            grown, num_new = gates.with_twins(experts[number], flat)
            new_gates.append(grown)
            rows.append(_new_rows(self._mixtures(0)[number], num_new, generators))
        modules = []
        for network in range(len(self)):
            # Copy the module with its structure, and then replace its mixtures by grown ones.
            module = deepcopy(self._networks[network])
            assert isinstance(module, MixtureModule)
            grown_layers = iter(
                _with_twin(
                    layer, experts[number][network], new_gates[number], network, *(r[network] for r in rows[number])
                )
                for number, layer in enumerate(module.mixtures)
            )
            layers = [next(grown_layers) if isinstance(layer, MixtureLayerModule) else layer for layer in module.layers]
            modules.append(MixtureModule(layers, module.head))
            setattr(modules[-1], CHANNELS_LAST, self._is_channels_last)
        return GatedModuleStack(modules, self.structure, new_gates, self.parameters.device)

    def state(self) -> dict[str, Any]:
        return super().state() | {"kind": "gated_module"}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "GatedModuleStack":
        structure = Structure.from_json(state["structure"])
        count = num_stored(structure, state["parameters"])
        assert structure.mixture is not None
        check_trees(structure.mixture["gates"], len(state["parameters"]))
        modules = [_untrained_mixtures(structure, number, torch.Generator()) for number in range(count)]
        stack = cls(modules, structure, _gates_of(structure, device), device)
        stack._copy_from(state)
        return stack


def _gates_of(structure: Structure, device: torch.device) -> list[Gates]:
    """Return the gates of all mixtures."""
    mixture = structure.mixture
    assert mixture is not None
    return [Gates(tree["root"], tree["splits"], mixture["hard"], device) for tree in mixture["gates"]]


def _num_mixtures(structure: Structure) -> int:
    """Return the number of blocks that become mixtures.

    Raises:
        SettingError: if the network is not a torch.nn.Sequential of at least three blocks.
    """
    module = untrained_module(structure, torch.Generator())
    if not isinstance(module, nn.Sequential) or len(module) < 3:
        found = f"a Sequential of {len(module)}" if isinstance(module, nn.Sequential) else f"a {type(module).__name__}"
        raise SettingError(
            f"a mixture of experts needs a network that is a torch.nn.Sequential of at least three blocks: the blocks "
            f"between the first and the last one become mixtures. But backbone={structure.backbone} is {found}. Return "
            f"a Sequential of the blocks, or choose another learner, for example learner=ens"
        )
    mixed = [block for block in list(module)[1:-1] if _has_parameters(block)]
    if not mixed:
        raise SettingError(f"backbone={structure.backbone}: no block between the first and the last has parameters")
    return len(mixed)


def _has_parameters(block: nn.Module) -> bool:
    return next(block.parameters(), None) is not None


def _untrained_mixtures(structure: Structure, number: int, generator: torch.Generator) -> MixtureModule:
    """Return one untrained network with the mixtures of a structure.

    Args:
        structure: what the network consists of.
        number: index of the network in its stack. Networks may differ in which experts were split.
        generator: draws the parameters.
    """
    mixture = structure.mixture
    assert mixture is not None
    trees = mixture["gates"]
    num_experts = max(max(tree["root"], 1) + len(tree["splits"][number]) for tree in trees)
    # Each of these networks gives one expert to each mixture. If the architecture draws its parameters itself,
    # all parameters are drawn below, in the order of the layers of the finished network.
    draw, whole = architecture_of(structure).draw, replace(structure, mixture=None)
    source_generator = torch.Generator() if draw else generator
    whole_networks = [untrained_module(whole, source_generator) for _ in range(num_experts)]
    sources = [list(one.children()) for one in whole_networks]
    layers: list[nn.Module] = [sources[0][0]]
    x = torch.zeros(2, *structure.image_shape)
    remaining = iter(trees)
    for position in range(1, len(sources[0]) - 1):
        with torch.no_grad():
            x = sources[0][position - 1].eval()(x)
        if not _has_parameters(sources[0][position]):
            layers.append(sources[0][position])  # for example pooling
            continue
        tree, is_image = next(remaining), x.dim() == 4
        features = nn.Sequential(nn.AdaptiveAvgPool2d(GRID), nn.Flatten()) if is_image else nn.Flatten()
        num_features = x.shape[1] * GRID * GRID if is_image else x.flatten(1).shape[1]
        experts, splits = [source[position] for source in sources], tree["splits"][number]
        layers.append(MixtureLayerModule(experts, features, num_features, tree["root"], splits, mixture["hard"]))
    network = MixtureModule(layers, sources[0][-1])
    setattr(network, CHANNELS_LAST, all(getattr(source, CHANNELS_LAST, True) for source in whole_networks))
    if draw:
        for part in (layers[0], *(expert for layer in network.mixtures for expert in layer.experts)):
            draw(part, generator)
    for layer in network.mixtures:
        if layer.gate is not None:
            weight, bias = _new_rows(layer, layer.num_branches, [generator])
            with torch.no_grad():
                layer.gate.weight.copy_(weight[0])
                layer.gate.bias.copy_(bias[0])
    if draw:
        draw(network.head, generator)
    return network


def _new_rows(layer: MixtureLayerModule, num_new: int, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Return random weights [M, num_new, f] and biases [M, num_new] for new branches of the gates of a mixture."""
    num_features = layer.num_features
    weight, bias = draw_linear(num_new, num_features, generators)
    if isinstance(layer.features, nn.Flatten):
        return weight, bias
    # The numbers are drawn cell by cell, but the features are ordered channel by channel.
    return weight.unflatten(-1, (GRID * GRID, -1)).transpose(-1, -2).flatten(-2), bias


def _with_twin(
    layer: MixtureLayerModule, expert: int, gates: Gates, network: int, weight_Kf: Tensor, bias_K: Tensor
) -> MixtureLayerModule:
    """Return a mixture with a copy of one of its experts, the twin, as a new last expert.

    Args:
        layer: the mixture. Its parts become parts of the result.
        expert: index of the expert that is copied.
        gates: the gates after the growth.
        network: index of the network in the stack.
        weight_Kf: weights of the new branches of the gates.
        bias_K: biases of the new branches of the gates.
    """
    experts = [*layer.experts, deepcopy(layer.experts[expert])]
    splits = gates.splits[network]
    grown = MixtureLayerModule(experts, layer.features, layer.num_features, gates.root, splits, gates.hard)
    grown.to(next(iter(layer.experts[0].parameters())).device)
    assert grown.gate is not None
    if layer.gate is not None:
        weight_Kf = torch.cat([layer.gate.weight, weight_Kf.to(layer.gate.weight)])
        bias_K = torch.cat([layer.gate.bias, bias_K.to(layer.gate.bias)])
    with torch.no_grad():
        grown.gate.weight.copy_(weight_Kf)
        grown.gate.bias.copy_(bias_K)
    return grown
