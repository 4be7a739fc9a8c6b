"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682), from the authors' package `schedulefree`.

alma-lm plugin=results.rivals.schedule_free schedule=constant optimizer_state=keep \
    fairseq='--optimizer schedule_free' ...

The rate is constant after the warm-up. The optimizer itself averages the weights, so no `average=` is needed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.optim import register_optimizer

from fairseq_alma.core.errors import SettingError
from fairseq_alma.optim.fused_adam import FusedAdam, FusedAdamConfig

try:
    import schedulefree
except ModuleNotFoundError as error:
    raise SettingError(
        f"plugin={__name__} needs the package schedulefree, which is not installed: pip install schedulefree"
    ) from error


@dataclass
class ScheduleFreeConfig(FusedAdamConfig):
    """Options of the optimizer schedule_free: those of fused_adam, and one more."""

    schedule_free_r: float = field(
        default=0.0, metadata={"help": "update n has a weight in the average proportional to n^r (the package's r)"}
    )


@register_optimizer("schedule_free", dataclass=ScheduleFreeConfig)
class ScheduleFree(FusedAdam):
    """Schedule-free AdamW.

    Between updates, the model has the averaged weights (x in the paper), so that these are validated and saved. During
    an update, it has those at which the gradient is computed (y).
    """

    _optimizer: Any

    def __init__(self, cfg: ScheduleFreeConfig, params: Iterable[torch.nn.Parameter]):
        params = list(params)
        super().__init__(cfg, params)
        self._optimizer = schedulefree.AdamWScheduleFree(params, r=cfg.schedule_free_r, **self.optimizer_config)

    def zero_grad(self) -> None:
        """Clear the gradients and switch to the weights y. An update begins with this call."""
        self._optimizer.train()
        super().zero_grad()

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """Make a step and switch to the weights x. An update ends with this call."""
        super().step(*arguments, **keywords)
        self._optimizer.eval()
