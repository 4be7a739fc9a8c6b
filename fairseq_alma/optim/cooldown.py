"""The fairseq learning-rate scheduler cooldown: warm-up, a constant rate, and a linear decay to 0 (schedule=wsd)."""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II


@dataclass
class CooldownConfig(FairseqDataclass):
    """Options of the scheduler cooldown. Their names are those of fairseq's scheduler polynomial_decay."""

    warmup_updates: int = field(default=0, metadata={"help": "number of updates in which the rate rises from 0"})
    decay_from: int = field(default=0, metadata={"help": "number of updates after which the rate begins to fall"})
    total_num_update: int = field(
        default=II("optimization.max_update"), metadata={"help": "number of updates after which the rate is 0"}
    )
    lr: list[float] = II("optimization.lr")  # noqa: RUF009 (fairseq reads this text)


@register_lr_scheduler("cooldown", dataclass=CooldownConfig)
class Cooldown(FairseqLRScheduler):
    """Learning rate after u updates: lr, times u / warmup_updates in the warm-up, times the rest of the decay.

    Args:
        cfg: options.
        optimizer: fairseq's optimizer, whose rate is set.
    """

    def __init__(self, cfg: CooldownConfig, optimizer: Any):
        super().__init__(cfg, optimizer)
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Set the rate of the next update, after `num_updates` updates, and return it."""
        cfg = self.cfg
        rise = min(1.0, num_updates / cfg.warmup_updates) if cfg.warmup_updates else 1.0
        length = cfg.total_num_update - cfg.decay_from
        rest = max(0.0, min(1.0, (cfg.total_num_update - num_updates) / length))
        self.optimizer.set_lr(cfg.lr[0] * rise * rest)
        return self.optimizer.get_lr()
