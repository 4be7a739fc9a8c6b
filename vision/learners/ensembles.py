"""The single model SM and the ensembles Ens, UMix and gEns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.core.learner_settings import Combine, EnsembleSettings, GrowingEnsembleSettings, UnionMixSettings
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.run_folder import RunFolder
from vision.batches import StageData
from vision.checkpoints import read_checkpoint
from vision.learners.base import VisionLearner, register_learner
from vision.learners.files import NETWORKS
from vision.networks import Stack
from vision.training import JointLoss, OwnLoss


@register_learner("sm")
class SingleModel(VisionLearner):
    """SM: one network. Every stage continues to train it."""


@register_learner("ens")
class Ensemble(VisionLearner):
    """Ens: N networks that are trained separately and predict together. Bagging and majority vote are options."""

    learner_settings: EnsembleSettings

    @property
    def networks_per_seed(self) -> int:
        return self.learner_settings.members

    @property
    def combine(self) -> Combine:
        return self.learner_settings.combine

    @property
    def bagging(self) -> bool:
        return self.learner_settings.bagging


@register_learner("umix")
class UnionMix(VisionLearner):
    """UMix: N networks that are trained as one model.

    The logits of the model are the mean of the networks' logits. The authors' code uses the sum instead of the mean.
    """

    learner_settings: UnionMixSettings

    @property
    def networks_per_seed(self) -> int:
        return self.learner_settings.members

    @property
    def combine(self) -> Combine:
        return "logit"

    @property
    def predictor_combine(self) -> str:
        return self.learner_settings.combine

    def loss(self) -> OwnLoss:
        is_mean = self.learner_settings.combine == "logit"
        return JointLoss(len(self.seeds), self.networks_per_seed, is_mean, self.settings.label_smoothing)


@register_learner("gens")
class GrowingEnsemble(VisionLearner):
    """gEns: each stage adds `members` new networks and trains only these.

    The networks of earlier stages are frozen: they do not change any more, but still predict.
    """

    learner_settings: GrowingEnsembleSettings
    needs_networks_of_all_stages = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._files: list[Path] = []
        """The files of the networks of stages 1, 2 ... Each save asks for those of all stages."""
        self._frozen: list[tuple[str, Stack]] = []
        self._num_frozen = 0
        """Number of stages whose networks are frozen. If it is 3, the networks of stages 1, 2 and 3 are frozen."""

    @property
    def networks_per_seed(self) -> int:
        return self.learner_settings.members

    @property
    def combine(self) -> Combine:
        return self.learner_settings.combine

    @property
    def members(self) -> list[tuple[str | None, Stack]]:
        is_trained = self.stage_index > self._num_frozen
        return [*self.frozen, (f"stage {self.stage_index}" if is_trained else None, self.stack)]

    @property
    def frozen(self) -> list[tuple[str, Stack]]:
        """The frozen networks, as (name of the stage, stack of its networks). Missing stacks are read from files."""
        # `load` may have restored an earlier state, in which the networks of fewer stages are frozen. So delete the
        # networks of later stages from the list.
        del self._frozen[self._num_frozen :]
        for index in range(len(self._frozen) + 1, self._num_frozen + 1):
            file = self._files_of_stages(index)[-1]
            stack = read_checkpoint(file, self.device, self.settings.network)
            self._frozen.append((f"stage {index}", self._prepared(stack)))
        return self._frozen

    def grow(self, stage: Stage) -> list[Spent]:
        """Freeze the networks of the previous stage and create new networks.

        By default, the new networks have random parameters. If the setting `new_members_from` is "copy", as in the
        authors' code, the new networks are copies of the networks of the previous stage.
        """
        last, frozen = self.stack, self.frozen
        frozen.append((f"stage {self.stage_index}", last))
        self._num_frozen = len(frozen)
        self.stack = self.new_stack(stage.index)
        if self.learner_settings.new_members_from == "copy":
            for new, old in zip(self.stack.tensors, last.tensors, strict=True):
                new.flat.copy_(old.flat)
        return super().grow(stage)

    def _validate(self, data: StageData) -> Sequence[tuple[float, float] | None]:
        # The scores of the predictor need the outputs of all frozen networks. The evaluator has them already, because
        # it has scored the predictor on these mega-batches before the stage.
        return [None] * len(self.seeds)

    def extra_state(self) -> dict[str, Any]:
        return {"num_frozen": self._num_frozen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._num_frozen = state["num_frozen"]

    def predictor_files(self) -> list[Path]:
        return self._files_of_stages(self.stage_index)

    def _files_of_stages(self, last: int) -> list[Path]:
        run = RunFolder(Path(self.settings.out))
        for index in range(len(self._files) + 1, last + 1):
            self._files.append(run.stage(index) / "train" / NETWORKS)
        return self._files[:last]
