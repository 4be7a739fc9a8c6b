"""The router selects the expert for each token. It also computes the losses that balance the load of the experts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_alma.modules.dispatch import count_tokens

# Dimensions: T tokens, E experts, D model width.


@dataclass(frozen=True)
class Routing:
    """The router's output for T tokens."""

    expert_T: Tensor
    """The expert of each token, int64 [T]."""
    probability_T: Tensor
    """The gate probability of each token: the factor for the output of its expert. float32 [T].

    If the router is a tree (see Router), this is the probability from the softmax alone, without the probabilities of
    the branches of the tree."""
    balance_loss: Tensor
    """Load-balancing loss, a scalar (equation 4 of the Switch paper without its weight). 1 if the load is even."""
    z_loss: Tensor
    """Router z-loss, a scalar: the mean squared logsumexp of the router's logits (ST-MoE, equation 5)."""


class Router(nn.Module):
    """Selects one expert for each token (top-1 routing) with a linear layer from D to E features, without bias.

    The router always computes in float32. A new router is flat: it sends each token to the expert with the largest of
    the E logits. The gate probability is the softmax probability of this expert.

    Growth may split an expert e into e and a new expert n (`growth.experts.grow_experts(..., router="tree")`). The
    router then becomes a tree. The split is a node of the tree. The weight row w_n of the new expert is not used for
    the softmax, but for the decision at the node. A token with input x that the softmax sends to e moves to n if
    sigmoid(w_n x) > 1/2, and otherwise stays at e. This is the tree of gates in the paper's appendix A, with a hard
    choice at each node.

    In a tree, too, the value of the expert's output is scaled by the softmax probability only, and not by g, the
    probability of the branch that the token takes at the node. Scaling by g, as soft gates do, would suddenly make the
    output smaller at growth. But w_n needs a gradient. It gets one from two places:

    - The output is also multiplied by g / stop_gradient(g). The value of this factor is 1, so the output does not
      change, but the gradient of the factor is the gradient of log g.
    - The balance loss uses the product of all probabilities on the path to each expert.

    Args:
        model_dim: model width, D.
        num_experts: number of experts, E.
        jitter: in training, each input feature is multiplied by a random factor from the uniform distribution
            U(1 - jitter, 1 + jitter) (Switch paper, appendix C). 0 turns this off.
    """

    split_E: Tensor

    def __init__(self, model_dim: int, num_experts: int, jitter: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        # For each expert, the index of the expert from which it was split. -1 means that the expert does not come from
        # a split. The softmax contains only the experts with -1.
        # The indices are stored as floating point numbers, because fairseq's option --store-ema averages every entry of
        # a state dict, and the average of integers need not be an integer.
        self.register_buffer("split_E", torch.full((num_experts,), -1.0))
        # The stored return value of splits(). None means that splits() must compute the list from split_E.
        self._splits: list[tuple[int, int]] | None = None
        self.jitter = jitter
        nn.init.normal_(self.weight, std=model_dim**-0.5)

    def forward(self, x_TD: Tensor) -> Routing:
        """Return the expert and the gate probability of each token, and the balancing losses, for inputs [T, D]."""
        with torch.autocast(x_TD.device.type, enabled=False):
            expert_T, probability_T, probability_TE, softmax_logits_TE = self._select(x_TD)
            return Routing(
                expert_T,
                probability_T,
                balance_loss(probability_TE, expert_T),
                _mean(softmax_logits_TE.logsumexp(dim=-1).square()),
            )

    def select(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expert and the gate probability of each token, as `forward` does, without the losses."""
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._select(x_TD)[:2]

    def _select(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return expert and gate probability of each token [T], and probabilities and softmax logits [T, E]."""
        x_TD = x_TD.float()
        if self.training and self.jitter > 0:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
        logits_TE = x_TD @ self.weight.float().t()
        splits = self.splits()
        softmax_logits_TE = logits_TE
        if splits:
            softmax_logits_TE = logits_TE.masked_fill(self.split_E >= 0, -torch.inf)
        probability_TE = softmax_logits_TE.softmax(dim=-1)
        probability_T, expert_T = probability_TE.max(dim=-1)
        if splits:
            probability_TE, probability_T, expert_T = _descend(
                splits, logits_TE, probability_TE, probability_T, expert_T
            )
        return expert_T, probability_T, probability_TE, softmax_logits_TE

    def splits(self) -> list[tuple[int, int]]:
        """Return a pair (expert that was split, new expert) for each split, oldest first. A flat router has none."""
        # Read split_E only once, because for every read, the CPU must wait until the GPU has finished its queued work.
        if self._splits is None:
            parents = self.split_E.round().int().tolist()
            self._splits = [(parent, new) for new, parent in enumerate(parents) if parent >= 0]
        return self._splits

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*arguments, **keywords)
        # Loading may have changed split_E. Delete the stored list, so that splits() computes it again from split_E.
        self._splits = None


def _descend(
    splits: list[tuple[int, int]], logits_TE: Tensor, probability_TE: Tensor, probability_T: Tensor, expert_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token down the tree, from the expert that the softmax selected to an expert at a leaf.

    At each split, a token that is at the split expert either stays there or moves to the new expert. The splits are
    applied oldest first, so a split comes before the splits below it in the tree.

    Args:
        splits: the return value of Router.splits.
        logits_TE: logit of each expert for each token, [T, E].
        probability_TE: softmax probability of each expert; 0 for experts that come from a split. [T, E].
        probability_T, expert_T: the expert that the softmax selected for each token, int64 [T], and its probability.

    Returns:
        The probability of each expert (the product of all probabilities on the path to it) [T, E]; `probability_T` with
            the same values, but with gradients for the weight rows of new experts; and the expert of each token after
            all splits.
    """
    leaf_probabilities = list(probability_TE.unbind(dim=1))
    for parent, new in splits:
        to_new_T = logits_TE[:, new].sigmoid()
        leaf_probabilities[new] = leaf_probabilities[parent] * to_new_T
        leaf_probabilities[parent] = leaf_probabilities[parent] * (1 - to_new_T)
        at_parent_T = expert_T == parent
        moves_T = at_parent_T & (logits_TE[:, new] > 0)
        # g is the probability of the branch that a token takes at this split. Compute g / stop_gradient(g) (see Router)
        # as exp(log g - stop_gradient(log g)) without a division. g is also computed for tokens that are not at this
        # split, and for them g can be 0. The division would then give 0 / 0, and all gradients would be NaN.
        log_taken_T = F.logsigmoid(torch.where(moves_T, logits_TE[:, new], -logits_TE[:, new]))
        one_T = (log_taken_T - log_taken_T.detach()).exp()
        probability_T = torch.where(at_parent_T, probability_T * one_T, probability_T)
        expert_T = torch.where(moves_T, new, expert_T)
    return torch.stack(leaf_probabilities, dim=1), probability_T, expert_T


def balance_loss(probability_TE: Tensor, expert_T: Tensor) -> Tensor:
    """Return E times the sum over experts of (fraction of the tokens) * (mean probability). Even load gives 1.

    This is equation 4 of the Switch paper, without the weight alpha. Dropped tokens count. Without tokens, it is 0.

    Args:
        probability_TE: probability of each expert for each token, [T, E].
        expert_T: the expert of each token, int64 [T].
    """
    num_tokens, num_experts = probability_TE.shape
    if num_tokens == 0:
        return probability_TE.sum()
    share_E = count_tokens(expert_T, num_experts).to(probability_TE) / num_tokens
    return num_experts * (share_E * probability_TE.mean(dim=0)).sum()


def _mean(values_T: Tensor) -> Tensor:
    """Return the mean of the values of all tokens, [T]; 0 without tokens, where all text of a batch is masked."""
    return values_T.mean() if len(values_T) else values_T.sum()


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float) -> int | None:
    """Return the maximum number of tokens for one expert: ceil(capacity_factor * num_tokens / num_experts).

    This is equation 3 of the Switch paper. If capacity_factor is 0, there is no limit and the result is None.
    """
    if capacity_factor == 0:
        return None
    return math.ceil(capacity_factor * num_tokens / num_experts)
