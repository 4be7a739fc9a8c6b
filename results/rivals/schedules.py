"""Learning rates that continue from stage to stage: the schedules `wsd` and `rsqrt`, and the learner `continued`.

alma-lm plugin=results.rivals.schedules learner=continued optimizer_state=keep fairseq='--lr-scheduler wsd' ...

Both have one warm-up, at the beginning of the stream, and a cooldown to 0 at the end of each stage. The next stage
continues from the model after the cooldown, at the rate before it, so that no update is lost; Wen et al. (2024, arXiv
2410.05192) call this WSD-S. In between, the rate is

- `wsd`: constant. The cooldown is 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392, section 3).
- `rsqrt`: proportional to 1 / sqrt(updates of all stages). The cooldown is linear (Zhai et al. 2022, arXiv 2106.04560;
  TiC-LM, Li et al. 2025, arXiv 2504.02107, restarts it in each round).
"""

from dataclasses import dataclass, field

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from fairseq_alma.lm.learners import SingleModel, register_learner


@dataclass
class ContinuedConfig(FairseqDataclass):
    """Options of both schedules."""

    first_update: int = field(default=0, metadata={"help": "number of updates of all earlier stages"})
    warmup_updates: int = field(default=0, metadata={"help": "number of warm-up updates, over all stages"})
    cooldown_share: float = field(default=0.2, metadata={"help": "share of each stage in which the rate falls to 0"})
    max_update: int = II("optimization.max_update")
    lr: list[float] = II("optimization.lr")  # noqa: RUF009 (fairseq reads this text)


@register_lr_scheduler("wsd", dataclass=ContinuedConfig)
class WarmupStableDecay(FairseqLRScheduler):
    """Warm-up, constant rate, and a cooldown at the end of each stage."""

    def stable(self, update: int) -> float:
        """Return the factor of the rate after `update` updates of all stages, without warm-up and cooldown."""
        return 1.0

    def cooldown(self, done: float) -> float:
        """Return the factor of the rate after the share `done` of the cooldown."""
        return 1 - done**0.5

    def step_update(self, num_updates: int) -> float:
        """Set and return the rate after `num_updates` updates of this stage."""
        cfg = self.cfg
        update, length = cfg.first_update + num_updates, cfg.cooldown_share * cfg.max_update
        done = max(0.0, 1 - (cfg.max_update - num_updates) / length) if length else 0.0
        warmup = min(1.0, update / max(1, cfg.warmup_updates))
        self.optimizer.set_lr(cfg.lr[0] * warmup * self.stable(update) * self.cooldown(done))
        return self.optimizer.get_lr()


@register_lr_scheduler("rsqrt", dataclass=ContinuedConfig)
class InverseSquareRoot(WarmupStableDecay):
    """Warm-up, a rate that falls as the inverse square root, and a cooldown at the end of each stage."""

    def stable(self, update: int) -> float:
        warmup = max(1, self.cfg.warmup_updates)
        return (warmup / max(warmup, update)) ** 0.5

    def cooldown(self, done: float) -> float:
        return 1 - done


@register_learner("continued", label="Continued schedule")
class Continued(SingleModel):
    """One model, trained in stages of equal length, whose learning rate continues over the stages."""

    def training_options(self, stage, updates):
        return {"first_update": (stage.index - 1) * updates}
