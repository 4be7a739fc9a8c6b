"""G_stack: grow a language model in depth by stacking it (Du et al. 2024, arXiv 2405.15319, section 3).

alma-lm plugin=results.rivals.gstack learner=gstack stack_at=2 stack_factor=2 ...

Before one stage, the layers of the model are repeated in their order: with factor 2, layers 1 to L become 1 to L, 1 to
L. Unlike growth with `grow_layers=`, this changes the output of the model. The paper recommends the factor 4, and
grows early in the training: here, it is after a whole stage.
"""

from dataclasses import dataclass

from fairseq_alma.core.errors import SettingError
from fairseq_alma.growth.layers import LAYER
from fairseq_alma.lm.learners import LearnerSettings, SingleModel, register_learner


@dataclass(frozen=True)
class StackSettings(LearnerSettings):
    """Settings of DepthwiseStacking."""

    stack_at: int = 2
    """Index of the stage before which the model is stacked, at least 2."""
    stack_factor: int = 2
    """How many times as many layers the model has then, at least 2."""

    def check_run(self, run):
        if min(self.stack_at, self.stack_factor) < 2:
            raise SettingError(f"stack_at={self.stack_at} and stack_factor={self.stack_factor} must be at least 2")
        if run.from_scratch or not run.arch.startswith("switch_lm"):
            raise SettingError(f"learner={run.learner} needs a switch_lm model, and is not made for from_scratch")

    def grows_before(self, stage_index):
        return stage_index == self.stack_at


def stacked(weights, factor):
    """Return the weights of a model whose layers are repeated `factor` times. `weights` is not changed."""
    num_layers = 1 + max(int(match[1]) for name in weights if (match := LAYER.fullmatch(name)))
    grown = dict(weights)
    for name, value in weights.items():
        if match := LAYER.fullmatch(name):
            for copy in range(1, factor):
                grown[f"decoder.layers.{int(match[1]) + copy * num_layers}.{match[2]}"] = value.clone()
    return grown


@register_learner("gstack", label="G_stack", settings=StackSettings)
class DepthwiseStacking(SingleModel):
    """One model that is stacked once."""

    learner_settings: StackSettings

    def __init__(self, *arguments):
        super().__init__(*arguments)
        num_layers = self._training.num_layers(self._member(1, stage_index=1))
        if num_layers % 2:
            raise SettingError(
                f"a model of {num_layers} layers cannot be stacked, because every second one is a mixture"
            )

    def added_layers(self, stage_index):
        own = self.learner_settings
        if stage_index < own.stack_at:
            return 0
        return (own.stack_factor - 1) * self._training.num_layers(self._member(1, stage_index=1))

    def grow(self, stage):
        """Stack the weights from which the stage starts, if it is the one. Return the cost: no FLOPs."""
        if self.learner_settings.grows_before(stage.index):
            self.change_weights(stage, lambda weights: stacked(weights, self.learner_settings.stack_factor))
        return super().grow(stage)
