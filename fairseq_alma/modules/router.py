"""The router: which expert computes a token, and the losses that balance the load of the experts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# T tokens, E experts, D model width.


@dataclass(frozen=True)
class Routing:
    """The router's output for T tokens."""

    expert_T: Tensor
    """int64 [T]: the expert of each token."""
    probability_T: Tensor
    """float32 [T]: gate probability, which scales the expert's output; in a tree that of the softmax only."""
    balance_loss: Tensor
    """Scalar, 1 if the load is even (equation 4 of the Switch paper, without alpha)."""
    z_loss: Tensor
    """Scalar: mean squared log-partition of the router's logits (ST-MoE, equation 5)."""


class Router(nn.Module):
    """Top-1 routing: a linear map from D to E without bias, computed in float32 whatever the type of the model.

    A new router is flat: a softmax over E logits, of which the largest decides. Growth may split an expert e in two
    (`growth.experts.grow_experts(..., router="tree")`). The row of the new expert n is then not a logit of the softmax
    but a node below e: a token that the softmax sends to e moves on to n if sigmoid(w_n x) > 1/2. This is the tree of
    gates of the paper's appendix A, with a hard choice at each node.

    The output is scaled by the probability of the softmax only. If it were also multiplied by the probability g of the
    node, as with soft gates, it would drop at growth, because a hard gate uses only one branch. The node learns in two
    ways: through the factor g / stop_gradient(g), which is 1 and has the gradient of log g, and through the balance
    loss, which uses the full product of probabilities of each leaf.

    Args:
        model_dim: D.
        num_experts: E.
        jitter: while training, each input feature is multiplied by a factor drawn from
            U(1 - jitter, 1 + jitter) (Switch paper, appendix C). 0 switches it off.
    """

    split_E: Tensor

    def __init__(self, model_dim: int, num_experts: int, jitter: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        # For each expert the index of the expert from which it was split; -1 if its row is a logit of the softmax.
        # Floating point, because fairseq's --store-ema averages every entry of a state dict.
        self.register_buffer("split_E", torch.full((num_experts,), -1.0))
        self._splits: list[tuple[int, int]] | None = None
        self.jitter = jitter
        nn.init.normal_(self.weight, std=model_dim**-0.5)

    def forward(self, x_TD: Tensor) -> Routing:
        """Return the routing of tokens x_TD [T, D]."""
        with torch.autocast(x_TD.device.type, enabled=False):
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
            return Routing(
                expert_T,
                probability_T,
                balance_loss(probability_TE, expert_T),
                softmax_logits_TE.logsumexp(dim=-1).square().mean(),
            )

    def splits(self) -> list[tuple[int, int]]:
        """Return the splits (expert, new expert) in the order in which growth made them; empty for a flat router."""
        if self._splits is None:  # read once, because reading it from a GPU waits for the device
            parents = self.split_E.round().int().tolist()
            self._splits = [(parent, new) for new, parent in enumerate(parents) if parent >= 0]
        return self._splits

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*arguments, **keywords)
        self._splits = None


def _descend(
    splits: list[tuple[int, int]], logits_TE: Tensor, probability_TE: Tensor, probability_T: Tensor, expert_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Move each token from the expert that the softmax chose down to a leaf of the tree.

    The splits are visited in the order in which growth made them, so that each comes before the splits below it.

    Returns:
        Probabilities of all leaves [T, E], output scale of each token [T], and leaf of each token [T].
    """
    leaf_probabilities = list(probability_TE.unbind(dim=1))
    for parent, new in splits:
        to_new_T = logits_TE[:, new].sigmoid()
        leaf_probabilities[new] = leaf_probabilities[parent] * to_new_T
        leaf_probabilities[parent] = leaf_probabilities[parent] * (1 - to_new_T)
        at_parent_T = expert_T == parent
        moves_T = at_parent_T & (logits_TE[:, new] > 0)
        # g / stop_gradient(g), computed from log g: for tokens at other experts, 0 / 0 would turn gradients into NaN.
        log_taken_T = F.logsigmoid(torch.where(moves_T, logits_TE[:, new], -logits_TE[:, new]))
        one_T = (log_taken_T - log_taken_T.detach()).exp()
        probability_T = torch.where(at_parent_T, probability_T * one_T, probability_T)
        expert_T = torch.where(moves_T, new, expert_T)
    return torch.stack(leaf_probabilities, dim=1), probability_T, expert_T


def balance_loss(probability_TE: Tensor, expert_T: Tensor) -> Tensor:
    """Return E times the sum over experts of (share of the tokens) * (mean probability). It is 1 if the load is even.

    The share of an expert counts every token that was sent to it, also dropped ones (equation 4 of the Switch paper,
    without alpha). Without tokens the loss is 0.

    Args:
        probability_TE: probability of each expert, [T, E].
        expert_T: int64 [T], the expert of each token.
    """
    num_tokens, num_experts = probability_TE.shape
    if num_tokens == 0:
        return probability_TE.sum()
    share_E = torch.bincount(expert_T, minlength=num_experts).to(probability_TE) / num_tokens
    return num_experts * (share_E * probability_TE.mean(dim=0)).sum()


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float) -> int | None:
    """Return the largest number of tokens of one expert: ceil(factor * T / E), equation 3 of the Switch paper.

    None, for no limit, if the factor is 0.
    """
    if capacity_factor == 0:
        return None
    return math.ceil(capacity_factor * num_tokens / num_experts)
