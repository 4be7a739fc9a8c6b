"""What mixtures have in common: experts under gates, which can be split."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision.networks.gates import Gates, Noise
from vision.networks.stack import Stack


class GatedStack(Stack):
    """M networks, some layers of which are mixtures of experts, all with as many.

    Shapes: M networks, b examples, E experts.
    """

    gates: list[Gates]
    """One for each mixture."""
    expert_weights: list[Tensor]
    """Of each mixture, [M, b, E]: how the last pass weighed its experts."""

    @property
    def num_experts(self) -> int:
        return self.gates[0].num_experts

    def draw_from(self, noise: Noise) -> None:
        """What hard gates draw from in training."""
        for gates in self.gates:
            gates.noise = noise

    def forget(self) -> None:
        for gates in self.gates:
            gates.forget()

    def logits_of_many(self, x: Tensor) -> Tensor:
        """As of every stack; `expert_weights` are those of all examples."""
        if x.shape[1] <= self.examples_at_once:
            return self.logits(x)
        logits, weights = [], []
        for part in x.split(self.examples_at_once, dim=1):
            logits.append(self.logits(part))
            weights.append(self.expert_weights)
        self.expert_weights = [torch.cat(of_mixture, dim=1) for of_mixture in zip(*weights, strict=True)]
        return torch.cat(logits, dim=1)

    def split(self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator]) -> "GatedStack":
        """A new stack in which one expert of each mixture has a twin; this one is not changed.

        The twins are equal, and share what the one had by a new gate, drawn at random: every output stays as it
        was, to rounding, with soft gates and with hard ones in testing.

        Args:
            experts: which one, mixture by mixture and network by network.
            generators: one a network, for its new gates.
        """
        return self._grown(experts, generators, flat=False)

    def split_flat(self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator]) -> "GatedStack":
        """As `split`, but the twin is a further entry of one flat softmax, its row of the gate drawn at random.

        It takes weight from all experts and not from its twin alone: outputs jump. It is what the tree is for. (A
        copied row would jump too, a weight p becoming 2p / (1 + p), and equal twins with equal rows never part.)

        Raises:
            ValueError: some expert has been split under a tree.
        """
        if any(gates.splits[0] for gates in self.gates):
            raise ValueError("a tree of gates does not become flat: split_flat follows split_flat alone")
        return self._grown(experts, generators, flat=True)

    @abstractmethod
    def _grown(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool
    ) -> "GatedStack":
        """With a twin of one expert of each mixture."""

    def routing(self, x: Tensor) -> list[dict[str, Any]]:
        """How the first mixture of each network weighs its experts, and its tree: weights [b, E], root, splits.

        Args:
            x: [1, b, ...].
        """
        self.logits_of_many(x)
        gates = self.gates[0]
        return [
            {"weights": weights_bE.cpu().numpy(), "root": gates.root, "splits": splits}
            for weights_bE, splits in zip(self.expert_weights[0], gates.splits, strict=True)
        ]
