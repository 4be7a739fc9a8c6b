"""The fairseq learning-rate scheduler cooldown: warm-up, a constant rate, and a linear decay to 0 (schedule=wsd)."""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from fairseq_alma.core.errors import SettingError


@dataclass
class CooldownConfig(FairseqDataclass):
    """Options of the scheduler cooldown. Their names are those of fairseq's scheduler polynomial_decay."""

    warmup_updates: int = field(default=0, metadata={"help": "number of updates in which the rate rises from 0"})
    decay_from: int = field(default=0, metadata={"help": "number of updates after which the rate begins to fall"})
    total_num_update: Optional[int] = field(
        default=None, metadata={"help": "number of updates after which the rate is 0; it must be given"}
    )
    lr: list[float] = II("optimization.lr")  # noqa: RUF009 (fairseq reads this text)


@register_lr_scheduler("cooldown", dataclass=CooldownConfig)
class Cooldown(FairseqLRScheduler):
    """Learning rate after u updates: lr, times u / warmup_updates in the warm-up, times the rest of the decay.

    Args:
        cfg: options.
        optimizer: fairseq's optimizer, whose rate is set.

    Raises:
        SettingError: if the rate would never fall, or be 0 from the start.
    """

    def __init__(self, cfg: CooldownConfig, optimizer: Any):
        super().__init__(cfg, optimizer)
        if cfg.total_num_update is None or not 0 <= cfg.decay_from < cfg.total_num_update:
            raise SettingError(
                f"--lr-scheduler cooldown needs --total-num-update above --decay-from, but they are "
                f"{cfg.total_num_update} and {cfg.decay_from}"
            )
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Set the rate of the next update, after `num_updates` updates, and return it."""
        cfg = self.cfg
        rise = min(1.0, num_updates / cfg.warmup_updates) if cfg.warmup_updates else 1.0
        length = cfg.total_num_update - cfg.decay_from
        rest = max(0.0, min(1.0, (cfg.total_num_update - num_updates) / length))
        self.optimizer.set_lr(cfg.lr[0] * rise * rest)
        return self.optimizer.get_lr()
