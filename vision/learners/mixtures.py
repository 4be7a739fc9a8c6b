"""Learners whose networks contain mixtures of experts: MoE, gMoE, and an ensemble of such networks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_alma.core.learner_settings import (
    EnsembleOfMixturesSettings,
    GatedSettings,
    GrowingMixtureSettings,
    MixtureSettings,
    SplitBy,
)
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from vision.batches import StageData
from vision.learners.base import VisionLearner, register_learner
from vision.learners.ensembles import GrowingEnsemble
from vision.networks import GatedStack, Stack

# Shapes: S seeds, M networks, L mixtures of a network, E experts, n examples, C classes.


class _MixtureLearner(VisionLearner):
    """Base class of learners with one network per seed. The network contains several mixtures of experts.

    In a multilayer perceptron, both hidden layers are mixtures of experts. In a VGG, blocks 2 to 5 are mixtures.
    """

    learner_settings: GatedSettings
    stack: GatedStack

    def new_network(self, generators: Sequence[torch.Generator]) -> Stack:
        return self.backbone.mixture(
            self.learner_settings.experts, self.learner_settings.hard_gates, generators, self.device
        )

    def _validate(self, data: StageData) -> Sequence[tuple[float, float] | None]:
        scores = super()._validate(data)
        # This needs no further forward pass: super()._validate() has computed the networks' outputs for the validation
        # examples, and the networks still store the weights that their experts had for these examples.
        assert isinstance(self.predictor, GatedStack)
        self.expert_load = expert_load(self.predictor, len(self.seeds))
        return scores

    def extra_state(self) -> dict[str, Any]:
        return {"expert_load": self.expert_load}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.expert_load = state["expert_load"]


@register_learner("moe")
class Mixture(_MixtureLearner):
    """MoE: mixtures with a constant number of experts, E (version 1 of the paper)."""

    learner_settings: MixtureSettings


@register_learner("gmoe")
class GrowingMixture(_MixtureLearner):
    """gMoE: mixtures that grow between stages. In each mixture, the expert with the largest loss is split in two."""

    learner_settings: GrowingMixtureSettings
    flat = False
    """Whether each mixture has one softmax gate over all experts, instead of a tree of gates."""

    def grow(self, stage: Stage) -> list[Spent]:
        """Every `grow_every` stages, split one expert of each mixture in two. Return the cost of choosing the experts.

        `worst_experts` chooses the experts, using the validation data of the previous stage.
        """
        if (stage.index - 1) % self.learner_settings.grow_every:
            return super().grow(stage)
        stack, data = self.stack, self.memory.previous_stage_data(stage, self.stage_length).validation
        worst = worst_experts(stack, data.parts(stack.examples_at_once), data.labels, self.learner_settings.split_by)
        self.stack = stack.split(worst, self.generators("growth", stage.index), self.flat)
        return [Spent(validation_flops=stack.flops.forward * data.num_examples) for _ in self.seeds]


@register_learner("gmoe_flat")
class GrowingFlatMixture(GrowingMixture):
    """gMoE with one softmax gate over all experts (ablation in version 1 of the paper).

    Each growth changes the outputs of the network. In gMoE, which has a tree of gates, growth does not change the
    outputs, up to rounding.
    """

    flat = True


@register_learner("ens_moe")
class EnsembleOfMixtures(GrowingEnsemble):
    """gEns with networks that contain mixtures of experts (ablation in version 1 of the paper).

    Each stage adds new networks and trains only these. The networks of earlier stages are frozen.
    """

    learner_settings: EnsembleOfMixturesSettings  # type: ignore[assignment]  # the settings of MoE and of gEns
    stack: GatedStack

    new_network = _MixtureLearner.new_network  # type: ignore[assignment]

    def _validate(self, data: StageData) -> Sequence[tuple[float, float] | None]:
        # Append the load of the new networks. Each network has the load on the validation data of its own stage.
        self.stack.logits_of_parts(data.validation.parts(self.stack.examples_at_once))
        new = expert_load(self.stack, len(self.seeds))
        known = self.expert_load or [[] for _ in self.seeds]
        self.expert_load = [[*old, *of_seed] for old, of_seed in zip(known, new, strict=True)]
        return super()._validate(data)

    def extra_state(self) -> dict[str, Any]:
        return super().extra_state() | {"expert_load": self.expert_load}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.expert_load = state.get("expert_load")


def expert_load(stack: GatedStack, num_seeds: int) -> list[list[list[float]]]:
    """Return the mean weight of each expert over the examples of the last forward pass, for a stack of all seeds.

    The result is indexed by seed, mixture and expert. If there are several networks per seed, the mixtures of the first
    network come first.
    """
    load_MLE = torch.stack([weights.mean(1) for weights in stack.expert_weights], dim=1)
    return load_MLE.unflatten(0, (num_seeds, -1)).flatten(1, 2).tolist()


def worst_experts(stack: GatedStack, parts: Iterable[Tensor], y_Sn: Tensor, split_by: SplitBy) -> list[list[int]]:
    """Return, for each mixture and each network, the index of the expert that should be split.

    Args:
        stack: one network per seed, so M = S.
        parts: examples as network inputs, [S, n, ...], in parts that are forward passes.
        y_Sn: classes of the examples.
        split_by: how experts are compared. For each expert, a value per example is summed over all examples, and the
            expert with the largest sum is chosen. With "validation_loss", the value is the loss of the example, times
            the weight of the expert for this example. With "gate_mass" (the authors' code), the value is the weight
            alone. With soft gates, the weight is the gate probability of the expert. With hard gates, the weight is 1
            if the example uses the expert, otherwise 0.
    """
    sums: list[Tensor] = []
    start = 0
    for x_part in parts:
        y_part = y_Sn[:, start : start + x_part.shape[1]]
        start += x_part.shape[1]
        logits_MnC = stack.logits(x_part)
        amount_Mn = torch.ones_like(y_part, dtype=torch.float)
        if split_by == "validation_loss":
            amount_Mn = -logits_MnC.log_softmax(-1).gather(-1, y_part.unsqueeze(-1)).squeeze(-1)
        part = [torch.einsum("mn,mne->me", amount_Mn, weights_MnE).double() for weights_MnE in stack.expert_weights]
        sums = [a + b for a, b in zip(sums, part, strict=True)] if sums else part
    return [sum_ME.argmax(-1).tolist() for sum_ME in sums]
