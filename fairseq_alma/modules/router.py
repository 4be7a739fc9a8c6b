"""Which expert a token goes to, and the losses that keep the experts busy."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# T tokens, E experts, D model width.


@dataclass(frozen=True)
class Routing:
    """What the router said of T tokens."""

    expert_T: Tensor
    """int64: the likeliest expert."""
    probability_T: Tensor
    """float32: its gate probability, which scales the expert's output."""
    balance_loss: Tensor
    """Scalar; 1 when the load is even (equation 4 of the Switch paper, without alpha)."""
    z_loss: Tensor
    """Scalar: mean squared log-partition of the router's logits (ST-MoE, equation 5)."""


class Router(nn.Module):
    """Top-1 routing: a bias-free linear map from D to E, computed in float32 whatever the model's type.

    Args:
        jitter: while training, each input feature is multiplied by a factor drawn from
            U(1 - jitter, 1 + jitter) (Switch paper, section 2.4). 0 switches it off.
    """

    def __init__(self, model_dim: int, num_experts: int, jitter: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        self.jitter = jitter
        nn.init.normal_(self.weight, std=model_dim**-0.5)

    def forward(self, x_TD: Tensor) -> Routing:
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD.float()
            if self.training and self.jitter > 0:
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
            logits_TE = x_TD @ self.weight.float().t()
            probability_TE = logits_TE.softmax(dim=-1)
            probability_T, expert_T = probability_TE.max(dim=-1)
            return Routing(
                expert_T,
                probability_T,
                balance_loss(probability_TE, expert_T),
                logits_TE.logsumexp(dim=-1).square().mean(),
            )


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
