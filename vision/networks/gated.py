"""The interface of stacks whose networks contain mixtures of experts. Such a network grows by splitting experts."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from vision.networks.gates import Gates, Noise
from vision.networks.stack import Stack


class GatedStack(Stack):
    """M networks in which some layers are mixtures of experts. All mixtures have the same number of experts.

    A mixture is a layer that returns the weighted sum of the outputs of its experts. Gates compute the weights.

    Shapes: as in `Stack`, and E experts.
    """

    gates: list[Gates]
    """The gates of each mixture, in the order of the layers."""
    expert_weights: list[Tensor]
    """For each mixture, the weights of the experts in the last forward pass, [M, b, E]."""

    @property
    def num_experts(self) -> int:
        return self.gates[0].num_experts

    def set_gate_noise(self, noise: Noise) -> None:
        """Set the function that returns the random numbers with which hard gates choose branches in training."""
        for gates in self.gates:
            gates.noise = noise

    def logits_of_parts(self, parts: Iterable[Tensor]) -> Tensor:
        """See `Stack`. Afterwards, `expert_weights` contains the weights for all parts, [M, n, E] for each mixture."""
        weights: list[list[Tensor]] = []

        def noted() -> Iterator[Tensor]:
            for part in parts:
                yield part
                weights.append(self.expert_weights)

        logits = super().logits_of_parts(noted())
        if len(weights) > 1:
            self.expert_weights = [torch.cat(of_mixture, dim=1) for of_mixture in zip(*weights, strict=True)]
        return logits

    @abstractmethod
    def split(
        self, experts: Sequence[Sequence[int]], generators: Sequence[torch.Generator], flat: bool = False
    ) -> "GatedStack":
        """Return a new stack in which one expert of each mixture is split in two. This stack is not modified.

        A split adds a copy of the expert. A new gate with random weights divides the weight of the expert between the
        expert and its copy. So the outputs of the network do not change, up to rounding. Exception: hard gates choose
        branches at random in training, so with hard gates the outputs stay equal in evaluation only.

        If `flat` is True, there is no tree of gates, but one softmax. A split adds the copy, and an entry for it to the
        softmax. The weights that compute the logit of the entry are random. The copy takes weight from all experts, so
        the outputs of the network change abruptly. Copying the softmax entry of the expert, too, would not help. If p
        is the weight of the expert before the split, the expert and its copy would together have the weight
        2p / (1 + p). Also, both would always get equal gradients and stay equal forever.

        Args:
            experts: for each mixture and each network, the index of the expert to split.
            generators: random generators for the new gates or softmax entries, one per network.
            flat: whether the gates are one flat softmax.

        Raises:
            ValueError: if `flat` is True, and an expert has been split with `flat=False` before.
        """
