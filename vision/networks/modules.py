"""Networks with mixtures of experts as torch modules.

`GatedModuleStack` trains such modules. Mixtures in multilayer perceptrons have hand-written gradients (`MixtureStack`);
they are deployed as such modules, and tests compare both. For the tree of gates, see `gates`.

Shapes: b examples, E experts, n nodes of the tree, K branches of all nodes together, C classes.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from vision.networks.gates import argmax_one_hot, draw_one_hot, expert_paths


class MixtureLayerModule(nn.Module):
    """A mixture of experts: the weighted sum of the outputs of experts. A tree of gates computes the weights.

    Args:
        features: module that maps the input [b, ...] to the features that the gates read, [b, num_features].
        root, splits: the tree of gates, see `gates.expert_paths`.
        hard: if True, each node gives the weight 1 to one of its branches and 0 to its other branches.
        activation: module that is applied to the output of each expert before the sum, for example ReLU. None if there
            is no activation.
    """

    path_index: Tensor

    def __init__(
        self,
        experts: Sequence[nn.Module],
        features: nn.Module,
        num_features: int,
        root: int,
        splits: Sequence[int],
        hard: bool,
        activation: nn.Module | None = None,
    ):
        super().__init__()
        self.root, self.splits, self.hard, self.num_features = root, list(splits), hard, num_features
        self.num_branches = root + 2 * len(splits)
        self.experts, self.features = nn.ModuleList(experts), features
        self.activation = activation or nn.Identity()
        self.gate = nn.Linear(num_features, self.num_branches) if self.num_branches else None
        """Computes the logits of all branches. The branches of the root come first, then those of each split."""
        # The branches on the path to each expert, [E, longest path]. Shorter paths are filled with the index K, which
        # `weights` gives the probability 1.
        paths = expert_paths(root, splits)
        longest = max(map(len, paths))
        filled = [[*path, *[self.num_branches] * (longest - len(path))] for path in paths]
        self.register_buffer("path_index", torch.tensor(filled, dtype=torch.long), persistent=False)
        self.last_weights_bE: Tensor | None = None
        """The weights of the experts in the last forward pass. They have no gradient."""

    def forward(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the experts' outputs. For the arguments, see `weights`."""
        weights_bE = self.weights(x, uniform_bn)
        self.last_weights_bE = weights_bE.detach()
        outputs = [self.activation(expert(x)) for expert in self.experts]
        if self.gate is None:
            return outputs[0]
        shape = (-1, *[1] * (outputs[0].dim() - 1))
        return sum(weights_bE[:, e].view(shape) * output for e, output in enumerate(outputs))

    def weights(self, x: Tensor, uniform_bn: Tensor | None = None) -> Tensor:
        """Return the weight of each expert for each example, [b, E].

        Args:
            x: input of the layer, [b, ...].
            uniform_bn: for hard gates in training, a uniform random number in [0, 1) for each example and node. The
                node chooses its branch with this number. If None, each node chooses its most likely branch.
        """
        if self.gate is None:
            return torch.ones(len(x), 1, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        logits_bK = self.gate(self.features(x)).to(torch.promote_types(x.dtype, torch.float32))
        uniform = uniform_bn if self.training else None
        parts = []
        if self.root:
            parts.append(self._choose(logits_bK[:, : self.root], None if uniform is None else uniform[:, 0]))
        if self.splits:
            of_pairs = None if uniform is None else uniform[:, bool(self.root) :]
            parts.append(self._choose(logits_bK[:, self.root :].unflatten(-1, (-1, 2)), of_pairs).flatten(-2))
        branches_bK1 = torch.cat([*parts, logits_bK.new_ones(len(x), 1)], dim=-1)
        return _product(branches_bK1[:, self.path_index])

    def _choose(self, logits: Tensor, uniform: Tensor | None) -> Tensor:
        """Return the weight of each branch of some nodes, in the shape of the logits, [..., branches of the node]."""
        probability = logits.softmax(-1)
        if not self.hard:
            return probability
        one_hot = argmax_one_hot(probability) if uniform is None else draw_one_hot(probability, uniform)
        # Straight-through gradient: the result has the value of `one_hot`, but the gradient of `probability`.
        return one_hot + probability - probability.detach()


class MixtureModule(nn.Module):
    """A network with mixtures: layers, some of which are instances of `MixtureLayerModule`, and a head."""

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    @property
    def mixtures(self) -> list[MixtureLayerModule]:
        """The layers that are mixtures, in order."""
        return [layer for layer in self.layers if isinstance(layer, MixtureLayerModule)]

    def forward(self, x: Tensor, uniforms: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits, [b, C], for examples [b, ...].

        `uniforms` has, for each mixture, the argument `uniform_bn` of `MixtureLayerModule.weights`.
        """
        uniform_bn = iter(uniforms or [])
        for layer in self.layers:
            is_mixture = isinstance(layer, MixtureLayerModule)
            x = layer(x, next(uniform_bn)) if is_mixture and uniforms is not None else layer(x)
        return self.head(x)


def linear_module(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a torch.nn.Linear with copies of the given parameters, [outputs, inputs] and [outputs]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return linear


def _product(factors: Tensor) -> Tensor:
    """Return the product over the last dimension."""
    # The gradient of torch.prod makes the host wait for a GPU, so it cannot be part of a CUDA graph.
    return reduce(torch.mul, factors.unbind(-1)) if factors.is_cuda else factors.prod(-1)
