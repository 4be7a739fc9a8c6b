"""Elastic weight consolidation for language models (Kirkpatrick et al. 2017, arXiv 1612.00796, equation 3).

alma-lm plugin=results.rivals.ewc learner=ewc fairseq='--criterion ewc --ewc-weight 0.01' ...

Before each stage, the diagonal of the Fisher information is measured on 100 sequences of the last mega-batch, as
squared gradients of their log-likelihoods. The penalty holds the weights at those after the last stage only, as in
TiC-LM (arXiv 2504.02107), which measures it on the new mega-batch instead. The passes are charged as training FLOPs.

A log-likelihood is a sum over the tokens of a sequence, and the loss to which the penalty is added a mean over tokens.
So for stages of equal length, equation 3 has lambda = 1 / (tokens of a sequence), 0.008 for 128. TiC-LM's weights are
those of squared gradients of means over batches, and cannot be compared.
"""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Optional

import torch
from fairseq.criterions import register_criterion

from fairseq_alma.checkpoints import require_checkpoint, write_checkpoint
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.criteria.switch_lm import SwitchLanguageModelCriterion, SwitchLanguageModelCriterionConfig
from fairseq_alma.evaluation.flops import count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.scoring import batches_of
from fairseq_alma.lm.learners import SingleModel, register_learner

NUM_SEQUENCES = 100
"""Number of sequences on which the Fisher information is measured."""


@dataclass
class EwcConfig(SwitchLanguageModelCriterionConfig):
    """Options of the criterion ewc."""

    anchor: Optional[str] = field(default=None, metadata={"help": "file with Fisher information and old weights"})
    ewc_weight: float = field(default=1.0, metadata={"help": "weight of the penalty, lambda in the paper"})


def penalty(model, fisher, old):
    """Return the sum of F (weight - old weight)^2 over all weights."""
    weights = dict(model.named_parameters())
    return sum((fisher[name].to(w) * (w - old[name].to(w)).square()).sum() for name, w in weights.items())


@register_criterion("ewc", dataclass=EwcConfig)
class EwcCriterion(SwitchLanguageModelCriterion):
    """The criterion switch_lm, plus in training lambda / 2 sum F (weight - old weight)^2 for each token."""

    def __init__(self, task, balance_loss_weight, router_z_loss_weight, anchor, ewc_weight):
        super().__init__(task, balance_loss_weight, router_z_loss_weight)
        self.anchor, self.ewc_weight = require_checkpoint(Path(anchor)) if anchor else None, ewc_weight

    def forward(self, model, sample, reduce=True):
        loss, num_tokens, log = super().forward(model, sample, reduce)
        if self.anchor is None or not self.training:
            return loss, num_tokens, log
        loss = loss + num_tokens * self.ewc_weight / 2 * penalty(model, **self.anchor)
        return loss, num_tokens, {**log, "loss": loss.detach()}


def fisher_information(model, batches):
    """Return the diagonal of the Fisher information by name of a parameter: a mean over batches of one sequence."""
    fisher, count = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}, 0
    for source, target in batches:
        model.zero_grad()
        model(source, nll_of=target)[0].backward()
        count += 1
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                fisher[name] += weight.grad.square()
    return {name: total / count for name, total in fisher.items()}


@register_learner("ewc", label="EWC")
class ElasticWeightConsolidation(SingleModel):
    """One model whose weights a penalty holds at those of the last stage, where these mattered."""

    def training_options(self, stage, updates):
        return {"anchor": str((stage.folder / "grow" / "anchor.pt").absolute())} if stage.index > 1 else {}

    def grow(self, stage):
        """Measure the Fisher information and write it with the weights. Return the cost."""
        model, task = load_member(self.predictor[0], StreamFolder.open(self._stream.path), torch.device("cpu"))
        batches = batches_of(task, f"mega_batch_{stage.past[-1].t}", task.args.tokens_per_sample)
        batches = list(islice(batches, NUM_SEQUENCES))
        fisher, old = fisher_information(model, batches), dict(model.named_parameters())
        anchor = {"fisher": fisher, "old": {name: weight.detach() for name, weight in old.items()}}
        write_checkpoint(anchor, stage.folder / "grow" / "anchor.pt")
        flops = sum(count_training_flops(model).total(t.numel(), t.numel() * t.size(1)) for _, t in batches)
        (spent,) = super().grow(stage)
        return [spent + Spent(train_flops=flops)]
