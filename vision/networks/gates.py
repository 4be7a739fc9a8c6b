"""Who weighs the experts of a mixture: a tree of gates (appendix A of the paper), or one flat softmax.

A tree has a root of R branches, none when it began with one expert, and a node of two branches for every split
since. Each node is a softmax of its own over its branches, linear in the layer's input; an expert's weight is the
product over the branches that lead to it. So the two halves of a split expert share what it had: while they are
equal, nothing that the layer computes has changed. A flat gate is a root that grows.

Shapes: M networks, b examples, K branches, E experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Noise = Callable[[tuple[int, ...]], Tensor]
"""Uniform numbers in [0, 1), [M, ...], each network's from a generator of its own."""


def paths_of(root: int, splits: Sequence[int]) -> list[list[int]]:
    """The branches that lead to each expert, from the root on.

    Args:
        root: branches of the root, numbered first; 0 is one expert without a gate.
        splits: the expert that each split halved, in order: it keeps the first of the two new branches, and its
            new twin, numbered last, gets the second.
    """
    paths = [[branch] for branch in range(root)] or [[]]
    for number, expert in enumerate(splits):
        first = root + 2 * number
        paths.append([*paths[expert], first + 1])
        paths[expert] = [*paths[expert], first]
    return paths


class Gates:
    """The gates of one mixture layer of M networks, which may have split different experts equally often.

    Args:
        root: branches of the root.
        splits: one list a network, see `paths_of`.
        hard: at each node one branch alone: drawn by its probability in training, with the gradient passed
            straight through (v1 of the paper); the likelier one in testing. Deciding node by node keeps a split
            exact, where an argmax over the leaves would not: two halves of the likeliest expert may both be less
            likely than the next.
    """

    def __init__(self, root: int, splits: Sequence[Sequence[int]], hard: bool, device: torch.device):
        self.root = root
        self.splits = [list(one) for one in splits]
        self.hard = hard
        self.noise: Noise | None = None
        paths_M = [paths_of(root, one) for one in self.splits]
        self._leads_MKE = torch.zeros(len(paths_M), self.num_branches, self.num_experts, device=device)
        for network, paths in enumerate(paths_M):
            for expert, path in enumerate(paths):
                self._leads_MKE[network, path, expert] = 1
        self._kept: tuple[Tensor, ...] = ()

    @property
    def num_experts(self) -> int:
        return max(self.root, 1) + len(self.splits[0])

    @property
    def num_branches(self) -> int:
        return self.root + 2 * len(self.splits[0])

    def with_twins(self, experts: Sequence[int], flat: bool) -> "tuple[Gates, int]":
        """Gates of one expert more, the twin of one in each network, and how many branches they have more.

        Args:
            experts: which one, network by network.
            flat: a further branch of the root (two, where there was no gate yet); else a node of two branches.
        """
        if flat:
            root = self.num_experts + 1
            return Gates(root, self.splits, self.hard, self._leads_MKE.device), root - self.root
        splits = [[*one, expert] for one, expert in zip(self.splits, experts, strict=True)]
        return Gates(self.root, splits, self.hard, self._leads_MKE.device), 2

    def weights(self, logits_MbK: Tensor, training: bool) -> Tensor:
        """Weight of each expert for each example: [M, b, E], summing to 1.

        Args:
            logits_MbK: of all branches.
            training: keep what `backward` needs; hard gates draw.
        """
        log_probability_MbK = self._at_each_node(logits_MbK, lambda z: z.log_softmax(-1))
        if self.hard:
            return self._hard_weights(log_probability_MbK.exp(), training)
        if not self.splits[0]:
            probability_MbK = weights_MbE = log_probability_MbK.exp_()
        else:
            weights_MbE = torch.bmm(log_probability_MbK, self._leads_MKE).exp_()
            probability_MbK = log_probability_MbK.exp_()
        if training:
            self._kept = (probability_MbK, weights_MbE)
        return weights_MbE

    def backward(self, d_weights_MbE: Tensor) -> Tensor:
        """The gradient with respect to the last training logits, [M, b, K]."""
        if self.hard:
            probability_MbK, chosen_MbK, failed_MbE = self._kept
            # Straight through at each node: the weight of an expert is the product of its branches' choices, and
            # a choice takes the gradient for its probability. So a branch hears from the experts below it that
            # all other choices on their path would have let through.
            others_MbKE = failed_MbE[:, :, None] - (1 - chosen_MbK)[..., None]
            reached_MbKE = (others_MbKE == 0) * self._leads_MKE[:, None]
            d_probability = torch.einsum("mbke,mbe->mbk", reached_MbKE, d_weights_MbE)
            d_log = d_probability.mul_(probability_MbK)
        else:
            probability_MbK, weights_MbE = self._kept
            d_log = d_weights_MbE * weights_MbE
            if self.splits[0]:
                d_log = torch.bmm(d_log, self._leads_MKE.transpose(1, 2))
        total = self._at_each_node(d_log, lambda d: d.sum(-1, keepdim=True).expand_as(d))
        return d_log.addcmul_(probability_MbK, total, value=-1)

    def forget(self) -> None:
        """Let go of what `backward` needed."""
        self._kept = ()

    def _hard_weights(self, probability_MbK: Tensor, training: bool) -> Tensor:
        if training:
            if self.noise is None:
                raise RuntimeError("hard gates draw in training: give them noise")
            num_nodes = bool(self.root) + len(self.splits[0])
            noise_Mbn = self.noise((probability_MbK.shape[1], num_nodes)).to(probability_MbK.device)
            chosen_MbK = self._at_each_node(probability_MbK, _drawn, noise_Mbn)
        else:
            chosen_MbK = self._at_each_node(probability_MbK, _likeliest)
        failed_MbE = torch.bmm(1 - chosen_MbK, self._leads_MKE)
        if training:
            self._kept = (probability_MbK, chosen_MbK, failed_MbE)
        return (failed_MbE == 0).to(failed_MbE.dtype)

    def _at_each_node(
        self, value_MbK: Tensor, of_node: Callable[..., Tensor], noise_Mbn: Tensor | None = None
    ) -> Tensor:
        """`of_node` on the branches of each node, its last dimension (and its noise, where there is some)."""
        root, parts = self.root, []
        start = int(root > 0)
        if root:
            noise = () if noise_Mbn is None else (noise_Mbn[..., 0],)
            parts.append(of_node(value_MbK[..., :root], *noise))
        if self.splits[0]:
            pairs = value_MbK[..., root:].unflatten(-1, (-1, 2))
            noise = () if noise_Mbn is None else (noise_Mbn[..., start:],)
            parts.append(of_node(pairs, *noise).flatten(-2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _drawn(probability: Tensor, uniform: Tensor) -> Tensor:
    """One-hot over the last dimension, drawn by probability."""
    index = (probability.cumsum(-1)[..., :-1] <= uniform[..., None]).sum(-1)
    return torch.nn.functional.one_hot(index, probability.shape[-1]).to(probability.dtype)


def _likeliest(probability: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(probability.argmax(-1), probability.shape[-1]).to(probability.dtype)
