"""The language-model learners.

A learner decides which members (networks) a stage trains, from which checkpoints their training starts, and which
checkpoints make the predictions. The labels and settings of the learners are in `fairseq_alma.core.catalogue`.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_alma.checkpoints import GROWN, require_checkpoint
from fairseq_alma.core import catalogue
from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import sealed, sha256_once, write_json
from fairseq_alma.core.learner_settings import (
    LanguageModelEnsembleSettings,
    LanguageModelGrowingEnsembleSettings,
    LanguageModelGrowingMixtureSettings,
    LearnerSettings,
)
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.predictors import Checkpoint, checked_file, read_learner_state
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.core.stream_folder import TrainingView
from fairseq_alma.evaluation.expert_utility import measure_utilities
from fairseq_alma.growth.checkpoint import grow_checkpoint, growth_seed, write_with_new_weights
from fairseq_alma.lm.average import remove_old_continuations
from fairseq_alma.lm.fairseq_config import Member
from fairseq_alma.lm.member import MemberTraining
from fairseq_alma.lm.precision import with_known_precision
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.stage_processes import LocalProcesses

__all__ = ["LanguageModelLearner", "LearnerSettings", "SingleModel", "register_learner"]


class LanguageModelLearner:
    """Base class of the language-model learners. It implements SM (a single model). Subclasses override some methods.

    A learner has two collections of checkpoints. `_predictor` contains the checkpoints that predict now.
    `_continuations` contains, by member number, the checkpoints from which the training of the next stage starts. Two
    collections are needed, because `grow` changes only `_continuations`. The old checkpoints predict until the end of
    the stage.

    Args:
        settings: settings of the run.
        stream: training and validation data, without the test set.
        processes: starts the processes that train the members.
    """

    def __init__(self, settings: LanguageModelSettings, stream: TrainingView, processes: LocalProcesses):
        self.settings = settings
        self.run_folder = Path(settings.out)
        self._stream = stream
        self.learner_settings: Any = settings.learner_settings
        """The settings that only this learner has (see `fairseq_alma.core.catalogue`)."""
        has_options = type(self).training_options is not LanguageModelLearner.training_options
        self._training = MemberTraining(
            settings, stream, processes, own_options=self.training_options if has_options else None
        )
        self._predictor: list[Path] = []
        self._continuations: dict[int, Path] = {}
        self._recorded: dict[Path, Checkpoint] = {}
        """What learner.json of an earlier process says about checkpoints."""
        self.num_stored: int | None = 0 if settings.replay else None
        """With replay: number of tokens of earlier mega-batches that are kept for replay."""
        # Let fairseq check the training options now, so that an error is reported before anything is written.
        self._training.check(self._member(1, stage_index=1), self.num_members)

    @property
    def num_members(self) -> int:
        """Number of members at the beginning of the stream."""
        return 1

    @property
    def predictor(self) -> list[Path]:
        """Checkpoints of the models that predict now, with the mean of their probabilities. At first they are
        untrained.

        Raises StageError if a checkpoint is missing, and RunError if it has changed since an earlier process recorded
        it.
        """
        self._check_files(self._predictor, "the predictor")
        return self._predictor or list(self._untrained().values())

    @property
    def frozen(self) -> list[Path]:
        """The checkpoints in `predictor` that no later stage trains further, whose outputs may be stored."""
        return []

    @property
    def is_trained(self) -> bool:
        """Whether a stage has trained the models in `predictor`."""
        return bool(self._predictor)

    def grow(self, stage: Stage) -> list[Spent]:
        """Add capacity to the model before a stage other than the first. Return the cost. The base class adds nothing.

        Raise StageError if a checkpoint from which the stage continues is missing.
        """
        self._check_files(self._continuations.values(), f"stage {stage.index}")
        return [Spent()]

    def training_options(self, stage: Stage, updates: int) -> dict[str, Any]:
        """Return options of fairseq-train for a stage with `updates` updates, which replace those of alma-lm.

        Names have underscores: `{"lr": [0.001]}`, for example, or `replay_mega_batches` and `replay_share`
        for a replay policy, or sizes of the model after a growth. The base class returns none.
        """
        return {}

    def change_weights(self, stage: Stage, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        """Let the training of a stage start from other weights. Call this in `grow`.

        The state of the optimizer and an average of the weights begin again.

        Args:
            stage: the stage.
            change: a function from the weights of a member to its new weights, by name. If their shapes differ,
                `training_options` must return the new sizes of the model, for this stage and all later ones.
        """
        for number, source in self._continuations.items():
            checkpoint = require_checkpoint(source)
            checkpoint["model"] = change(checkpoint["model"])
            self._continuations[number] = stage.folder / "grow" / f"member_{number}" / GROWN
            write_with_new_weights(checkpoint, self._continuations[number])

    def train(self, stage: Stage) -> list[Spent]:
        """Train the members for one stage and return the total cost. For the errors, see `MemberTraining.train`."""
        continuations = self._starts(stage)
        starts = {self._member(number, stage.index): path for number, path in continuations.items()}
        self._check_files(continuations.values(), f"stage {stage.index}")
        remove_old_continuations(RunFolder(self.run_folder), stage.index - 1, self.settings.keep_states)
        trained = self._training.train(stage, starts)
        self.set_trained([path for path, _, _ in trained.values()], {n: path for n, (_, path, _) in trained.items()})
        if stage.replay:
            self.num_stored = sum(one.counts["tokens"] for one in (*stage.past, *stage.new))
        return [sum((spent for _, _, spent in trained.values()), Spent())]

    def save(self, folder: Path) -> None:
        """Write the state of the learner to `folder`, and the checkpoints of the predictor to RUN/predictor.json.

        With the setting `gate`, RUN/predictor.json is written later, if the predictor passes.

        After the training of a stage, also write RUN/predictors/STAGE.json, which later stages do not change.
        """
        predictor = [self._entry(path) for path in self.predictor]
        continuations = [{"member": number, **self._entry(path)} for number, path in self._continuations.items()]
        state = {"predictor": predictor, "continuations": continuations, "num_stored": self.num_stored}
        write_json(folder / "learner.json", sealed(state))
        deployed = {"combine": "mean of probabilities", "checkpoints": predictor}
        paths = RunFolder(self.run_folder)
        if self.settings.gate is None:  # otherwise, the gate decides (see lm/gate.py)
            write_json(paths.predictor(), deployed)
        if folder.name == "train":
            write_json(paths.predictor(index_of_stage(folder.parent)), deployed)

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote to `folder`.

        Raise StageError if a checkpoint is missing, and RunError if learner.json is damaged.
        """
        state = read_learner_state(folder)
        # Whether the files have changed is checked when they are used: those of earlier stages are large, or removed.
        self._recorded = {self.run_folder / one["path"]: one for one in [*state["predictor"], *state["continuations"]]}
        self._predictor = [self.run_folder / entry["path"] for entry in state["predictor"]]
        self._continuations = {entry["member"]: self.run_folder / entry["path"] for entry in state["continuations"]}
        self.num_stored = state.get("num_stored")
        self._check_existence(self._predictor, str(folder))

    def _check_files(self, checkpoints: Collection[Path], needed_by: str) -> None:
        """Raise StageError if a checkpoint file is missing, and RunError if it has changed since it was recorded."""
        self._check_existence(checkpoints, needed_by)
        for path in checkpoints:
            if path in self._recorded:
                checked_file(self.run_folder, self._recorded[path])

    @staticmethod
    def _check_existence(checkpoints: Collection[Path], needed_by: str) -> None:
        for path in checkpoints:
            if not path.is_file():
                raise StageError(
                    f"{path} is missing, but {needed_by} needs it: restore it, or start a new run with another out="
                )

    def num_experts(self, stage_index: int) -> int:
        """Return the number of experts in each mixture of the members that are trained in stage `stage_index`."""
        return self.settings.experts

    def added_layers(self, stage_index: int) -> int:
        """Return how many layers the members that are trained in stage `stage_index` have more than at first."""
        return 0

    def set_trained(self, predictor: list[Path], continuations: dict[int, Path]) -> None:
        """Store the checkpoints that predict now, and, by member number, those from which the next stage continues.

        Args:
            predictor: the checkpoints of the members that the last stage has trained.
            continuations: by member number, the checkpoint from which the next stage continues.
        """
        self._predictor, self._continuations = predictor, continuations

    def _starts(self, stage: Stage) -> dict[int, Path]:
        """Return the checkpoint from which each member starts in a stage, by member number."""
        if self.settings.from_scratch and stage.index > 1:
            return self._untrained(stage.index, stage.folder / "scratch")
        return self._continuations or self._untrained()

    def _untrained(self, stage_index: int = 1, folder: Path | None = None) -> dict[int, Path]:
        """Return the untrained checkpoint of each member of a stage, by member number. Missing ones are written.

        By default, they are in the folder of stage 0.
        """
        folder = folder or RunFolder(self.run_folder).stage(0)
        numbers = range(1, self.num_members + 1)
        return {number: self._training.untrained(self._member(number, stage_index), folder) for number in numbers}

    def _member(self, number: int, stage_index: int) -> Member:
        # With from_scratch=true, the members of different stages have different seeds, like those of gEns.
        drawn = number + (stage_index - 1) * self.num_members if self.settings.from_scratch else number
        size = self.num_experts(stage_index), self.added_layers(stage_index)
        member = Member.of_run(drawn, self.settings.seed, *size)
        return replace(member, number=number)

    def _entry(self, path: Path) -> dict[str, str]:
        """Return the JSON entry of a checkpoint: its "path", relative to the run folder, and its digest "sha256"."""
        return {"path": str(path.relative_to(self.run_folder)), "sha256": sha256_once(path)}


