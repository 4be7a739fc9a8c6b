"""Settings that only some learners have. `catalogue.py` lists the settings class of each learner."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, Settings, setting

Combine = Literal["probability", "logit", "vote"]
"""How the outputs of an ensemble's members become one prediction: mean probability, mean logit, or majority vote."""
SplitBy = Literal["validation_loss", "gate_mass"]
"""Criterion that selects the experts to split: largest validation loss, or largest sum of gate probabilities."""
ExpertChoice = Literal["validation_loss", "gradient", "random"]
"""Criterion that selects the experts that a language model copies: largest validation loss, largest gradient of the
validation loss, or at random."""


@dataclass(frozen=True)
class LearnerSettings(Settings):
    """Base class for settings that only some learners have. This class itself defines no settings."""

    @property
    def stages_between_growths(self) -> int | None:
        """Number of stages from one growth (step that adds capacity) to the next, the setting `grow_every`.

        It is None for a learner without this setting, which grows at every stage or never.
        """
        return None

    def grows_before(self, stage_index: int) -> bool:
        """Return True if the networks of a language model get more parameters before stage `stage_index`."""
        return False

    def check_run(self, run: Any) -> None:
        """Raise SettingError if these settings are invalid for `run`, the object with all settings of the run."""


# ---- Settings of the vision learners (alma-vision).


@dataclass(frozen=True)
class EnsembleSettings(LearnerSettings):
    members: Count = setting(5, size=True)
    """Number of networks, N."""
    combine: Combine = "probability"
    """How the members' outputs are combined: mean `probability`, mean `logit`, or majority `vote`."""
    bagging: bool = False
    """Whether each member trains on a separate bootstrap sample of the stage's data."""


@dataclass(frozen=True)
class UnionMixSettings(LearnerSettings):
    members: Count = setting(5, size=True)
    """Number of networks, N."""
    combine: Literal["logit", "logit_sum"] = "logit"
    """How the members' outputs are combined: mean `logit` (the paper) or `logit_sum` (the authors' code)."""


@dataclass(frozen=True)
class GrowingEnsembleSettings(LearnerSettings):
    members: Count = setting(1, size=True)
    """Number of networks that each stage adds."""
    new_members_from: Literal["random", "copy"] = "random"
    """Initialisation of a new member: `random`, or a `copy` of the newest member (the authors' code)."""
    combine: Combine = "probability"
    """How the members' outputs are combined: mean `probability`, mean `logit`, or majority `vote`."""

    def check_run(self, run: Any) -> None:
        if run.from_scratch:
            raise SettingError(_no_effect_of_from_scratch(run))
        if run.average:
            raise SettingError(
                f"average={run.average} cannot be used with learner={run.learner}, whose stages train new networks "
                f"and keep the others: leave it out"
            )


@dataclass(frozen=True)
class GatedSettings(LearnerSettings):
    experts: Count = setting(1, size=True)
    """Number of experts in each mixture. In a growing mixture, this is the number before the first growth."""
    hard_gates: bool = False
    """Whether each gate selects a single branch (expert or group of experts) for an example. Otherwise, the outputs of
    all branches are averaged, weighted by the probabilities of the gate. In training with hard gates, the branch is
    sampled with these probabilities. In testing, the branch with the highest probability is selected."""


@dataclass(frozen=True)
class MixtureSettings(GatedSettings):
    def check_run(self, run: Any) -> None:
        if self.experts < 2:
            raise SettingError(
                f"experts={self.experts} must be at least 2, because learner={run.learner} trains mixtures of experts: "
                f"give a larger number, e.g. experts=4"
            )


@dataclass(frozen=True)
class GrowingMixtureSettings(GatedSettings):
    grow_every: Count = setting(1, growth=True, with_wait=True)
    """Number of stages from one growth to the next."""
    split_by: SplitBy = "validation_loss"
    """Criterion that selects the expert to split: the largest summed `validation_loss` (the paper), or the largest
    `gate_mass`, which is the sum of the expert's gate probabilities (the authors' code)."""

    @property
    def stages_between_growths(self) -> int:
        return self.grow_every


@dataclass(frozen=True)
class EnsembleOfMixturesSettings(MixtureSettings, GrowingEnsembleSettings):
    def check_run(self, run: Any) -> None:
        MixtureSettings.check_run(self, run)
        GrowingEnsembleSettings.check_run(self, run)


