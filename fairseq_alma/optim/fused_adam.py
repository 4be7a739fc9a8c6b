"""The fairseq optimizer fused_adam: Adam with decoupled weight decay, one kernel for all parameters.

fairseq's own adam updates the parameters one after the other with many small operations. On a CPU, it takes three times
as long (benchmarks/lm_train.md). On a GPU, it is fused only if the package apex is installed.
"""

import ast
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from fairseq_alma.modules.expert_parallel import ExpertShard

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Names of the two moving averages of each parameter in the optimizer's state."""


@dataclass
class FusedAdamConfig(FairseqDataclass):
    """Options of the optimizer fused_adam. Their names are those of the equivalent options of fairseq's adam."""

    adam_betas: Any = field(
        default=(0.9, 0.98), metadata={"help": "decay rates of the two moving averages (the paper's values by default)"}
    )
    adam_eps: float = field(default=1e-8, metadata={"help": "term added to the denominator"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled weight decay, as in AdamW"})
    lr: list[float] = II("optimization.lr")  # noqa: RUF009 (fairseq reads this text)


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(FairseqOptimizer):
    """AdamW of torch with `fused=True`.

    Without weight decay, this is Adam as published (Kingma and Ba, algorithm 1). fairseq's adam differs from it in one
    detail: it adds eps before the bias correction of the denominator. So in the first updates, eps has a larger effect
    in fairseq's adam than here.

    If experts are spread over ranks (see modules/expert_parallel.py), each rank has the averages of its own experts.
    The averages of all experts, and their weights, are collected on rank 0 when a checkpoint is written.

    Args:
        cfg: options.
        params: the parameters to train. They must be float32.

    Raises:
        SettingError: if --adam-betas is not a pair of numbers.
    """

    def __init__(self, cfg: FusedAdamConfig, params: Iterable[torch.nn.Parameter]):
        super().__init__(cfg)
        self._optimizer = torch.optim.AdamW(params, fused=True, **self.optimizer_config)
        all_params = self._optimizer.param_groups[0]["params"]
        self._shards: dict[int, ExpertShard] = {i: p.expert for i, p in enumerate(all_params) if hasattr(p, "expert")}
        # For each parameter with experts of this rank, after _collect: the averages of all experts.
        self._collected: dict[int, dict[str, Tensor]] = {}
        if self._shards:
            # fairseq calls a method of this name on all ranks before it writes a checkpoint.
            self._optimizer.consolidate_state_dict = self._collect  # type: ignore[attr-defined]

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The options, as keyword arguments of torch.optim.AdamW. They replace those in a checkpoint."""
        lr = self.cfg.lr
        return {
            "lr": lr if isinstance(lr, float) else lr[0],
            "betas": _pair(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    @property
    def supports_expert_parallel(self) -> bool:
        """Whether experts may be spread over ranks.

        False with --zero-sharding, which replaces the torch optimizer, and with --ddp-backend fully_sharded, which
        replaces the parameters.
        """
        return isinstance(self._optimizer, torch.optim.AdamW) and bool(self._shards)

    def all_reduce_grads(self, module: torch.nn.Module) -> None:
        """Average the gradients over the ranks, also those of experts that are spread over ranks."""
        if self._shards:
            _use_equal_buffers(module)
        super().all_reduce_grads(module)
        for parameter, shard in self._spread():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            shard.group.average_gradient(parameter.grad)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; 0 means no limit. Return the norm before.

        The norm is that of all weights, also of the experts on other ranks.
        """
        if self._shards:
            assert aggregate_norm_fn is None
            aggregate_norm_fn = self._add_norm_of_experts
        return super().clip_grad_norm(max_norm, aggregate_norm_fn)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with the averages of all experts if `_collect` was called before."""
        state_dict = super().state_dict()
        for i, averages in self._collected.items():
            state_dict["state"][i] = {**state_dict["state"][i], **averages}
        self._collected = {}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Load the state of the optimizer. Of the averages of experts, only those of this rank are loaded."""
        if self._shards:
            state = dict(state_dict["state"])
            for i, shard in self._shards.items():
                # Clone the slice. Otherwise, the averages of all experts would stay in memory.
                state[i] = {
                    name: value[shard.own].clone() if name in AVERAGES else value
                    for name, value in state.get(i, {}).items()
                }
            state_dict = {**state_dict, "state": state}
        super().load_state_dict(state_dict, optimizer_overrides)

    def _spread(self) -> list[tuple[torch.nn.Parameter, ExpertShard]]:
        """Return the parameters that contain experts of this rank only, with the experts of this rank."""
        parameters = self._optimizer.param_groups[0]["params"]
        return [(parameters[i], shard) for i, shard in self._shards.items()]

    def _add_norm_of_experts(self, norm: Tensor) -> Tensor:
        """Return the gradient norm of all weights, given the norm of the weights that all ranks have."""
        spread = self._spread()
        squares = torch.stack([p.grad.square().sum() for p, _ in spread if p.grad is not None]).sum()
        return (norm.square() + spread[0][1].group.sum_of_experts(squares)).sqrt()

    def _collect(self, to: int = 0) -> None:
        """Collect the weights and averages of all experts on rank `to`, which must be 0. All ranks must call this.

        The next calls of `state_dict` of the model and of the optimizer use the collected values.
        """
        assert to == 0
        # fairseq also calls this method while it handles an error. The other ranks may not call it then.
        if sys.exception() is not None:
            return
        for i, (parameter, shard) in zip(self._shards, self._spread(), strict=True):
            weights = shard.collect_checked(parameter.detach())
            averages = self._optimizer.state[parameter]
            collected = {name: shard.collect(averages[name]) for name in AVERAGES if name in averages}
            if weights is not None:
                parameter.collected = weights  # type: ignore[attr-defined]
                self._collected[i] = {name: value for name, value in collected.items() if value is not None}


def _use_equal_buffers(module: torch.nn.Module) -> None:
    """Let legacy_ddp sum the gradients of all ranks in buffers of one size.

    legacy_ddp computes the size of its buffer from the number of weights, which differs between the ranks if they have
    different numbers of experts. It would also send as many unused numbers as a rank has weights of experts.
    """
    for wrapper in module.modules():
        if isinstance(wrapper, LegacyDistributedDataParallel) and wrapper.buffer is None:
            shared = sum(p.numel() for p in wrapper.parameters() if not hasattr(p, "expert"))
            wrapper.buffer_size = min(wrapper.buffer_size, shared)


def _pair(betas: Any) -> tuple[float, float]:
    """Return the value of --adam-betas as two numbers. From the command line, it is a string such as "(0.9, 0.98)"."""
    try:
        first, second = ast.literal_eval(betas) if isinstance(betas, str) else betas
        return float(first), float(second)
    except (ValueError, TypeError, SyntaxError) as error:
        raise SettingError(f"--adam-betas {betas!r} is not a pair of numbers such as '(0.9, 0.98)'") from error