class SingleModel(LanguageModelLearner):
    """SM: a single model that every stage trains further on the new mega-batches (fine-tuning)."""


class Ensemble(LanguageModelLearner):
    """Ens: several members with different seeds. Every stage trains all members further on the same data."""

    learner_settings: LanguageModelEnsembleSettings

    @property
    def num_members(self) -> int:
        assert self.learner_settings.members is not None  # the user must set it
        return self.learner_settings.members


class GrowingEnsemble(LanguageModelLearner):
    """gEns: each stage adds randomly initialised members and trains only these. All others are frozen."""

    learner_settings: LanguageModelGrowingEnsembleSettings

    @property
    def num_members(self) -> int:
        return self.learner_settings.members

    @property
    def frozen(self) -> list[Path]:
        return list(self._predictor)

    def grow(self, stage: Stage) -> list[Spent]:
        """Write the checkpoints of new, randomly initialised members. Return zero cost.

        The predictor uses the new members only after the stage has trained them.
        """
        first, folder = len(self._predictor) + 1, stage.folder / "grow"
        self._continuations = {
            number: self._training.untrained(self._member(number, stage.index), folder)
            for number in range(first, first + self.num_members)
        }
        return [Spent()]

    def set_trained(self, predictor: list[Path], continuations: dict[int, Path]) -> None:
        self._predictor = [*self._predictor, *predictor]
        self._continuations = {}


