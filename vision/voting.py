"""How the outputs of ensemble members become one prediction.

Outputs are summed over members, so that members that do not change need to be evaluated only once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_alma.core.learner_settings import Combine

# S seeds, N members per seed, M = S N members, b examples, C classes.


@dataclass(frozen=True)
class MemberOutputs:
    """The outputs of some members for some examples, summed over members. Outputs of more members can be added."""

    combine: Combine
    summed_SbC: Tensor
    """Sum of the members' probabilities (of their logits, if logits are averaged)."""
    votes_SbC: Tensor | None
    """Number of members that chose each class, if the majority decides; else None."""
    num_members: int
    """Number of members per seed in the sum."""

    @staticmethod
    def empty() -> "MemberOutputs":
        """Return the outputs of no members, to which outputs can be added."""
        return MemberOutputs("probability", torch.empty(0), None, 0)

    def __add__(self, other: "MemberOutputs") -> "MemberOutputs":
        if not self.num_members:
            return other
        if not other.num_members:
            return self
        votes = None
        if self.votes_SbC is not None and other.votes_SbC is not None:
            votes = self.votes_SbC + other.votes_SbC
        num_members = self.num_members + other.num_members
        return MemberOutputs(self.combine, self.summed_SbC + other.summed_SbC, votes, num_members)

    def predicted_classes(self) -> Tensor:
        """Return the class of each example, [S, b]. Among classes with equal votes the mean probability decides."""
        if self.votes_SbC is None:
            return self.summed_SbC.argmax(-1)
        return (self.votes_SbC + self.summed_SbC / (2 * self.num_members)).argmax(-1)

    def error_rate(self, y_Sb: Tensor) -> list[float]:
        """Return for each seed the share of examples that are predicted wrongly, from an exact count.

        Args:
            y_Sb: the true classes, [S, b], or [1, b] if they are the same for all seeds.
        """
        wrong_S = (self.predicted_classes() != y_Sb).sum(-1)
        return [int(wrong) / y_Sb.shape[-1] for wrong in wrong_S]

    def loss(self, y_Sb: Tensor) -> list[float]:
        """Return for each seed the mean negative log-probability of the true class, in nats.

        If the majority decides, the loss is that of the mean probability.

        Args:
            y_Sb: the true classes, [S, b], or [1, b] if they are the same for all seeds.
        """
        mean_SbC = self.summed_SbC / self.num_members
        log_probability = mean_SbC.log_softmax(-1) if self.combine == "logit" else mean_SbC.clamp_min(1e-38).log()
        y = y_Sb.expand(len(mean_SbC), -1).unsqueeze(-1)
        return log_probability.gather(-1, y).double().mean((1, 2)).neg().tolist()


def sum_members(logits_MbC: Tensor, num_seeds: int, combine: Combine) -> MemberOutputs:
    """Return the outputs of M members, summed over the N members of each seed.

    Args:
        logits_MbC: logits of all members, seed after seed.
        num_seeds: S.
        combine: what is summed.
    """
    logits_SNbC = logits_MbC.unflatten(0, (num_seeds, -1))
    num_members = logits_SNbC.shape[1]
    if combine == "logit":
        return MemberOutputs(combine, logits_SNbC.sum(1), None, num_members)
    summed_SbC = logits_SNbC.softmax(-1).sum(1)
    if combine == "probability":
        return MemberOutputs(combine, summed_SbC, None, num_members)
    votes = torch.nn.functional.one_hot(logits_SNbC.argmax(-1), logits_SNbC.shape[-1]).sum(1)
    return MemberOutputs(combine, summed_SbC, votes.float(), num_members)
