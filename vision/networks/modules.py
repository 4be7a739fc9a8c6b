"""One network with mixtures of experts as a torch.nn.Module, written for clarity and not for speed.

Tests compare stacks with these modules step by step, FLOPs are counted on them, and they are what a run deploys.

Shapes: b examples, E experts, K branches of gates, n nodes of gates, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision.networks.gates import expert_paths


class MixtureLayerModule(nn.Module):
    """A mixture: the sum of the experts' outputs after ReLU, weighed by a tree of gates.

    The outputs of the VGG's experts are not negative, so that ReLU does not change them.

    Args:
        experts: one module per leaf of the tree.
        features: maps the input [b, ...] to what the gates read, [b, num_features].
        num_features: number of features that the gates read.
        root: number of branches of the root, see `gates.expert_paths`.
        splits: the expert that each split halved, see `gates.expert_paths`.
        hard: if True, each node passes the whole weight to one branch.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        features: nn.Module,
        num_features: int,
        root: int,
        splits: Sequence[int],
        hard: bool,
    ):
        super().__init__()
        self.paths = expert_paths(root, splits)
        """Per expert, the branches that lead to it."""
        self.branches_per_node = ([root] if root else []) + [2] * len(splits)
        """The number of branches of each node."""
        self.hard = hard
        self.experts, self.features = nn.ModuleList(experts), features
        self.nodes = nn.ModuleList(nn.Linear(num_features, branches) for branches in self.branches_per_node)

    def forward(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the experts' outputs.

        Args:
            x: [b, ...].
            uniform_bn: see `weights`.
        """
        weights_bE = self.weights(x, uniform_bn)
        outputs = [expert(x).relu() for expert in self.experts]
        return sum(weights_bE[:, e].view(-1, *[1] * (output.dim() - 1)) * output for e, output in enumerate(outputs))

    def weights(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """Return the weight of each expert for each example, [b, E].

        Args:
            x: [b, ...].
            uniform_bn: for hard gates in training, a uniform number in [0, 1) for each example and node, by which
                the branch is drawn.
        """
        branches, features = [], self.features(x)
        for number, node in enumerate(self.nodes):
            probability = node(features).softmax(-1)
            if self.hard:
                if self.training and uniform_bn is not None:
                    chosen = (probability.cumsum(-1)[:, :-1] <= uniform_bn[:, number, None]).sum(-1)
                else:
                    chosen = probability.argmax(-1)
                one_hot = nn.functional.one_hot(chosen, probability.shape[-1])
                probability = one_hot + probability - probability.detach()
            branches.append(probability)
        if not branches:
            return x.new_ones(len(x), 1)
        branches_bK = torch.cat(branches, dim=-1)
        return torch.stack([branches_bK[:, path].prod(-1) for path in self.paths], dim=-1)


class MixtureModule(nn.Module):
    """A network with mixtures: maps a batch of examples to logits [b, C].

    Args:
        layers: in order, some of them `MixtureLayerModule`.
        head: the last layer, which is no mixture.
    """

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    def forward(self, x: Tensor, uniforms: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits, [b, C].

        Args:
            x: examples, [b, ...].
            uniforms: for hard gates in training, `uniform_bn` of each mixture.
        """
        uniform_bn = iter(uniforms or [])
        for layer in self.layers:
            is_mixture = isinstance(layer, MixtureLayerModule)
            x = layer(x, next(uniform_bn)) if is_mixture and uniforms is not None else layer(x)
        return self.head(x)


def linear_module(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a linear layer with copies of these parameters.

    Args:
        weight: [outputs, inputs].
        bias: [outputs].
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return linear


def set_nodes(layer: MixtureLayerModule, weight: Tensor, bias: Tensor) -> None:
    """Copy the parameters of the gates into the nodes of a layer.

    Args:
        layer: its nodes change.
        weight: [K, features], branch after branch.
        bias: [K].
    """
    sizes = layer.branches_per_node
    with torch.no_grad():
        for node, w, b in zip(layer.nodes, weight.split(sizes), bias.split(sizes), strict=True):
            assert isinstance(node, nn.Linear)
            node.weight.copy_(w)
            node.bias.copy_(b)
