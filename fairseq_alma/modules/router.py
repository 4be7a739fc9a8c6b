"""Which expert a token goes to, and the losses that keep the experts busy."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# T tokens, E experts, D model width.


@dataclass(frozen=True)
class Routing:
    """What the router said of T tokens."""

    expert_T: Tensor
    """int64: the likeliest expert."""
    probability_T: Tensor
    """float32: its gate probability, which scales the expert's output; below a split that of the pair."""
    balance_loss: Tensor
    """Scalar; 1 when the load is even (equation 4 of the Switch paper, without alpha)."""
    z_loss: Tensor
    """Scalar: mean squared log-partition of the router's logits (ST-MoE, equation 5)."""


class Router(nn.Module):
    """Top-1 routing: a bias-free linear map from D to E, computed in float32 whatever the model's type.

    A new router is flat: a softmax over E logits, of which the largest wins. Growth may split an expert e in two
    (`growth.grow_experts(..., router="tree")`): the row of the new expert n is then no logit of that softmax but a
    node below e, and a token that arrives at e goes on to n where sigmoid(w_n x) > 1/2. This is the tree of gates of
    the paper's appendix A with a hard choice at each node. What scales the output stays the probability of the
    softmax: multiplied by that of the node, as for soft gates, it would drop at growth, for a hard gate sees one
    branch only. The node learns through g / stop_gradient(g), which is 1 and has the gradient of log g, and through
    the balance loss, which sees each leaf's full product of probabilities.

    Args:
        jitter: while training, each input feature is multiplied by a factor drawn from
            U(1 - jitter, 1 + jitter) (Switch paper, section 2.4). 0 switches it off.
    """

    def __init__(self, model_dim: int, num_experts: int, jitter: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        # The expert that each expert was split off, an earlier one; -1: none, its row is a logit of the softmax.
        # Floating, though these are numbers of experts: fairseq's --store-ema averages every entry of a state dict.
        self.register_buffer("split_E", torch.full((num_experts,), -1.0))
        self._splits: list[tuple[int, int]] | None = None
        self.jitter = jitter
        nn.init.normal_(self.weight, std=model_dim**-0.5)

    def forward(self, x_TD: Tensor) -> Routing:
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
        """(expert, the one split off it), from the first growth to the last; empty for a flat router."""
        if self._splits is None:  # read once: on a GPU it waits for the device
            parents = self.split_E.round().int().tolist()
            self._splits = [(parent, new) for new, parent in enumerate(parents) if parent >= 0]
        return self._splits

    def _load_from_state_dict(self, *arguments, **keywords) -> None:
        super()._load_from_state_dict(*arguments, **keywords)
        self._splits = None


def _descend(
    splits: list[tuple[int, int]], logits_TE: Tensor, probability_TE: Tensor, probability_T: Tensor, expert_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From what the softmax chose down to a leaf: probabilities of all leaves, and scale and leaf of each token.

    An expert's nodes come in the order in which they were made, and each before those of the experts split off it.
    """
    leaf_probabilities = list(probability_TE.unbind(dim=1))
    for parent, new in splits:
        to_new_T = logits_TE[:, new].sigmoid()
        leaf_probabilities[new] = leaf_probabilities[parent] * to_new_T
        leaf_probabilities[parent] = leaf_probabilities[parent] * (1 - to_new_T)
        is_here_T = expert_T == parent
        goes_on_T = is_here_T & (logits_TE[:, new] > 0)
        # g / stop_gradient(g) by way of log g: 0 / 0 for a token elsewhere would make NaN of every gradient.
        log_taken_T = F.logsigmoid(torch.where(goes_on_T, logits_TE[:, new], -logits_TE[:, new]))
        unchanged_T = (log_taken_T - log_taken_T.detach()).exp()
        probability_T = torch.where(is_here_T, probability_T * unchanged_T, probability_T)
        expert_T = torch.where(goes_on_T, new, expert_T)
    return torch.stack(leaf_probabilities, dim=1), probability_T, expert_T


def balance_loss(probability_TE: Tensor, expert_T: Tensor) -> Tensor:
    """E * sum over experts of (share of tokens sent to it) * (mean probability it gets): 1 when even.

    The share counts every token that chose the expert, those that find it full too. No tokens: 0.
    """
    num_tokens, num_experts = probability_TE.shape
    if num_tokens == 0:
        return probability_TE.sum()
    share_E = torch.bincount(expert_T, minlength=num_experts).to(probability_TE) / num_tokens
    return num_experts * (share_E * probability_TE.mean(dim=0)).sum()


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float) -> int | None:
    """How many tokens one expert takes: ceil(factor * T / E), equation 3 of the Switch paper.

    A factor of 0 means no limit (dropless): None.
    """
    if capacity_factor == 0:
        return None
    return math.ceil(capacity_factor * num_tokens / num_experts)
