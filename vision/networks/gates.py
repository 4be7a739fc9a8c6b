"""The gates that weigh the experts of a mixture: a tree of gates (appendix A of the paper), or one flat softmax.

A tree consists of nodes and experts. Each node has several branches, and each branch leads to a node or to an expert. A
node is a softmax over its branches. The logits of the branches are linear functions of the layer input, or of features
computed from the layer input. The path of an expert consists of the branches from the first node to the expert. The
weight of an expert is the product of the probabilities of the branches on its path.

If a mixture begins with several experts, its first node has one branch per initial expert. In this module, only this
node is called the root. If a mixture begins with one expert, its tree has no root: the first split creates the first
node, which has two branches.

Growth splits an expert in two: the expert and its twin, a copy of it. Each split puts a new node with two branches in
the place of the expert. One branch leads to the expert, the other to its twin. So the expert and its twin share the
weight that the expert had. As long as the expert and its twin are equal, the split does not change the output of the
layer.

A flat softmax is a tree whose only node is the root, with one branch per expert. Growth adds branches to the root. If a
mixture begins with one expert, the first growth creates the root.

Shapes: M networks, b examples, n nodes, K branches, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Noise = Callable[[tuple[int, ...]], Tensor]
"""A function that takes a shape and returns uniform random numbers in [0, 1), [M, *shape]. Each of the M networks has
its own random generator. So a network gets the same numbers, whether it is computed alone or in a stack."""


def expert_paths(root: int, splits: Sequence[int]) -> list[list[int]]:
    """Return, for each expert, the indices of the branches on the path from the first node of the gates to the expert.

    Args:
        root: number of branches of the root, or 0 if there is no root. The branches of the root have the indices 0 to
            root - 1.
        splits: for each split in order, the index of the expert that was split. Each split adds two branches. The first
            leads to the expert, the second to its twin. The index of the twin is the number of experts before the
            split.
    """
    paths = [[branch] for branch in range(root)] or [[]]
    for number, expert in enumerate(splits):
        first = root + 2 * number
        paths.append([*paths[expert], first + 1])
        paths[expert] = [*paths[expert], first]
    return paths


def check_trees(trees: Sequence[Mapping[str, Any]], largest: int) -> None:
    """Raise ValueError if the gates in a file have more than `largest` experts, the most that fit into the file."""
    for tree in trees:
        root, splits = tree["root"], tree["splits"]
        if type(root) is not int or root < 0 or root + max(map(len, splits)) > largest:
            raise ValueError(f"root={root!r} of the gates is not a number of branches from 0 to {largest}")


class Gates:
    """The gates of one mixture layer of M networks. The networks can differ in which experts were split.

    Args:
        root: number of branches of the root, see `expert_paths`.
        splits: for each network, the experts that were split, see `expert_paths`. All networks have the same number of
            splits.
        hard: if True, each node chooses one branch, which gets the weight 1. The other branches of the node get the
            weight 0. In evaluation, a node chooses its most likely branch. In training, a node chooses a branch at
            random, by probability, and the gradient is straight-through (version 1 of the paper). Each node chooses
            separately. If instead the gates chose the expert with the largest weight, a split could change the output
            of the network: it divides the weight of one expert between two, so another expert could then have the
            largest weight.
    """

    def __init__(self, root: int, splits: Sequence[Sequence[int]], hard: bool, device: torch.device):
        self.root = root
        self.splits = [list(experts) for experts in splits]
        self.hard = hard
        self.noise: Noise | None = None
        """Function that returns the random numbers with which hard gates choose branches in training. It is None until
        `GatedStack.set_gate_noise` is called."""
        paths_M = [expert_paths(root, experts) for experts in self.splits]
        self._on_path_MKE = torch.zeros(len(paths_M), self.num_branches, self.num_experts, device=device)
        """For each network, branch and expert: 1 if the branch is on the path to the expert, else 0."""
        for network, paths in enumerate(paths_M):
            for expert, path in enumerate(paths):
                self._on_path_MKE[network, path, expert] = 1
        self._saved: tuple[Tensor, ...] = ()

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        return max(self.root, 1) + len(self.splits[0])

    @property
    def num_branches(self) -> int:
        """Number of branches of all nodes of the gate tree together, K."""
        return self.root + 2 * len(self.splits[0])

    @property
    def tree(self) -> dict[str, Any]:
        """The tree as a dictionary of JSON values: the arguments `root` and `splits`."""
        return {"root": self.root, "splits": self.splits}

    def with_twins(self, experts: Sequence[int], flat: bool) -> "Gates":
        """Return the gates after a split of one expert of each network. New branches have the last indices.

        Args:
            experts: for each network, the index of the expert to split.
            flat: if True, add a branch for the twin (the copy of the expert) to the root. If there is no root, add a
                root with two branches. If False, put a node with two branches in the place of the expert.

        Raises:
            ValueError: if `flat` is True, and the gates are a tree because an expert was split before.
        """
        if not flat:
            splits = [[*before, expert] for before, expert in zip(self.splits, experts, strict=True)]
            return Gates(self.root, splits, self.hard, self._on_path_MKE.device)
        if self.splits[0]:
            raise ValueError(
                "a flat split cannot follow a split that made a tree of gates: give flat=True for all splits or none"
            )
        return Gates(self.num_experts + 1, self.splits, self.hard, self._on_path_MKE.device)

    def drawn(self, num_examples: int) -> Tensor:
        """Return the random numbers with which hard gates choose branches in training, [M, b, n]."""
        if self.noise is None:
            raise RuntimeError("hard gates need random numbers in training: call set_gate_noise() first")
        num_nodes = bool(self.root) + len(self.splits[0])
        return self.noise((num_examples, num_nodes)).to(self._on_path_MKE.device)

    def weights(self, logits_MbK: Tensor, training: bool) -> Tensor:
        """Return the weight of each expert for each example, [M, b, E]. The weights of an example sum to 1.

        Args:
            logits_MbK: logits of all branches.
            training: if True, save what `backward` needs, and let hard gates choose branches at random.
        """
        log_probability_MbK = self._apply_per_node(logits_MbK, lambda z: z.log_softmax(-1))
        if self.hard:
            return self._hard_weights(log_probability_MbK.exp(), training)
        if not self.splits[0]:
            probability_MbK = weights_MbE = log_probability_MbK.exp_()
        else:
            weights_MbE = torch.bmm(log_probability_MbK, self._on_path_MKE).exp_()
            probability_MbK = log_probability_MbK.exp_()
        if training:
            self._saved = (probability_MbK, weights_MbE)
        return weights_MbE

    def backward(self, d_weights_MbE: Tensor) -> Tensor:
        """Return the gradient with respect to the logits of all branches, [M, b, K].

        `d_weights_MbE` is the gradient with respect to what the last call of `weights` with `training=True` returned.
        """
        saved, self._saved = self._saved, ()
        if self.hard:
            probability_MbK, chosen_MbK, failed_MbE = saved
            # Straight-through gradients. Let the choice of a branch be 1 if it was chosen, else 0. The weight of an
            # expert is the product of the choices on its path. So the derivative of the weight with respect to one
            # choice is 1 if all other branches on the path were chosen, else 0. This derivative is used as the
            # derivative with respect to the probability of the branch. To compute it, others_MbKE counts the other
            # branches on the path that were not chosen.
            others_MbKE = failed_MbE[:, :, None] - (1 - chosen_MbK)[..., None]
            reached_MbKE = (others_MbKE == 0) * self._on_path_MKE[:, None]
            d_probability = torch.einsum("mbke,mbe->mbk", reached_MbKE, d_weights_MbE)
            d_log = d_probability.mul_(probability_MbK)
        else:
            probability_MbK, weights_MbE = saved
            d_log = d_weights_MbE * weights_MbE
            if self.splits[0]:
                d_log = torch.bmm(d_log, self._on_path_MKE.transpose(1, 2))
        # Backward pass of log_softmax. d_log contains the gradient with respect to the log-probability of each branch.
        # The gradient with respect to the logit of a branch is d_log - p * total. Here p is the probability of the
        # branch, and `total` is the sum of d_log over all branches of the node.
        total = self._apply_per_node(d_log, lambda d: d.sum(-1, keepdim=True).expand_as(d))
        return d_log.addcmul_(probability_MbK, total, value=-1)

    def _hard_weights(self, probability_MbK: Tensor, training: bool) -> Tensor:
        """Choose one branch of each node, and return the weights of the experts, [M, b, E]."""
        if training:
            chosen_MbK = self._apply_per_node(probability_MbK, draw_one_hot, self.drawn(probability_MbK.shape[1]))
        else:
            chosen_MbK = self._apply_per_node(probability_MbK, argmax_one_hot)
        # For each expert, count the branches on its path that were not chosen. The expert gets the weight 1 only if
        # this count is 0.
        failed_MbE = torch.bmm(1 - chosen_MbK, self._on_path_MKE)
        if training:
            self._saved = (probability_MbK, chosen_MbK, failed_MbE)
        return (failed_MbE == 0).to(failed_MbE.dtype)

    def _apply_per_node(
        self, value_MbK: Tensor, function: Callable[..., Tensor], noise_Mbn: Tensor | None = None
    ) -> Tensor:
        """Apply a function to each node separately, and return the results for all branches, [M, b, K]."""
        root, parts = self.root, []
        if root:
            noise = () if noise_Mbn is None else (noise_Mbn[..., 0],)
            parts.append(function(value_MbK[..., :root], *noise))
        if self.splits[0]:
            pairs = value_MbK[..., root:].unflatten(-1, (-1, 2))
            noise = () if noise_Mbn is None else (noise_Mbn[..., bool(root) :],)
            parts.append(function(pairs, *noise).flatten(-2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def draw_one_hot(probability: Tensor, uniform: Tensor) -> Tensor:
    """Choose a branch of each node at random. Return 1 for the chosen branch and 0 for the others, [..., branches]."""
    index = (probability.cumsum(-1)[..., :-1] <= uniform[..., None]).sum(-1)
    return torch.nn.functional.one_hot(index, probability.shape[-1]).to(probability.dtype)


def argmax_one_hot(probability: Tensor) -> Tensor:
    """Return 1 for the most likely branch of each node and 0 for the others, in the shape of `probability`."""
    return torch.nn.functional.one_hot(probability.argmax(-1), probability.shape[-1]).to(probability.dtype)
