"""One mixture network as a plain torch.nn.Module, written the way one would explain it.

Stacks must follow it step by step (tests), its FLOPs are counted, and it is what a run deploys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision.networks.gates import paths_of


class PlainMixtureLayer(nn.Module):
    """Experts (a linear layer and ReLU each) under a tree of gates.

    Args:
        num_in: inputs.
        num_out: width of an expert.
        root: branches of the root, see gates.paths_of.
        splits: which expert each split halved.
        hard: one branch at each node alone.
    """

    def __init__(self, num_in: int, num_out: int, root: int, splits: Sequence[int], hard: bool):
        super().__init__()
        self.paths = paths_of(root, splits)
        self.branches_of_nodes = ([root] if root else []) + [2] * len(splits)
        self.hard = hard
        self.experts = nn.ModuleList(nn.Linear(num_in, num_out) for _ in self.paths)
        self.nodes = nn.ModuleList(nn.Linear(num_in, branches) for branches in self.branches_of_nodes)

    def all_linear(self) -> list[nn.Linear]:
        """Experts, then nodes: in the order of a stack's rows."""
        return [linear for linear in (*self.experts, *self.nodes) if isinstance(linear, nn.Linear)]

    def forward(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        weights_bE = self.weights(x, uniform_bn)
        outputs = [expert(x).relu() for expert in self.experts]
        return sum(weights_bE[:, e, None] * output for e, output in enumerate(outputs))

    def weights(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """[b, E].

        Args:
            x: [b, num_in].
            uniform_bn: hard gates in training: a number in [0, 1) for each example and node.
        """
        branches = []
        for number, node in enumerate(self.nodes):
            probability = node(x).softmax(-1)
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
    """A perceptron whose hidden layers are mixtures: [b, i] to logits [b, C].

    Args:
        sizes: inputs, hidden widths, classes.
        trees: (root, splits) of each hidden layer.
        hard: as for the layers.
    """

    def __init__(self, sizes: Sequence[int], trees: Sequence[tuple[int, Sequence[int]]], hard: bool):
        super().__init__()
        self.layers = nn.ModuleList(
            PlainMixtureLayer(num_in, num_out, root, splits, hard)
            for num_in, num_out, (root, splits) in zip(sizes, sizes[1:-1], trees, strict=False)
        )
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def mixture(self, layer: int) -> PlainMixtureLayer:
        """Hidden layer 1 or 2."""
        mixture = self.layers[layer - 1]
        assert isinstance(mixture, PlainMixtureLayer)
        return mixture

    def forward(self, x: Tensor, uniforms: Sequence[Tensor] | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, None if uniforms is None else uniforms[number])
        return self.head(x)
