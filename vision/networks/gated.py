"""The interface of stacks with mixtures of experts, whose experts can be split."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision.networks.gates import Gates, Noise
from vision.networks.stack import Stack


class GatedStack(Stack):
    """M networks, some layers of which are mixtures of experts. All mixtures have the same number of experts.

    Shapes: M networks, b examples, E experts.
    """

    gates: list[Gates]
    """The gates of each mixture."""
    expert_weights: list[Tensor]
    """Per mixture, [M, b, E]: the weights of the experts in the last pass."""

    @property
    def num_experts(self) -> int:
        return self.gates[0].num_experts

    def set_gate_noise(self, noise: Noise) -> None:
        """Set the random numbers with which hard gates draw branches in training."""
        for gates in self.gates:
            gates.noise = noise

    def free_activations(self) -> None:
        for gates in self.gates:
            gates.free_activations()

    def logits_of_many(self, x: Tensor) -> Tensor:
        """Return the logits of any number of examples, [M, n, C]; `expert_weights` are then those of all examples.

        Args:
            x: [M, n, ...] or [G, n, ...].
        """
        if x.shape[1] <= self.examples_at_once:
            return self.logits(x)
        logits, weights = [], []
        for part in x.split(self.examples_at_once, dim=1):
            logits.append(self.logits(part))
            weights.append(self.expert_weights)
        self.expert_weights = [torch.cat(parts, dim=1) for parts in zip(*weights, strict=True)]
        return torch.cat(logits, dim=1)

    def split(self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator]) -> "GatedStack":
        """Return a new stack in which one expert of each mixture has a twin. This stack does not change.

        The twins are equal and share the weight of the split expert by a new, random gate. So every output is equal up
        to rounding, for soft gates always and for hard gates in evaluation.

        Args:
            experts: per mixture and network, the expert that is split.
            generators: one per network, which draw the new gates.
        """
        return self._with_twins(experts, generators, flat=False)

    def split_flat(self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator]) -> "GatedStack":
        """Return a new stack as `split` does, but with the twin as a further entry of one flat softmax.

        The new row of the gate is random. The twin takes weight from all experts, so that outputs jump; the tree of
        gates exists to avoid this. A copied row would not help: outputs would jump too, as a weight p would become
        2p / (1 + p), and equal twins with equal rows would stay equal for ever.

        Args:
            experts: per mixture and network, the expert that is split.
            generators: one per network, which draw the new rows.

        Raises:
            ValueError: an expert has been split under a tree before.
        """
        if any(gates.splits[0] for gates in self.gates):
            raise ValueError("split_flat cannot follow split: a tree of gates cannot become flat")
        return self._with_twins(experts, generators, flat=True)

    @abstractmethod
    def _with_twins(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool
    ) -> "GatedStack":
        """Return a new stack in which one expert of each mixture has a twin, see `split` and `split_flat`."""

    def routing(self, x: Tensor) -> list[dict[str, Any]]:
        """Return for each network how the gates of its first mixture weigh the experts, and the tree of these gates.

        Each dictionary contains "weights" [b, E], "root" and "splits" (see `gates.expert_paths`).

        Args:
            x: examples, [1, b, ...].
        """
        self.logits_of_many(x)
        gates = self.gates[0]
        return [
            {"weights": weights_bE.cpu().numpy(), "root": gates.root, "splits": splits}
            for weights_bE, splits in zip(self.expert_weights[0], gates.splits, strict=True)
        ]