@dataclass(frozen=True)
class FireflySettings(LearnerSettings):
    grow_every: Count = setting(1, growth=True, with_wait=True)
    """Number of stages from one growth to the next."""
    grow_ratio: float = 0.25
    """Number of parameters that each growth adds, as a fraction of the parameters of the first network. With
    grow_by=width, grow_ratio determines the width of the layers instead, as described in grow_by."""
    grow_by: Literal["parameters", "width"] = "parameters"
    """What grow_ratio refers to: `parameters` (the paper) or `width` (the authors' code). With `width` and
    grow_every=1, the width after n growths is about c (1 + g n), where c is the width of the first network and g is
    grow_ratio. With a larger grow_every, there are fewer growths, and the remaining growths do not add more units,
    so the final network is smaller."""
    candidates: Count = 70
    """Number of candidates (units that may be added) per layer in each growth. The growth adds the candidates that
    lower the loss fastest."""

    @property
    def stages_between_growths(self) -> int:
        return self.grow_every

    def check_run(self, run: Any) -> None:
        if not 0 < self.grow_ratio < math.inf:
            raise SettingError(f"grow_ratio={self.grow_ratio} must be a finite number above 0")


# ---- Settings of the language-model learners (alma-lm).


@dataclass(frozen=True)
class LanguageModelEnsembleSettings(LearnerSettings):
    members: Count | None = setting(None, size=True)
    """Number of networks, N. Required."""

    def check_run(self, run: Any) -> None:
        if self.members is None:
            raise SettingError("learner=ens needs members=, e.g. members=2")


@dataclass(frozen=True)
class LanguageModelGrowingEnsembleSettings(LearnerSettings):
    members: Count = setting(1, size=True)
    """Number of networks that each stage adds."""

    def check_run(self, run: Any) -> None:
        if run.from_scratch:
            raise SettingError(_no_effect_of_from_scratch(run))


