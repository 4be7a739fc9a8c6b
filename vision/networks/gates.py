"""The gates that weigh the experts of a mixture: a tree of gates (appendix A of the paper), or one flat softmax.

A tree has a root with R branches (no root if the mixture began with one expert), and a node with two branches for
every split since then. Each node is a softmax over its branches, linear in the features of the layer's input. The
weight of an expert is the product of the probabilities of the branches that lead to it. So the two halves of a split
expert share its weight, and as long as they are equal, the split does not change the output of the layer. A flat gate
is a root that gets more branches.

Shapes: M networks, b examples, n nodes, K branches, E experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Noise = Callable[[tuple[int, ...]], Tensor]
"""A function that returns uniform numbers in [0, 1), [M, *shape]. Each network has a generator of its own."""


def expert_paths(root: int, splits: Sequence[int]) -> list[list[int]]:
    """Return for each expert the numbers of the branches that lead to it, from the root on.

    Args:
        root: number of branches of the root, which have the first numbers; 0 for one expert without a gate.
        splits: the expert that each split halved, in order. This expert keeps the first of the two new branches. Its
            twin, which becomes the last expert, gets the second.
    """
    paths = [[branch] for branch in range(root)] or [[]]
    for number, expert in enumerate(splits):
        first = root + 2 * number
        paths.append([*paths[expert], first + 1])
        paths[expert] = [*paths[expert], first]
    return paths


class Gates:
    """The gates of one mixture layer of M networks. Each network may have split different experts.

    Args:
        root: number of branches of the root.
        splits: per network, the expert that each split halved, see `expert_paths`. All networks have equally many.
        hard: if True, each node passes the whole weight to one branch. In training the branch is drawn by its
            probability, and the gradient is passed straight through (version 1 of the paper). In evaluation it is the
            likeliest branch. The choice is made node by node, so that a split does not change the output. An argmax
            over all experts would change it: both halves of the likeliest expert may be less likely than the next.
        device: where the gates are computed.
    """

    def __init__(self, root: int, splits: Sequence[Sequence[int]], hard: bool, device: torch.device):
        self.root = root
        self.splits = [list(experts) for experts in splits]
        self.hard = hard
        self.noise: Noise | None = None
        """What hard gates draw branches with in training."""
        paths_M = [expert_paths(root, experts) for experts in self.splits]
        self._on_path_MKE = torch.zeros(len(paths_M), self.num_branches, self.num_experts, device=device)
        """1 where a branch is on the path to an expert."""
        for network, paths in enumerate(paths_M):
            for expert, path in enumerate(paths):
                self._on_path_MKE[network, path, expert] = 1
        self._saved: tuple[Tensor, ...] = ()

    @property
    def num_experts(self) -> int:
        """E, the number of experts."""
        return max(self.root, 1) + len(self.splits[0])

    @property
    def num_branches(self) -> int:
        """K, the number of branches of all nodes together."""
        return self.root + 2 * len(self.splits[0])

    def with_twins(self, experts: Sequence[int], flat: bool) -> "tuple[Gates, int]":
        """Return gates in which one expert of each network has a twin, and the number of new branches.

        Args:
            experts: one per network.
            flat: if True, the twin is a further branch of the root (or the second of two, if there was no gate);
                else a node with two branches takes the place of the expert.
        """
        if flat:
            root = self.num_experts + 1
            return Gates(root, self.splits, self.hard, self._on_path_MKE.device), root - self.root
        splits = [[*before, expert] for before, expert in zip(self.splits, experts, strict=True)]
        return Gates(self.root, splits, self.hard, self._on_path_MKE.device), 2

    def weights(self, logits_MbK: Tensor, training: bool) -> Tensor:
        """Return the weight of each expert for each example, [M, b, E]. The weights of an example sum to 1.

        Args:
            logits_MbK: logits of all branches.
            training: if True, save what `backward` needs; hard gates draw branches.
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
        """Return the gradient with respect to the logits of the last call in training, [M, b, K]."""
        if self.hard:
            probability_MbK, chosen_MbK, failed_MbE = self._saved
            # Straight-through gradients at each node: the weight of an expert is the product of the choices on its
            # path, and a choice gets the gradient of its probability. So a branch gets gradient from those experts
            # below it for which all other choices on the path are made.
            others_MbKE = failed_MbE[:, :, None] - (1 - chosen_MbK)[..., None]
            reached_MbKE = (others_MbKE == 0) * self._on_path_MKE[:, None]
            d_probability = torch.einsum("mbke,mbe->mbk", reached_MbKE, d_weights_MbE)
            d_log = d_probability.mul_(probability_MbK)
        else:
            probability_MbK, weights_MbE = self._saved
            d_log = d_weights_MbE * weights_MbE
            if self.splits[0]:
                d_log = torch.bmm(d_log, self._on_path_MKE.transpose(1, 2))
        total = self._apply_per_node(d_log, lambda d: d.sum(-1, keepdim=True).expand_as(d))
        return d_log.addcmul_(probability_MbK, total, value=-1)

    def free_activations(self) -> None:
        """Free what was saved for `backward`."""
        self._saved = ()

    def _hard_weights(self, probability_MbK: Tensor, training: bool) -> Tensor:
        """Return 1 for the expert that the choices of all nodes lead to and 0 for the others, [M, b, E]."""
        if training:
            if self.noise is None:
                raise RuntimeError("hard gates draw branches in training: call set_gate_noise() first")
            num_nodes = bool(self.root) + len(self.splits[0])
            noise_Mbn = self.noise((probability_MbK.shape[1], num_nodes)).to(probability_MbK.device)
            chosen_MbK = self._apply_per_node(probability_MbK, _draw_one_hot, noise_Mbn)
        else:
            chosen_MbK = self._apply_per_node(probability_MbK, _argmax_one_hot)
        # The number of branches on an expert's path that were not chosen.
        failed_MbE = torch.bmm(1 - chosen_MbK, self._on_path_MKE)
        if training:
            self._saved = (probability_MbK, chosen_MbK, failed_MbE)
        return (failed_MbE == 0).to(failed_MbE.dtype)

    def _apply_per_node(
        self, value_MbK: Tensor, function: Callable[..., Tensor], noise_Mbn: Tensor | None = None
    ) -> Tensor:
        """Return the results of `function` for each node, joined to [M, b, K].

        Args:
            value_MbK: a value per branch.
            function: maps the values of a node, [..., its branches], to a tensor of the same shape. With noise it
                gets one number per node, [...], as a second argument.
            noise_Mbn: a number per node.
        """
        root, parts = self.root, []
        start = int(root > 0)
        if root:
            noise = () if noise_Mbn is None else (noise_Mbn[..., 0],)
            parts.append(function(value_MbK[..., :root], *noise))
        if self.splits[0]:
            pairs = value_MbK[..., root:].unflatten(-1, (-1, 2))
            noise = () if noise_Mbn is None else (noise_Mbn[..., start:],)
            parts.append(function(pairs, *noise).flatten(-2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _draw_one_hot(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return a one-hot choice over the last dimension, drawn by probability with a uniform number in [0, 1)."""
    index = (probability.cumsum(-1)[..., :-1] <= uniform[..., None]).sum(-1)
    return torch.nn.functional.one_hot(index, probability.shape[-1]).to(probability.dtype)


def _argmax_one_hot(probability: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(probability.argmax(-1), probability.shape[-1]).to(probability.dtype)
