"""The mixture of experts that replaces the feed-forward network of a transformer layer."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_alma.modules.dispatch import Plan, Way, choose_way, from_rows, plan_dispatch, to_rows
from fairseq_alma.modules.expert_parallel import ExpertGroup, ExpertShard, run_spread_experts
from fairseq_alma.modules.experts import ExpertWeights, run_experts
from fairseq_alma.modules.precision import compute_type
from fairseq_alma.modules.router import Router, Routing, expert_capacity

# Dimensions: T tokens, E experts, D model width.

EXPERT_WEIGHTS = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
"""Names of the parameters of SwitchFeedForward that have one entry for each expert."""


@dataclass(frozen=True)
class MixtureOutput:
    """The output of one mixture for T tokens."""

    y_TD: Tensor
    """For each token, the output of its expert times the gate probability; 0 for dropped tokens. [T, D]."""
    routing: Routing
    """The output of the router: the expert and the gate probability of each token, and the balancing losses."""
    plan: Plan
    """The assignment of the tokens to experts."""
    x_TD: Tensor
    """The inputs of the tokens, [T, D]."""

    @property
    def num_dropped(self) -> Tensor:
        """Number of tokens that were dropped because their expert was full, an int64 scalar on the tokens' device."""
        return self.plan.dropped_E.sum()


