"""The autoregressive (AR) meta-schedule of TiC-LM (Li et al. 2025, arXiv 2504.02107).

alma-lm plugin=results.rivals.tic_lm learner=tic_lm later_lr_ratio=0.1 replay=0.5 fairseq='--lr-scheduler cosine' ...

Every stage has a warm-up and a cosine that ends at a hundredth of the setting `lr`, with a new state of the optimizer.
The first stage is TiC-LM's initial training and rises to `lr`; all later ones are its continual rounds i = 0, 1, ...
with a maximum and a warm-up of their own (in the paper, the warm-ups have 5,000 and 50 updates). They rise to the rate
of one cosine from `later_lr_ratio` times `lr` over all rounds up to the present one, at the place where the warm-up of
this round ends. With warm-ups of w updates and rounds of S (`cosine_plus_ar_max_lr` in training/utils.py of
apple/ml-tic-lm, with a warm-up of (i + 1) w), that place is

    (S i + w - (i + 1) w) / (S (i + 1) - (i + 1) w) = i / (i + 1)

of the cosine, so the maxima fall as 1, 1/2, 1/4, 0.15, ... The idea is that of Roth et al. (2024, arXiv 2408.14471).
"""

import math
from dataclasses import dataclass

from fairseq_alma.lm.learners import LearnerSettings, SingleModel, register_learner


@dataclass(frozen=True)
class TicLMSettings(LearnerSettings):
    """Settings of TicLM."""

    later_lr_ratio: float = 0.1
    """Maximum learning rate of the second stage, as a multiple of `lr`."""
    later_warmup: int = 4
    """Number of warm-up updates of each stage from the second one on."""


@register_learner("tic_lm", label="TiC-LM", settings=TicLMSettings)
class TicLM(SingleModel):
    """One model that every stage trains with a cosine schedule, whose maximum falls from stage to stage."""

    learner_settings: TicLMSettings

    def training_options(self, stage, updates):
        end = self.settings.lr / 100
        options = {"lr": [self.maximum(stage.index, end)], "min_lr": end}
        return options if stage.index == 1 else options | {"warmup_updates": self.learner_settings.later_warmup}

    def maximum(self, stage_index: int, end: float) -> float:
        """Return the maximum learning rate of a stage, given the rate `end` at which every stage ends."""
        if stage_index == 1:
            return self.settings.lr
        later, i = self.learner_settings.later_lr_ratio * self.settings.lr, stage_index - 2
        return end + (later - end) * (1 + math.cos(math.pi * i / (i + 1))) / 2