class GrowingMixture(LanguageModelLearner):
    """gMoE: a single model with mixtures. Before each stage except the first, experts are copied, or layers, or both.

    Raises SettingError if a growth would add more layers than it can copy.
    """

    learner_settings: LanguageModelGrowingMixtureSettings

    def __init__(self, settings: LanguageModelSettings, stream: TrainingView, processes: LocalProcesses):
        super().__init__(settings, stream, processes)
        self.learner_settings.check_num_layers(self._training.num_layers(self._member(1, stage_index=1)))

    def num_experts(self, stage_index: int) -> int:
        return self.settings.experts + sum(self.learner_settings.added_at(k) for k in range(2, stage_index + 1))

    def added_layers(self, stage_index: int) -> int:
        return sum(self.learner_settings.layers_added_at(k) for k in range(2, stage_index + 1))

    def grow(self, stage: Stage) -> list[Spent]:
        """Write a larger checkpoint, from which the training of this stage starts. Return the cost.

        By default, growth copies the experts with the largest validation loss. The validations of the previous stage
        have already measured the loss of each expert and stored it in the checkpoint, so growth needs no forward pass
        and its cost is zero. With copy_experts_by=gradient, growth needs a forward and a backward pass over the
        validation set, and returns their cost. Until the end of this stage, the checkpoint of the previous stage
        predicts.
        """
        s, own = self.settings, self.learner_settings
        target = stage.folder / "grow" / "member_1" / GROWN
        if s.from_scratch or not own.grows_before(stage.index):
            # A new, larger model is initialised, or the optimizer and the average continue.
            return super().grow(stage)
        began = time.perf_counter()
        num_new, is_dense = own.added_at(stage.index), self.num_experts(stage.index - 1) == 1
        seed = growth_seed(s.seed, stage.index)
        (source,) = self._continuations.values()
        spent, utilities = Spent(), None
        if own.copy_experts_by == "gradient" and num_new and not is_dense:
            measured = measure_utilities(source, self._stream.path)
            utilities = measured.utilities
            spent = Spent(train_flops=measured.flops, train_seconds=round(time.perf_counter() - began, 3))
        drop = own.grow_drop if is_dense else 0.0
        grow_checkpoint(
            source, target, num_new, own.grow_router, seed=seed, copy_experts_by=own.copy_experts_by,
            utilities=utilities, drop=drop, num_layers=own.layers_added_at(stage.index),
        )  # fmt: skip
        self._continuations = {1: target}
        return [spent]


LEARNERS: dict[str, type[LanguageModelLearner]] = {
    "sm": SingleModel,
    "ens": Ensemble,
    "gens": GrowingEnsemble,
    "gmoe": GrowingMixture,
}
"""The class of every language-model learner. The keys are the values of the setting `learner`."""


def register_learner(name: str, **options: Any) -> Callable[[type[LanguageModelLearner]], type[LanguageModelLearner]]:
    """Return a class decorator that makes a learner available as `learner=NAME`.

    For the options and the errors, see `fairseq_alma.core.catalogue.register_learner`.
    """
    return catalogue.register_learner("language model", LEARNERS, name, **options)


def make_learner(
    settings: LanguageModelSettings, stream: TrainingView, processes: LocalProcesses
) -> LanguageModelLearner:
    """Return a new learner. Its class is the one that the setting `learner` selects in LEARNERS."""
    return LEARNERS[settings.learner](with_known_precision(settings), stream, processes)