class SwitchFeedForward(nn.Module):
    """A mixture of E feed-forward experts. The output for a token is one expert's output times the gate probability.

    The weights of all experts are stacked in tensors [E, ...]. With `group`, each rank (training process) has only the
    weights of its own experts. The state dict still contains all experts, so checkpoints do not depend on the number of
    ranks. A mixture of one expert equals a dense layer, because the gate probability is 1.

    Args:
        model_dim: model width, D.
        ffn_dim: hidden width of an expert.
        num_experts: number of experts, E.
        capacity_factor: in training, an expert processes at most capacity_factor x (tokens per rank / num_experts)
            tokens in a forward pass; 0 means no limit.
        eval_capacity_factor: capacity factor in evaluation. With 0, the default, the output for a sequence does not
            depend on the rest of the batch.
        jitter: size of the random noise on the router's inputs in training (see Router).
        activation_dropout: dropout probability after the ReLU.
        group: the ranks over which the experts are spread. None: this rank has all experts.

    Raises:
        ValueError: if there is no expert or fewer experts than ranks in `group`, or if a capacity factor is negative.
    """

    valid_loss_E: Tensor
    valid_tokens_E: Tensor
    valid_input_ED: Tensor

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_experts: int,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 0.0,
        jitter: float = 0.0,
        activation_dropout: float = 0.0,
        group: ExpertGroup | None = None,
    ):
        super().__init__()
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts}: a mixture needs at least one expert")
        if capacity_factor < 0 or eval_capacity_factor < 0:
            raise ValueError(
                f"capacity factors {capacity_factor}, {eval_capacity_factor} must be positive, or 0 for no limit"
            )
        self.router = Router(model_dim, num_experts, jitter)
        self.num_experts = num_experts
        """Number of experts on all ranks together, E."""
        self.shard = ExpertShard(group, num_experts) if group else None
        """The experts that this rank has; None if it has all of them."""
        own = range(num_experts)[self.shard.own] if self.shard else range(num_experts)
        self.fc1_weight = nn.Parameter(torch.empty(len(own), ffn_dim, model_dim))
        self.fc1_bias = nn.Parameter(torch.zeros(len(own), ffn_dim))
        self.fc2_weight = nn.Parameter(torch.empty(len(own), model_dim, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.zeros(len(own), model_dim))
        # valid_tokens_E counts the tokens that each expert has processed since the last validation began. valid_loss_E
        # is the loss of these tokens in nats, summed for each expert. Growth ranks the experts by valid_loss_E. Both
        # are buffers, so that checkpoints contain them.
        self.register_buffer("valid_loss_E", torch.zeros(num_experts, dtype=torch.float64))
        # The counts are stored as floating point numbers, because fairseq's option --store-ema averages every entry of
        # a state dict, and the average of integers need not be an integer.
        self.register_buffer("valid_tokens_E", torch.zeros(num_experts, dtype=torch.float64))
        # The sum of the inputs of the tokens that the router has sent to each expert since the last validation began.
        # Growth needs their mean to divide these tokens evenly between an expert and its copy.
        self.register_buffer("valid_input_ED", torch.zeros(num_experts, model_dim))
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.activation_dropout = activation_dropout
        self.way: Way | None = None
        """How the inputs of all experts are arranged in one matrix: "split", "slots" or "grouped" (see dispatch.py).

        None: `forward` calls `choose_way`, which selects the fastest of the three."""
        for weight_E in (self.fc1_weight, self.fc2_weight):
            for expert in range(num_experts):
                # Draw the weights of the experts of other ranks too. So all ranks draw the same random numbers.
                is_own = expert in own
                nn.init.xavier_uniform_(weight_E[expert - own.start] if is_own else torch.empty(weight_E.shape[1:]))
        if self.shard:
            for name in EXPERT_WEIGHTS:
                # fairseq does not sum the gradients of parameters with this attribute over the ranks.
                getattr(self, name).expert = self.shard

    def forward(self, x_TD: Tensor, has_limit: bool = True) -> MixtureOutput:
        """Return the output of the mixture for the inputs of the tokens, [T, D].

        With has_limit=False, no token is dropped, whatever the capacity factors are.
        """
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        factor = factor if has_limit else 0.0
        capacity = expert_capacity(len(x_TD), self.num_experts, factor)
        routing = self.router(x_TD)
        dtype = compute_type(x_TD)
        way = self.way or choose_way(x_TD.device, dtype, capacity, self.fc1_weight.shape[1:])
        if self.shard and way == "grouped":
            way = "split"
        if way == "split" and capacity is not None and torch.compiler.is_compiling():
            way = "slots"  # the compiler needs shapes that do not depend on the data
        plan = plan_dispatch(routing.expert_T, self.num_experts, capacity, way)
        weights = ExpertWeights(self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias)
        dropout = self.activation_dropout if self.training else 0.0
        x_SD = to_rows(x_TD.to(dtype), plan)
        if self.shard:
            y_SD = run_spread_experts(x_SD, plan, weights, self.shard, dropout)
        else:
            y_SD = run_experts(x_SD, plan, weights, dropout)
        y_TD = from_rows(y_SD, plan) * routing.probability_T.unsqueeze(1).to(dtype)
        return MixtureOutput(y_TD, routing, plan, x_TD)

    def predict(self, x_TD: Tensor) -> Tensor:
        """Return the outputs of the tokens, [T, D], without a capacity limit.

        Generation consists of calls with few tokens. For one, what `forward` computes beside the output, and the order
        in which it arranges tokens, would take longer than the expert.
        """
        if len(x_TD) != 1 or self.shard:
            return self(x_TD, has_limit=False).y_TD
        expert_T, probability_T = self.router.select(x_TD)
        expert = int(expert_T)
        h_TF = F.relu(F.linear(x_TD, self.fc1_weight[expert], self.fc1_bias[expert]))
        y_TD = F.linear(h_TF, self.fc2_weight[expert], self.fc2_bias[expert])
        return y_TD * probability_T.unsqueeze(1).to(y_TD.dtype)

    def charge_validation_loss(self, output: MixtureOutput, loss_T: Tensor) -> None:
        """Add the loss of each token to the total of the expert that processed the token, and count the token.

        The totals are `valid_loss_E`, the counts `valid_tokens_E`. Dropped tokens are ignored. The inputs of all tokens
        are added to `valid_input_ED`.

        Args:
            output: the output of `forward` for these tokens.
            loss_T: loss of each token in nats, [T].
        """
        plan = output.plan
        loss_T = loss_T.to(self.valid_loss_E.dtype)
        if plan.kept_T is not None:
            loss_T = loss_T.where(plan.kept_T, 0)
        self.valid_loss_E.index_add_(0, output.routing.expert_T, loss_T)
        self.valid_tokens_E += (plan.load_E - plan.dropped_E).to(self.valid_tokens_E.dtype)
        self.valid_input_ED.index_add_(0, output.routing.expert_T, output.x_TD.to(self.valid_input_ED.dtype))

    def reset_validation_loss(self) -> None:
        """Set the validation losses, token counts and summed inputs of all experts to 0."""
        # Make new float64 tensors. In a model that was cast to bf16, the buffers are bf16 too, which is not precise
        # enough for sums over a validation set.
        self.valid_loss_E = torch.zeros_like(self.valid_loss_E, dtype=torch.float64)
        self.valid_tokens_E = torch.zeros_like(self.valid_tokens_E, dtype=torch.float64)
        self.valid_input_ED = torch.zeros_like(self.valid_input_ED, dtype=torch.float32)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write the weights of all experts to a state dict, also if they are spread over ranks.

        In this case, the optimizer must have collected them (see FusedAdam), which fairseq's trainer lets it do before
        it writes a checkpoint. Otherwise, raise RuntimeError.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.shard:
            return
        for name in EXPERT_WEIGHTS:
            collected = getattr(self, name).__dict__.pop("collected", None)
            if collected is not None:
                destination[prefix + name] = collected.values
            elif sys.exception() is None:
                raise RuntimeError(
                    f"this rank has only the experts {self.shard.own.start} to {self.shard.own.stop - 1} of "
                    f"{self.num_experts}: all ranks must collect them first. --no-save-optimizer-state prevents this"
                )
            # While fairseq handles an error, it writes crash.pt, which nothing reads. The other ranks do not take part,
            # so this file contains only the experts of this rank.

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Read the weights of the experts of this rank from a state dict with all experts."""
        if self.shard:
            for name in EXPERT_WEIGHTS:
                if prefix + name in state_dict:
                    state_dict[prefix + name] = state_dict[prefix + name][self.shard.own]
        super()._load_from_state_dict(state_dict, prefix, *arguments)
