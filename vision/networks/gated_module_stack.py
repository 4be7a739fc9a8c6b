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
from typing import Any, Self

import torch
from torch import Tensor, nn

from fairseq_alma.core.errors import SettingError
from vision.flops import Flops, count_flops
from vision.networks.architectures import CHANNELS_LAST, Structure, architecture_of, untrained_module
from vision.networks.gated import GatedStack
from vision.networks.gates import Gates, check_trees
from vision.networks.module_stack import ModuleStack
from vision.networks.modules import MixtureLayerModule, MixtureModule
from vision.networks.parameters import draw_linear

GRID = 4
"""Number of cells along each side of the grid. The gates read the mean of each cell."""


class GatedModuleStack(ModuleStack, GatedStack):
    """M networks in which all blocks except the first and the last are mixtures.

    Args:
        modules: the networks, instances of `MixtureModule`. The stack takes them over.
        structure: what the networks consist of, with `mixture`.
    """

    kind = "gated_module"

    def __init__(self, modules: Sequence[nn.Module], structure: Structure, device: torch.device):
        super().__init__(modules, structure, device)
        mixture = structure.mixture
        assert mixture is not None
        self.gates = [Gates(tree["root"], tree["splits"], mixture["hard"], device) for tree in mixture["gates"]]
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
    ) -> Self:
        """Return untrained networks with mixtures.

        Args:
            structure: what a network without mixtures consists of.
            num_experts: number of experts in each mixture. If it is larger than 1, the root of the gates has one
                branch per expert.
            hard: if True, the gates are hard, see `Gates`.

        Raises:
            SettingError: if the network is not a torch.nn.Sequential of at least three blocks.
        """
        tree = {"root": num_experts if num_experts > 1 else 0, "splits": [[] for _ in generators]}
        trees = [tree] * _num_mixtures(structure)
        return cls.initialised(replace(structure, mixture={"hard": hard, "gates": trees}), generators, device)

    @staticmethod
    def _untrained(structure: Structure, number: int, generator: torch.Generator) -> nn.Module:
        return _untrained_mixtures(structure, number, generator)

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
        logits_MbC = super().logits(x, training)
        weights = [[layer.last_weights_bE for layer in self._mixtures(number)] for number in range(len(self))]
        self.expert_weights = [torch.stack(of_layer) for of_layer in zip(*weights, strict=True)]  # type: ignore[arg-type]
        return logits_MbC

    def _begin_pass(self, num_examples: int, training: bool) -> None:
        is_random = training and self.gates[0].hard
        self._uniforms = [gates.drawn(num_examples) for gates in self.gates] if is_random else None

    def _output_of(self, number: int, x_bCss: Tensor) -> Tensor:
        uniforms = None if self._uniforms is None else [uniform[number] for uniform in self._uniforms]
        return self._networks[number](x_bCss, uniforms=uniforms)

    def _mixtures(self, number: int) -> list[MixtureLayerModule]:
        """Return the mixtures of one network, in order."""
        module = self._networks[number]
        assert isinstance(module, MixtureModule)
        return module.mixtures

    def split(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool = False
    ) -> "GatedModuleStack":
        modules = [deepcopy(module) for module in self._networks]
        trees = []
        for number, (layer, gates) in enumerate(zip(self._mixtures(0), self.gates, strict=True)):
            grown = gates.with_twins(experts[number], flat)
            trees.append(grown.tree)
            weight_MKf, bias_MK = _new_rows(layer, grown.num_branches - gates.num_branches, generators)
            for network, module in enumerate(modules):
                assert isinstance(module, MixtureModule)
                old = module.mixtures[number]
                rows = (weight_MKf[network], bias_MK[network])
                module.layers[list(module.layers).index(old)] = _with_twin(
                    old, experts[number][network], grown, network, *rows
                )
        structure = replace(self.structure, mixture={"hard": self.gates[0].hard, "gates": trees})
        return GatedModuleStack(modules, structure, self.parameters.device)

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Self:
        check_trees(state["structure"]["mixture"]["gates"], len(state["parameters"]))
        return super().from_state(state, device)


def _num_mixtures(structure: Structure) -> int:
    """Return the number of blocks that become mixtures."""
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
    """Return the untrained network with the index `number`, with the mixtures of a structure."""
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
            _set_gate(layer, weight[0], bias[0])
    if draw:
        draw(network.head, generator)
    return network


def _new_rows(layer: MixtureLayerModule, num_new: int, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Return random weights [M, num_new, f] and biases [M, num_new] for new branches of the gates of a mixture."""
    weight, bias = draw_linear(num_new, layer.num_features, generators)
    if isinstance(layer.features, nn.Flatten):
        return weight, bias
    # The numbers are drawn cell by cell, but the features are ordered channel by channel.
    return weight.unflatten(-1, (GRID * GRID, -1)).transpose(-1, -2).flatten(-2), bias


def _set_gate(layer: MixtureLayerModule, weight_Kf: Tensor, bias_K: Tensor) -> None:
    assert layer.gate is not None
    with torch.no_grad():
        layer.gate.weight.copy_(weight_Kf)
        layer.gate.bias.copy_(bias_K)


def _with_twin(
    layer: MixtureLayerModule, expert: int, gates: Gates, network: int, weight_Kf: Tensor, bias_K: Tensor
) -> MixtureLayerModule:
    """Return a mixture with a copy of one of its experts, the twin, as a new last expert."""
    experts = [*layer.experts, deepcopy(layer.experts[expert])]
    splits = gates.splits[network]
    grown = MixtureLayerModule(experts, layer.features, layer.num_features, gates.root, splits, gates.hard)
    grown.to(next(iter(layer.experts[0].parameters())).device)
    if layer.gate is not None:
        weight_Kf = torch.cat([layer.gate.weight, weight_Kf.to(layer.gate.weight)])
        bias_K = torch.cat([layer.gate.bias, bias_K.to(layer.gate.bias)])
    _set_gate(grown, weight_Kf, bias_K)
    return grown
