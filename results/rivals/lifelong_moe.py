"""Lifelong-MoE: new experts, frozen old ones, and distillation (Chen et al. 2023, ICML, arXiv 2305.12281, section 3).

alma-lm plugin=results.rivals.lifelong_moe learner=lifelong_moe experts=4 grow_experts=[2,2,4] \
    fairseq='--criterion lifelong_moe --distillation-weight 1' ...

Before each stage but the first, experts are added as learner=gmoe adds them, as copies. The old experts and their rows
of the router are frozen: the new text changes only the new experts and what all tokens share. The model also learns the
predictions of the last stage's predictor on the new text (results/rivals/lwf.py), so that the shared layers do not
drift. In a stage without growth, nothing is frozen.
"""

from dataclasses import dataclass, field

from fairseq.criterions import register_criterion

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import LanguageModelGrowingMixtureSettings
from fairseq_alma.lm.learners import GrowingMixture, register_learner
from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward
from results.rivals.lwf import LearningWithoutForgetting, LwfConfig, LwfCriterion


@dataclass
class LifelongMixtureConfig(LwfConfig):
    """Options of the criterion lifelong_moe."""

    frozen_experts: int = field(default=0, metadata={"help": "number of experts in each mixture that do not change"})


@register_criterion("lifelong_moe", dataclass=LifelongMixtureConfig)
class LifelongMixtureCriterion(LwfCriterion):
    """The criterion lwf, with gradients of 0 for the first experts of each mixture and for their rows of the router."""

    def __init__(
        self, task, balance_loss_weight, router_z_loss_weight, teacher, distillation_weight, temperature, frozen_experts
    ):
        super().__init__(task, balance_loss_weight, router_z_loss_weight, teacher, distillation_weight, temperature)
        self.frozen_experts, self._is_frozen = frozen_experts, False

    def forward(self, model, sample, reduce=True):
        if self.frozen_experts and not self._is_frozen:
            self._is_frozen = True
            for mixture in (module for module in model.modules() if isinstance(module, SwitchFeedForward)):
                experts = (mixture.fc1_weight, mixture.fc1_bias, mixture.fc2_weight, mixture.fc2_bias)
                for parameter in (*experts, mixture.router.weight):
                    parameter.register_hook(self._without_frozen)
        return super().forward(model, sample, reduce)

    def _without_frozen(self, gradient):
        """Return the gradient [E, ...] with 0 for the frozen experts."""
        gradient = gradient.clone()
        gradient[: self.frozen_experts] = 0
        return gradient


@dataclass(frozen=True)
class LifelongMixtureSettings(LanguageModelGrowingMixtureSettings):
    """The settings of learner=gmoe."""

    def check_run(self, run):
        super().check_run(run)
        if run.weight_decay:
            raise SettingError(f"learner={run.learner} needs weight_decay=0, which would move the frozen experts")
        if run.from_scratch or run.expert_parallel > 1 or self.grow_layers:
            raise SettingError(f"learner={run.learner} is not made for from_scratch, expert_parallel and grow_layers")


@register_learner("lifelong_moe", label="Lifelong-MoE", settings=LifelongMixtureSettings)
class LifelongMixture(LearningWithoutForgetting, GrowingMixture):
    """A growing mixture whose old experts are frozen, with the last stage's predictor as teacher."""

    def training_options(self, stage, updates):
        old = self.num_experts(stage.index - 1) if stage.index > 1 else 0
        grown = self.num_experts(stage.index) > old
        return {**super().training_options(stage, updates), "frozen_experts": old if grown else 0}
