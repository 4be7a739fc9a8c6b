"""The fairseq optimizer fused_adam: Adam with decoupled weight decay, one kernel for all parameters.

fairseq's own adam updates the parameters one after the other with many small operations. On a CPU, it takes three times
as long (benchmarks/lm_train.md). On a GPU, it is fused only if the package apex is installed.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from fairseq_alma.core.errors import SettingError


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

    Args:
        cfg: options.
        params: the parameters to train. They must be float32.

    Raises:
        SettingError: if --adam-betas is not a pair of numbers.
    """

    def __init__(self, cfg: FusedAdamConfig, params: Iterable[torch.nn.Parameter]):
        super().__init__(cfg)
        self._optimizer = torch.optim.AdamW(params, fused=True, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The options, as a dictionary of keyword arguments of torch.optim.AdamW.

        When fairseq loads a checkpoint, it replaces the options stored in the checkpoint by this dictionary.
        """
        lr = self.cfg.lr
        return {
            "lr": lr if isinstance(lr, float) else lr[0],
            "betas": _pair(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }


def _pair(betas: Any) -> tuple[float, float]:
    """Return the value of --adam-betas as two numbers. From the command line, it is a string such as "(0.9, 0.98)"."""
    try:
        first, second = ast.literal_eval(betas) if isinstance(betas, str) else betas
        return float(first), float(second)
    except (ValueError, TypeError, SyntaxError) as error:
        raise SettingError(f"--adam-betas {betas!r} is not a pair of numbers such as '(0.9, 0.98)'") from error