@dataclass(frozen=True)
class LanguageModelGrowingMixtureSettings(LearnerSettings):
    grow_experts: int | list[int] | None = setting(None, growth=True)
    """Number of experts that each growth adds to every mixture. Required. In a list, the first number is for the growth
    before stage 2, the second for the growth before stage 3, and so on; the last number is for all further growths."""
    grow_layers: int | list[int] = setting(0, growth=True, off=0)
    """Number of layers that each growth adds, an even number, or a list of such numbers like that of grow_experts. Each
    growth copies each pair of layers at most once. The copies have output projections of 0, so they do not change the
    output of the model. With grow_experts=0, only layers are added."""
    grow_router: Literal["copy", "tree"] = setting("copy", off="copy")
    """How to initialize the router row (weight vector) of a new expert, which is a copy of an existing expert, its
    parent. With `copy` (the paper), the router row is the router row of the parent plus noise. With `tree`, the router
    row is random noise, and is used only to decide which tokens of the parent go to the new expert instead. Growth with
    `tree` does not change the output of the model, because the new expert has the same weights as its parent."""
    copy_experts_by: ExpertChoice = setting("validation_loss", off="validation_loss")
    """How the experts that are copied are chosen: those with the largest summed `validation_loss` (the paper), those
    with the largest `gradient` of the validation loss with respect to their weights (Expert Upcycling), or at `random`.
    With `gradient`, each growth needs a forward and a backward pass over the validation set, which the ledger charges
    as training."""
    grow_drop: float = setting(0.0, off=0.0)
    """Drop-upcycling, for experts=1: share of the hidden units that the first growth re-initializes in each expert, at
    random. 0 makes exact copies, 1 re-initializes all units."""

    def added_at(self, stage_index: int) -> int:
        """Return the number of experts that are added to every mixture before a stage, whose index is at least 2."""
        return _number_at(self.grow_experts, stage_index)

    def layers_added_at(self, stage_index: int) -> int:
        """Return the number of layers that are added before a stage, whose index is at least 2."""
        return _number_at(self.grow_layers, stage_index)

    def grows_before(self, stage_index: int) -> bool:
        return stage_index > 1 and self.added_at(stage_index) + self.layers_added_at(stage_index) > 0

    @property
    def adds_experts(self) -> bool:
        """Whether a growth adds experts."""
        return any(_as_list(self.grow_experts))

    def check_num_layers(self, num_layers: int) -> None:
        """Raise SettingError if a model with `num_layers` layers cannot grow as these settings say."""
        if num_layers < 2 and self.adds_experts:
            raise SettingError(
                f"grow_experts={self.grow_experts} needs a mixture, which every second layer has, but the model has "
                f"{num_layers} layer: give it 2 layers or more"
            )
        for number, added in enumerate(_as_list(self.grow_layers), start=1):
            most = num_layers - num_layers % 2
            if added > most:
                raise SettingError(
                    f"grow_layers={self.grow_layers}: growth {number} would add {added} layers to the {num_layers} "
                    f"layers of the model, but one growth copies each pair of layers at most once. Set the number for "
                    f"growth {number} to at most {most}"
                )
            num_layers += added

    def check_run(self, run: Any) -> None:
        if self.grow_experts is None:
            raise SettingError("learner=gmoe needs grow_experts=, e.g. grow_experts=2")
        copied = ("grow_router", "copy_experts_by", "grow_drop")
        ignored = [f"{name}={value}" for name in copied if (value := getattr(self, name)) != getattr(type(self), name)]
        why = "from_scratch=true" if run.from_scratch else f"grow_experts={self.grow_experts}"
        growths = _as_list(self.grow_experts)
        if ignored and (run.from_scratch or (growths and not any(growths))):
            raise SettingError(f"{' '.join(ignored)} has no effect with {why}, which copies no experts: leave it out")
        if not 0 <= self.grow_drop <= 1:
            raise SettingError(f"grow_drop={self.grow_drop} must be a share between 0 and 1")
        if self.grow_drop > 0 and run.experts > 1:
            raise SettingError(
                f"grow_drop={self.grow_drop} is for growth from a dense model, but the first model has "
                f"{run.experts} experts in each mixture: set experts=1, or leave grow_drop out"
            )
        self._check_growths(run)

    def _check_growths(self, run: Any) -> None:
        """Raise SettingError if the numbers of experts and layers that are added are invalid."""
        for name in ("grow_experts", "grow_layers"):
            growths = _as_list(getattr(self, name))
            if not growths or not all(isinstance(k, int) and not isinstance(k, bool) for k in growths):
                raise SettingError(f"{name}={getattr(self, name)!r} must be an integer or a list of integers")
        for added in _as_list(self.grow_layers):
            if added < 0 or added % 2:
                raise SettingError(
                    f"grow_layers={self.grow_layers} must be even and not negative, because layers with a feed-forward "
                    f"network and layers with a mixture alternate. Set an even number of 0 or more"
                )
        experts = run.experts
        for number, added in enumerate(_as_list(self.grow_experts), start=1):
            if added < 0:
                raise SettingError(
                    f"grow_experts={self.grow_experts} must not be negative: growth only adds experts. Set 0 or more"
                )
            if run.from_scratch:  # no expert is copied
                pass
            elif experts == 1 and added:
                if self.grow_router == "copy":
                    raise SettingError(
                        f"grow_experts={self.grow_experts}: growth {number} would add {added} experts to a mixture of "
                        f"one expert. With grow_router=copy, this would divide the output of the mixture by about "
                        f"{added + 1}. Set grow_router=tree, which does not change the output"
                    )
            elif added > experts:
                raise SettingError(
                    f"grow_experts={self.grow_experts}: growth {number} would add {added} experts to the {experts} "
                    f"experts of each mixture, but one growth can at most double the number of experts. "
                    f"Set the number for growth {number} to at most {experts}"
                )
            experts += added


def _no_effect_of_from_scratch(run: Any) -> str:
    return f"from_scratch=true has no effect with learner={run.learner}, whose stages train new networks: leave it out"


def _as_list(growths: int | list[int] | None) -> list[int]:
    return growths if isinstance(growths, list) else [] if growths is None else [growths]


def _number_at(growths: int | list[int] | None, stage_index: int) -> int:
    """Return the number for the growth before a stage: the last number is for all further growths."""
    numbers = _as_list(growths)
    return numbers[min(stage_index - 2, len(numbers) - 1)]
