"""Learning without forgetting for language models (Li and Hoiem 2016, arXiv 1606.09282, section 3).

alma-lm plugin=results.rivals.lwf learner=lwf fairseq='--criterion lwf --distillation-weight 0.3' ...

On the new text, the model also learns the predictions of a teacher, the predictor of the last stage. The paper has a
head for each task. A language model has one vocabulary, so its only head learns both, as in TiC-LM (arXiv 2504.02107).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

import torch
from fairseq.criterions import register_criterion
from torch.nn import functional as F

from fairseq_alma.criteria.switch_lm import SwitchLanguageModelCriterion, SwitchLanguageModelCriterionConfig
from fairseq_alma.evaluation.flops import count_forward_flops, count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.lm.learners import SingleModel, register_learner


@dataclass
class LwfConfig(SwitchLanguageModelCriterionConfig):
    """Options of the criterion lwf."""

    teacher: Optional[str] = field(default=None, metadata={"help": "checkpoint of the teacher; without it: switch_lm"})
    distillation_weight: float = field(default=1.0, metadata={"help": "weight of the distance from the teacher"})
    temperature: float = field(default=2.0, metadata={"help": "temperature of both softmaxes in the distance"})


def distance(scores, teacher_scores, is_token, temperature):
    """Return KL(teacher || model) in nats, summed over the tokens, with all scores [B, L, V] / temperature."""
    own, taught = ((one.float() / temperature).log_softmax(-1) for one in (scores, teacher_scores))
    return F.kl_div(own[is_token], taught[is_token], log_target=True, reduction="sum")


@register_criterion("lwf", dataclass=LwfConfig)
class LwfCriterion(SwitchLanguageModelCriterion):
    """The criterion switch_lm, plus the weighted distance from the teacher in training."""

    def __init__(self, task, balance_loss_weight, router_z_loss_weight, teacher, distillation_weight, temperature):
        super().__init__(task, balance_loss_weight, router_z_loss_weight)
        self.distillation_weight, self.temperature = distillation_weight, temperature
        # In a list, because fairseq would train and save a teacher that is a module of the criterion.
        self.teachers = [load_member(Path(teacher), task.stream, torch.device("cpu"))[0]] if teacher else []

    def forward(self, model, sample, reduce=True):
        if not self.teachers or not self.training:
            return super().forward(model, sample, reduce)
        target = sample["target"]
        teacher = self.teachers[0].to(target.device)
        with torch.no_grad():
            teacher_scores, _ = teacher(**sample["net_input"])
        found = []

        def scored(nll_of, **inputs):
            scores, extra = model(**inputs)
            found.append(distance(scores, teacher_scores, target.ne(self.padding_idx), self.temperature))
            logits_TV = scores.flatten(0, 1).float()
            return F.cross_entropy(logits_TV, nll_of.flatten(), ignore_index=self.padding_idx, reduction="sum"), extra

        scored.module = model  # like a wrapper of fairseq
        loss, num_tokens, log = super().forward(scored, sample, reduce)
        loss = loss + self.distillation_weight * found[0]
        return loss, num_tokens, {**log, "loss": loss.detach()}


@register_learner("lwf", label="LwF")
class LearningWithoutForgetting(SingleModel):
    """One model that learns each mega-batch and the predictions of the last stage's predictor on it."""

    def training_options(self, stage, updates):
        return {"teacher": str(self.predictor[0].absolute())} if stage.index > 1 else {}

    def train(self, stage):
        """Train one stage. Return the cost, with the teacher's forward passes."""
        (spent,) = super().train(stage)
        if stage.index == 1:
            return [spent]
        model, _ = load_member(self.predictor[0], self._stream, torch.device("cpu"))
        length = self.settings.tokens_per_sample
        share = count_forward_flops(model).of_row(length) / count_training_flops(model).of_row(length)
        return [replace(spent, train_flops=spent.train_flops + round(share * spent.train_flops))]
