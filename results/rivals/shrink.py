"""Shrink and perturb for language models (Ash and Adams 2020, arXiv 1910.08475, section 4).

alma-lm plugin=results.rivals.shrink learner=shrink shrink=0.6 noise=0.1 ...

docs/extending.md has the same learner for images.
"""

from dataclasses import dataclass

from fairseq_alma.checkpoints import require_checkpoint
from fairseq_alma.lm.fairseq_config import Member
from fairseq_alma.lm.learners import LearnerSettings, SingleModel, register_learner

PARAMETERS = ("weight", "bias")
"""Ends of the names of parameters. The other tensors of a model are counts."""


@dataclass(frozen=True)
class ShrinkSettings(LearnerSettings):
    """Settings of ShrinkAndPerturb."""

    shrink: float = 0.6
    """Factor that multiplies all weights before each stage."""
    noise: float = 0.1
    """Factor that multiplies the untrained weights that are added."""


@register_learner("shrink", label="Shrink and perturb", settings=ShrinkSettings)
class ShrinkAndPerturb(SingleModel):
    """One model whose weights are shrunk, and perturbed with new untrained weights, before each stage."""

    learner_settings: ShrinkSettings

    def grow(self, stage):
        """Shrink and perturb the weights from which the stage starts. Return the cost: no FLOPs."""
        own = self.learner_settings
        # Each stage draws the untrained weights anew, with the seed that from_scratch=true would use.
        member = Member.of_run(stage.index, self.settings.seed, self.settings.experts)
        untrained = require_checkpoint(self._training.untrained(member, stage.folder / "scratch"))["model"]
        self.change_weights(
            stage,
            lambda weights: {
                name: own.shrink * old + own.noise * untrained[name] if name.endswith(PARAMETERS) else old
                for name, old in weights.items()
            },
        )
        return super().grow(stage)
