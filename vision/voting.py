"""Combine the outputs of ensemble members, the networks that predict together, into one prediction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_alma.core.learner_settings import Combine

# Shapes: S seeds, N members per seed, M = S x N members, b examples, C classes.


@dataclass(frozen=True)
class MemberOutputs:
    """The outputs of some ensemble members for some examples, summed over these members.

    If a and b are two such objects, a + b is summed over the members of a and the members of b.
    """

    combine: Combine
    """How the members predict together: "probability" averages their probabilities, "logit" averages their logits, and
    "vote" is a majority vote."""
    summed_SbC: Tensor
    """Sum of the members' probabilities, or of their logits if `combine` is "logit"."""
    votes_SbC: Tensor | None
    """Number of members that predict each class. It is None unless `combine` is "vote"."""
    num_members: int
    """Number of members per seed whose outputs are summed."""

    @staticmethod
    def empty() -> "MemberOutputs":
        """Return the outputs of zero members. Adding them to other outputs changes nothing."""
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
        """Return the predicted class of each example, [S, b].

        With majority vote, the mean probability counts as half a vote, so that it decides between classes with the same
        number of votes.
        """
        if self.votes_SbC is None:
            return self.summed_SbC.argmax(-1)
        return (self.votes_SbC + self.summed_SbC / (2 * self.num_members)).argmax(-1)

    def probabilities(self) -> Tensor:
        """Return the probability of each class, [S, b, C]. With majority vote, it is nearly the share of the votes."""
        mean_SbC = self.summed_SbC / self.num_members
        if self.votes_SbC is not None:
            return (self.votes_SbC + mean_SbC / 2) / (self.num_members + 0.5)
        return mean_SbC.softmax(-1) if self.combine == "logit" else mean_SbC

    def error_rate(self, y_Sb: Tensor) -> list[float]:
        """Return the error rate of each seed, for the true classes [S, b], or [1, b] if they are the same for all."""
        wrong_S = (self.predicted_classes() != y_Sb).sum(-1)  # integers, so that the rate is exact
        return [wrong / y_Sb.shape[-1] for wrong in wrong_S.tolist()]

    def loss(self, y_Sb: Tensor) -> list[float]:
        """Return the loss of each seed: the mean negative log-probability of the true class of an example, in nats.

        With majority vote, this probability is the mean of the members' probabilities. The classes are as for
        `error_rate`.
        """
        mean_SbC = self.summed_SbC / self.num_members
        log_probability = mean_SbC.log_softmax(-1) if self.combine == "logit" else mean_SbC.clamp_min(1e-38).log()
        y = y_Sb.expand(len(mean_SbC), -1).unsqueeze(-1)
        return log_probability.gather(-1, y).double().mean((1, 2)).neg().tolist()


def sum_members(logits_MbC: Tensor, num_seeds: int, combine: Combine) -> MemberOutputs:
    """Return the outputs of members with the given logits, summed over the N members of each seed."""
    logits_SNbC = logits_MbC.unflatten(0, (num_seeds, -1))
    num_members = logits_SNbC.shape[1]
    if combine == "logit":
        return MemberOutputs(combine, logits_SNbC.sum(1), None, num_members)
    summed_SbC = logits_SNbC.softmax(-1).sum(1)
    if combine == "probability":
        return MemberOutputs(combine, summed_SbC, None, num_members)
    votes = torch.nn.functional.one_hot(logits_SNbC.argmax(-1), logits_SNbC.shape[-1]).sum(1)
    return MemberOutputs(combine, summed_SbC, votes.float(), num_members)
