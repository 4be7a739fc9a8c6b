"""The mixture that stands in a transformer layer where the feed-forward network stood."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_alma.modules.dispatch import Plan, apply_experts, plan_dispatch
from fairseq_alma.modules.router import Router, Routing, expert_capacity

# T tokens, E experts, D model width, F hidden width of an expert.


@dataclass(frozen=True)
class MixtureOutput:
    """What one mixture did with T tokens."""

    y_TD: Tensor
    routing: Routing
    plan: Plan
    kept_T: Tensor | None
    """bool: False for dropped tokens; None when nothing was dropped."""

    @property
    def num_dropped(self) -> int:
        return self.routing.expert_T.numel() - self.plan.token_K.numel()


class SwitchFeedForward(nn.Module):
    """E feed-forward experts; each token goes through one, its output times the gate probability.

    Expert weights are stacked over E, in memory and on disk: this is their canonical form, whatever
    the number of ranks. One expert equals a dense layer (its gate probability is 1).

    Args:
        model_dim, ffn_dim: D and F.
        num_experts: E.
        capacity_factor: of training, counted per forward pass on one rank; 0 is no limit.
        eval_capacity_factor: the same for evaluation. With 0, the default, the output for a sequence
            does not depend on what else is in the batch.
        jitter: see Router.
        activation_dropout: after the ReLU.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_experts: int,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 0.0,
        jitter: float = 0.0,
        activation_dropout: float = 0.0,
    ):
        super().__init__()
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts}: a mixture has at least one expert")
        if capacity_factor < 0 or eval_capacity_factor < 0:
            raise ValueError(
                f"capacity factors {capacity_factor}, {eval_capacity_factor} must be positive, or 0 for no limit"
            )
        self.router = Router(model_dim, num_experts, jitter)
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
        self.fc1_bias = nn.Parameter(torch.zeros(num_experts, ffn_dim))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, model_dim, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.zeros(num_experts, model_dim))
        # Summed loss and number of validation tokens by expert, since the last validation began: what
        # growth ranks the experts by. Saved, so that a checkpoint carries its own ranking.
        self.register_buffer("valid_loss_E", torch.zeros(num_experts, dtype=torch.float64))
        # Floating, though one of them counts: fairseq's --store-ema averages every entry of a state dict.
        self.register_buffer("valid_tokens_E", torch.zeros(num_experts, dtype=torch.float64))
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.activation_dropout = activation_dropout
        for weight_E in (self.fc1_weight, self.fc2_weight):
            for weight in weight_E:
                nn.init.xavier_uniform_(weight)

    @property
    def num_experts(self) -> int:
        return self.fc1_weight.size(0)

    def forward(self, x_TD: Tensor) -> MixtureOutput:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        routing = self.router(x_TD)
        plan = plan_dispatch(routing.expert_T, self.num_experts, expert_capacity(len(x_TD), self.num_experts, factor))
        y_TD = apply_experts(x_TD, routing.probability_T, plan, self._experts())
        kept_T = None
        if plan.token_K.numel() < len(x_TD):
            kept_T = torch.zeros(len(x_TD), dtype=torch.bool, device=x_TD.device)
            kept_T[plan.token_K] = True
        return MixtureOutput(y_TD, routing, plan, kept_T)

    def charge_validation_loss(self, output: MixtureOutput, loss_T: Tensor) -> None:
        """Add each token's loss to the expert it used; dropped tokens are charged to none."""
        expert_T = output.routing.expert_T
        if output.kept_T is not None:
            expert_T, loss_T = expert_T[output.kept_T], loss_T[output.kept_T]
        self.valid_loss_E.index_add_(0, expert_T, loss_T.to(self.valid_loss_E.dtype))
        self.valid_tokens_E += torch.bincount(expert_T, minlength=self.num_experts).to(self.valid_tokens_E.dtype)

    def reset_validation_loss(self) -> None:
        # Made anew: a model cast to bf16 has cast this buffer too, and bf16 cannot add up a validation set.
        self.valid_loss_E = torch.zeros_like(self.valid_loss_E, dtype=torch.float64)
        self.valid_tokens_E = torch.zeros_like(self.valid_tokens_E, dtype=torch.float64)

    def _experts(self):
        # unbind, not w[e]: its backward writes each gradient once, w[e]'s adds E full-size zeros.
        weights = zip(
            self.fc1_weight.unbind(0),
            self.fc1_bias.unbind(0),
            self.fc2_weight.unbind(0),
            self.fc2_bias.unbind(0),
            strict=True,
        )
        return [self._expert(*w) for w in weights]

    def _expert(self, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor):
        def run(x: Tensor) -> Tensor:
            h = F.relu(F.linear(x, fc1_weight, fc1_bias))
            h = F.dropout(h, self.activation_dropout, training=self.training)
            return F.linear(h, fc2_weight, fc2_bias)

        return run
