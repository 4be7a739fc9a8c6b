"""One network with mixtures of experts as a torch.nn.Module, written for clarity and not for speed.

These modules have three uses: tests compare the results of stacks with the results of modules, the FLOPs of a stack are
counted on a module, and trained networks are deployed as modules.

The gates of a mixture form a tree. Each node of the tree has several branches, which lead to other nodes or to experts
(see `gates`).

Shapes: b examples, E experts, n nodes of the tree, K branches of all nodes together, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision.networks.gates import expert_paths


class MixtureLayerModule(nn.Module):
    """A mixture of experts: the weighted sum of relu(expert output). A tree of gates computes the weights.

    The experts of a VGG end with ReLU and pooling, so their outputs are never negative. For these experts, the ReLU of
    the mixture changes nothing.

    Args:
        experts: the experts. Each is a leaf of the tree of gates.
        features: module that maps the input [b, ...] to the features that the gates read, [b, num_features].
        num_features: number of features that the gates read.
        root: number of branches of the root, see `gates.expert_paths`.
        splits: the experts that were split, in order, see `gates.expert_paths`.
        hard: if True, each node gives the weight 1 to one of its branches and 0 to its other branches.
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
        """For each expert, the indices of the branches on its path from the root."""
        self.branches_per_node = ([root] if root else []) + [2] * len(splits)
        """Number of branches of each node."""
        self.hard = hard
        self.experts, self.features = nn.ModuleList(experts), features
        self.nodes = nn.ModuleList(nn.Linear(num_features, branches) for branches in self.branches_per_node)

    def forward(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the experts' outputs.

        Args:
            x: input of the layer, [b, ...].
            uniform_bn: random numbers with which hard gates choose branches in training, see `weights`.
        """
        weights_bE = self.weights(x, uniform_bn)
        outputs = [expert(x).relu() for expert in self.experts]
        return sum(weights_bE[:, e].view(-1, *[1] * (output.dim() - 1)) * output for e, output in enumerate(outputs))

    def weights(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """Return the weight of each expert for each example, [b, E].

        Args:
            x: input of the layer, [b, ...].
            uniform_bn: for hard gates in training, a uniform random number in [0, 1) for each example and node. The
                node chooses its branch with this number. If None, each node chooses its most likely branch.
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
                # Straight-through gradient: the new `probability` has the value of `one_hot`, but the gradient of the
                # old `probability`.
                probability = one_hot + probability - probability.detach()
            branches.append(probability)
        if not branches:
            return x.new_ones(len(x), 1)
        branches_bK = torch.cat(branches, dim=-1)
        return torch.stack([branches_bK[:, path].prod(-1) for path in self.paths], dim=-1)


class MixtureModule(nn.Module):
    """A network with mixtures. It maps a batch of examples to logits [b, C].

    Args:
        layers: all layers except the last, in order. The mixtures are instances of `MixtureLayerModule`.
        head: the last layer, which is not a mixture.
    """

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    def forward(self, x: Tensor, uniforms: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits, [b, C].

        Args:
            x: examples, [b, ...].
            uniforms: random numbers with which hard gates choose branches in training, one tensor [b, n] per mixture
                (see `uniform_bn` of `MixtureLayerModule.weights`). If None, each node chooses its most likely branch.
        """
        uniform_bn = iter(uniforms or [])
        for layer in self.layers:
            is_mixture = isinstance(layer, MixtureLayerModule)
            x = layer(x, next(uniform_bn)) if is_mixture and uniforms is not None else layer(x)
        return self.head(x)


def linear_module(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a torch.nn.Linear with copies of the given parameters.

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
    """Copy the parameters of the gates to a `MixtureLayerModule`, which stores them in one linear layer per node.

    Each row of `weight` and `bias` belongs to one branch of the tree of gates. The rows of the first node come first,
    then the rows of the second node, and so on.

    Args:
        layer: the module. The parameters of its nodes are changed in place.
        weight: the weights of all branches, [K, features].
        bias: the biases of all branches, [K].
    """
    sizes = layer.branches_per_node
    with torch.no_grad():
        for node, w, b in zip(layer.nodes, weight.split(sizes), bias.split(sizes), strict=True):
            assert isinstance(node, nn.Linear)
            node.weight.copy_(w)
            node.bias.copy_(b)
