"""One mixture network as a plain torch.nn.Module, written the way one would explain it.

Stacks must follow it step by step (tests), its FLOPs are counted, and it is what a run deploys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision.networks.gates import paths_of


class PlainMixtureLayer(nn.Module):
    """Experts under a tree of gates. What an expert gives goes through ReLU, which leaves that of a block as it is.

    Args:
        experts: as many modules as the tree has leaves.
        features: what gates read of the input: [b, ...] to [b, num_features].
        num_features: of it.
        root: branches of the root, see gates.paths_of.
        splits: which expert each split halved.
        hard: one branch at each node alone.
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
        self.paths = paths_of(root, splits)
        self.branches_of_nodes = ([root] if root else []) + [2] * len(splits)
        self.hard = hard
        self.experts, self.features = nn.ModuleList(experts), features
        self.nodes = nn.ModuleList(nn.Linear(num_features, branches) for branches in self.branches_of_nodes)

    def forward(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        weights_bE = self.weights(x, uniform_bn)
        outputs = [expert(x).relu() for expert in self.experts]
        return sum(weights_bE[:, e].view(-1, *[1] * (output.dim() - 1)) * output for e, output in enumerate(outputs))

    def weights(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """[b, E].

        Args:
            x: [b, ...].
            uniform_bn: hard gates in training: a number in [0, 1) for each example and node.
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


class PlainMixture(nn.Module):
    """Layers, some of them mixtures, and a head: a batch of examples to logits [b, C].

    Args:
        layers: in order.
        head: the last of them, which has no mixture.
    """

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    def forward(self, x: Tensor, uniforms: Sequence[Tensor] | None = None) -> Tensor:
        drawn = iter(uniforms or [])
        for layer in self.layers:
            is_mixture = isinstance(layer, PlainMixtureLayer)
            x = layer(x, next(drawn)) if is_mixture and uniforms is not None else layer(x)
        return self.head(x)


def linear_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer with copies of these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return linear


def set_nodes(layer: PlainMixtureLayer, weight: Tensor, bias: Tensor) -> None:
    """Give the nodes of a layer's gates copies of these rows, branch after branch."""
    rows = layer.branches_of_nodes
    with torch.no_grad():
        for node, w, b in zip(layer.nodes, weight.split(rows), bias.split(rows), strict=True):
            assert isinstance(node, nn.Linear)
            node.weight.copy_(w)
            node.bias.copy_(b)
