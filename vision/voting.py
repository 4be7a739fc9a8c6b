"""How members vote: sums over members, so that those that stay as they are need to be asked once."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Combine = Literal["probability", "logit", "vote"]
"""What is averaged over members: probabilities (the paper), logits (the original gEns), or votes (majority)."""

# S seeds, N members of a seed, b examples, C classes.


@dataclass(frozen=True)
class Tally:
    """What some members said of some examples, added up. Tallies of more members are added to it."""

    combine: Combine
    summed_SbC: Tensor
    """Probabilities, or logits."""
    votes_SbC: Tensor | None
    """How many members chose each class, where that decides."""
    num_members: int

    @staticmethod
    def nothing() -> "Tally":
        return Tally("probability", torch.empty(0), None, 0)

    def __add__(self, other: "Tally") -> "Tally":
        if not self.num_members:
            return other
        if not other.num_members:
            return self
        votes = None
        if self.votes_SbC is not None and other.votes_SbC is not None:
            votes = self.votes_SbC + other.votes_SbC
        return Tally(self.combine, self.summed_SbC + other.summed_SbC, votes, self.num_members + other.num_members)

    def predicted(self) -> Tensor:
        """The class of each example, [S, b]. Votes that are equal are decided by the mean probability."""
        if self.votes_SbC is None:
            return self.summed_SbC.argmax(-1)
        return (self.votes_SbC + self.summed_SbC / (2 * self.num_members)).argmax(-1)

    def error_rate(self, y_Sb: Tensor) -> list[float]:
        """Share of examples of each seed whose class is not the predicted one: exact."""
        wrong_S = (self.predicted() != y_Sb).sum(-1)
        return [int(wrong) / y_Sb.shape[-1] for wrong in wrong_S]

    def loss(self, y_Sb: Tensor) -> list[float]:
        """Mean negative log-probability of the true class, in nats; of the mean probability where votes decide."""
        mean_SbC = self.summed_SbC / self.num_members
        log_probability = mean_SbC.log_softmax(-1) if self.combine == "logit" else mean_SbC.clamp_min(1e-38).log()
        y = y_Sb.expand(len(mean_SbC), -1).unsqueeze(-1)
        return log_probability.gather(-1, y).double().mean((1, 2)).neg().tolist()


def tally(logits_MbC: Tensor, num_seeds: int, combine: Combine) -> Tally:
    """What M members, S seeds of N, say by their logits."""
    logits_SNbC = logits_MbC.unflatten(0, (num_seeds, -1))
    num_members = logits_SNbC.shape[1]
    if combine == "logit":
        return Tally(combine, logits_SNbC.sum(1), None, num_members)
    summed_SbC = logits_SNbC.softmax(-1).sum(1)
    if combine == "probability":
        return Tally(combine, summed_SbC, None, num_members)
    votes = torch.nn.functional.one_hot(logits_SNbC.argmax(-1), logits_SNbC.shape[-1]).sum(1)
    return Tally(combine, summed_SbC, votes.float(), num_members)
