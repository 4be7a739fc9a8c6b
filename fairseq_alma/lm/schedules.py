"""Learning-rate schedules over the whole stream (setting `schedule`): the learning rates of each stage."""

from dataclasses import dataclass
from typing import Literal

from fairseq_alma.core.protocol import Stage

Schedule = Literal["per_stage", "autoregressive", "constant", "rsqrt", "wsd"]
"""Type of the setting `schedule`."""

DEFAULT_COOLDOWN_SHARE = 0.2
"""Default of the setting `cooldown_share`."""


@dataclass(frozen=True)
class StageRates:
    """Learning rates of a stage: warm-up from 0 to `peak`, then a linear change to `end` at the last update.

    With schedule=wsd, the rate is constant between the warm-up and the cooldown, in which it changes linearly to `end`.
    """

    peak: float
    """Learning rate after the warm-up, or from the first update on if there is none."""
    end: float
    """Learning rate at the last update."""
    warmup_updates: int
    """Number of warm-up updates."""


def rates_of_stage(
    schedule: Schedule, lr: float, warmup_updates: int, stage: Stage | None, continues_optimizer: bool
) -> StageRates:
    """Return the learning rates of a stage.

    Let n be the number of mega-batches of earlier stages, and m the number with those of this stage.

    per_stage: warm-up to lr, then decay to 0 (the paper).
    autoregressive: the same, with the peak lr / sqrt(1 + n), so that later stages change the model less (Li et al.
        2025, "TiC-LM", lower the peak from month to month).
    constant: warm-up to lr, then lr.
    rsqrt: lr / sqrt(t), where t is the number of mega-batches that the model has seen; it changes linearly within a
        stage, from lr / sqrt(max(1, n)) to lr / sqrt(m).

    wsd: warm-up to lr, then lr until the cooldown, then decay to 0 (Hu et al. 2024, "MiniCPM"). The next stage
        continues from the model before the cooldown.

    With constant, rsqrt and wsd, the training continues from a model whose rate has not fallen to 0. So there is no
    warm-up after the first stage if the optimizer continues with its state.

    Args:
        schedule: the setting `schedule`.
        lr: the setting `lr`.
        warmup_updates: number of warm-up updates of a stage.
        stage: the stage. None means the first stage, with one mega-batch.
        continues_optimizer: whether the optimizer continues with its state from the previous stage.
    """
    num_past = len(stage.past) if stage else 0
    num_seen = num_past + (len(stage.new) if stage else 1)
    if schedule == "per_stage":
        return StageRates(lr, 0.0, warmup_updates)
    if schedule == "autoregressive":
        return StageRates(lr / (1 + num_past) ** 0.5, 0.0, warmup_updates)
    if num_past and continues_optimizer:
        warmup_updates = 0
    if schedule == "constant":
        return StageRates(lr, lr, warmup_updates)
    if schedule == "wsd":
        return StageRates(lr, 0.0, warmup_updates)
    return StageRates(lr / max(1, num_past) ** 0.5, lr / num_seen**0.5, warmup_updates)
