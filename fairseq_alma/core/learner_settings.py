"""Settings that belong to single learners. `catalogue.py` says which learner takes which of these classes."""

from dataclasses import dataclass
from typing import Any, Literal

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, NonNegative, Settings

Combine = Literal["probability", "logit", "vote"]
"""How the outputs of several members become one prediction: mean probability, mean logit, or majority vote."""
SplitBy = Literal["validation_loss", "gate_mass"]
"""What decides which expert is split."""


@dataclass(frozen=True)
class LearnerSettings(Settings):
    """Settings that belong to one learner. This base class has none."""

    @property
    def stages_between_growths(self) -> int | None:
        """Number of stages from one growth to the next; None if the learner grows at every stage or not at all."""
        return None

    def check_run(self, run: Any) -> None:
        """Check these settings against those of the whole run. The base class accepts everything.

        Args:
            run: the `VisionSettings` or `LanguageModelSettings` that contain this object.

        Raises:
            SettingError: the two do not fit together.
        """


# ---- Settings of the vision learners (alma-vision).


@dataclass(frozen=True)
class EnsembleSettings(LearnerSettings):
    members: Count = 5
    """Number of networks, N."""
    combine: Combine = "probability"
    """What is averaged over the members: `probability`, `logit`, or the majority `vote`."""
    bagging: bool = False
    """Whether each member trains on its own bootstrap sample of the stage's data."""


@dataclass(frozen=True)
class UnionMixSettings(LearnerSettings):
    members: Count = 5
    """Number of networks, N."""
    umix: Literal["mean", "sum"] = "mean"
    """Whether the prediction is the mean of the members' logits (the paper) or their sum (the authors' code)."""


@dataclass(frozen=True)
class GrowingEnsembleSettings(LearnerSettings):
    new_members: Count = 1
    """Number of networks that each stage adds, k."""
    new_members_from: Literal["random", "copy"] = "random"
    """Initialisation of a new member: `random`, or a `copy` of the newest member (the authors' code)."""
    gens_combine: Combine = "probability"
    """What is averaged over the members: `probability`, `logit`, or the majority `vote`."""

    def check_run(self, run: Any) -> None:
        if run.recipe.from_scratch and self.new_members_from == "copy":
            raise SettingError(
                "from_scratch=true draws every network anew, new_members_from=copy copies it: give one of them"
            )


@dataclass(frozen=True)
class GatedSettings(LearnerSettings):
    experts: Count = 1
    """Number of experts in each mixture; for a growing mixture, before its first growth."""
    hard_gates: bool = False
    """Whether a mixture uses one branch at each gate, drawn at random in training and the likelier one in testing."""


@dataclass(frozen=True)
class MixtureSettings(GatedSettings):
    def check_run(self, run: Any) -> None:
        if self.experts < 2:
            raise SettingError(f"learner={run.learner} needs experts=, at least 2")


@dataclass(frozen=True)
class GrowingMixtureSettings(GatedSettings):
    grow_every: Count = 1
    """Number of stages from one growth to the next."""
    split_by: SplitBy = "validation_loss"
    """What decides which expert is split: its summed `validation_loss` (the paper), or its `gate_mass`, the sum of its
    gate probabilities (the authors' code)."""

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
    grow_every: Count = 1
    """Number of stages from one growth to the next."""
    grow_ratio: float = 0.25
    """Share of the first network's parameters that each growth adds. With grow_by=width: g of the authors' code."""
    grow_by: Literal["parameters", "width"] = "parameters"
    """What grow_ratio counts: `parameters` (the paper), or `width` (the authors' code: the width is c (1 + g t) if the
    network grows at every stage; with a larger grow_every it grows by the same steps, but fewer of them)."""
    grow_depth: NonNegative = 0
    """Number of layers that each growth adds before it widens. With grow_by=parameters fewer are added where the
    parameters do not suffice."""
    candidates: Count = 70
    """Number of candidate units that each layer is offered at a growth."""

    @property
    def stages_between_growths(self) -> int:
        return self.grow_every

    def check_run(self, run: Any) -> None:
        if not self.grow_ratio > 0:
            raise SettingError(f"grow_ratio={self.grow_ratio} must be above 0")
        if self.grow_depth > run.num_layers:
            raise SettingError(
                f"grow_depth={self.grow_depth} is more than one new layer after each of the {run.num_layers} layers of "
                f"the first network on {run.dataset}: give at most {run.num_layers}"
            )


# ---- Settings of the language-model learners (alma-lm).


@dataclass(frozen=True)
class LanguageModelEnsembleSettings(LearnerSettings):
    members: Count | None = None
    """Number of models, N. Must be given."""

    def check_run(self, run: Any) -> None:
        if self.members is None:
            raise SettingError("learner=ens needs members=, e.g. members=2")


@dataclass(frozen=True)
class LanguageModelGrowingMixtureSettings(LearnerSettings):
    grow_experts: int | list[int] | None = None
    """Number of experts that each growth adds to every mixture. Must be given. In a list, the first number is for the
    growth before stage 2, and the last number is for all further growths."""
    grow_router: Literal["copy", "tree"] = "copy"
    """How the router row of a new expert is made: `copy` (the paper), or `tree`, which keeps output and loss."""
    grow_noise: float = 0.01
    """Norm of the noise added to a new router row, relative to the norm of the row that it copies."""

    def added_at(self, stage_index: int) -> int:
        """Return how many experts the growth before stage k >= 2 adds to every mixture."""
        growths = self._growths
        return growths[min(stage_index - 2, len(growths) - 1)]

    @property
    def _growths(self) -> list[int]:
        if isinstance(self.grow_experts, list):
            return self.grow_experts
        return [] if self.grow_experts is None else [self.grow_experts]

    def check_run(self, run: Any) -> None:
        if self.grow_experts is None:
            raise SettingError("learner=gmoe needs grow_experts=, e.g. grow_experts=2")
        if not self.grow_noise > 0:
            raise SettingError(f"grow_noise={self.grow_noise} must be above 0: equal router rows never separate")
        if not self._growths or not all(isinstance(k, int) and not isinstance(k, bool) for k in self._growths):
            raise SettingError(f"grow_experts={self.grow_experts!r} must be a whole number or a list of them")
        experts = run.experts
        for number, added in enumerate(self._growths, start=1):
            if added < 0:
                raise SettingError(f"grow_experts={self.grow_experts}: growth adds experts, it never removes any")
            if added > experts:
                raise SettingError(
                    f"grow_experts={self.grow_experts}: growth {number} would copy {added} of {experts} experts, and "
                    f"one growth can at most double them"
                )
            experts += added
