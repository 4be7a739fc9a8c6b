"""The language-model learners: which members a stage trains, from where, and which of them predict.

sm     one model, trained on from stage to stage
ens    N models, trained side by side on the same data; their probabilities are averaged
gens   one more model at each stage, trained on that stage alone; the others stay as they are
gmoe   one model whose mixtures get more experts before each stage
"""

from pathlib import Path

from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import read_json, sha256_of, write_json
from fairseq_alma.core.ledger import Spent
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.lm.member import Member, MemberTraining, Processes
from fairseq_alma.lm.settings import LanguageModelSettings


class LanguageModelLearner:
    """What all of them share. What predicts and what trains on are kept apart: growth changes the second alone.

    Args:
        settings: of the run.
        stream: where training and validation data lie.
        processes: where fairseq-train processes run.
    """

    num_members = 1
    """When the stream begins."""

    def __init__(self, settings: LanguageModelSettings, stream: StreamFolder, processes: Processes):
        self.settings = settings
        self.run_folder = Path(settings.out)
        self._training = MemberTraining(settings, stream, processes)
        self._predictor: list[Path] = []
        self._trainees: dict[int, Path] = {}
        # Options that fairseq refuses are found now, before anything is written.
        self._training.check(self._member(1, stage_index=1), self.num_members)

    @property
    def predictor(self) -> list[Path]:
        """The checkpoints that predict now, their probabilities averaged. Before the first stage: untrained."""
        return self._predictor or list(self._untrained().values())

    @property
    def frozen(self) -> list[Path]:
        """Those of them that will predict unchanged beside later members: their outputs are worth keeping."""
        return []

    def grow(self, stage: Stage) -> Spent:
        """Nothing: most learners do not grow."""
        return Spent()

    def train(self, stage: Stage) -> Spent:
        """Train members for one stage.

        Raises:
            StageError: see MemberTraining.train.
        """
        trainees = self._trainees or self._untrained()
        starts = {self._member(number, stage.index): path for number, path in trainees.items()}
        trained = self._training.train(stage, starts)
        self._take([path for path, _ in trained.values()], list(trained))
        return sum((spent for _, spent in trained.values()), Spent())

    def save(self, folder: Path) -> None:
        """Leave in `folder` what `load` needs, and name in RUN/predictor.json what the run would deploy now."""
        predictor = [self._entry(path) for path in self.predictor]
        trainees = [{"member": number, **self._entry(path)} for number, path in self._trainees.items()]
        write_json(folder / "learner.json", {"predictor": predictor, "trainees": trainees})
        deployed = {"combine": "mean of probabilities", "checkpoints": predictor}
        write_json(self.run_folder / "predictor.json", deployed)

    def load(self, folder: Path) -> None:
        """Go on from what `save` left.

        Raises:
            StageError: a checkpoint is gone.
        """
        state = read_json(folder / "learner.json")
        for entry in [*state["predictor"], *state["trainees"]]:
            path = self.run_folder / entry["path"]
            if not path.is_file():
                raise StageError(f"{path} is gone, {folder} needs it: restore it, or start anew in another out=")
        self._predictor = [self.run_folder / entry["path"] for entry in state["predictor"]]
        self._trainees = {entry["member"]: self.run_folder / entry["path"] for entry in state["trainees"]}

    def num_experts(self, stage_index: int) -> int:
        """Experts in each mixture of what stage k trains."""
        return self.settings.experts

    def _take(self, trained: list[Path], numbers: list[int]) -> None:
        """The members that a stage has trained predict from now on, and train on."""
        self._predictor = trained
        self._trainees = dict(zip(numbers, trained, strict=True))

    def _untrained(self) -> dict[int, Path]:
        folder = self.run_folder / "stages" / "stage_000"
        numbers = range(1, self.num_members + 1)
        return {number: self._training.untrained(self._member(number, 1), folder) for number in numbers}

    def _member(self, number: int, stage_index: int) -> Member:
        return Member.of_run(number, self.settings.seed, self.num_experts(stage_index))

    def _entry(self, path: Path) -> dict[str, str]:
        return {"path": str(path.relative_to(self.run_folder)), "sha256": sha256_of(path)}


class SingleModel(LanguageModelLearner):
    """SM: one model, trained on from stage to stage (fine-tuned on each group of mega-batches)."""


class Ensemble(LanguageModelLearner):
    """Ens: N members of their own seeds on the same data, each trained on from stage to stage."""

    @property
    def num_members(self) -> int:
        return self.settings.members


class GrowingEnsemble(LanguageModelLearner):
    """gEns: before each stage a new, randomly initialised member, the only one that trains; the others are frozen."""

    @property
    def frozen(self) -> list[Path]:
        return list(self._predictor)

    def grow(self, stage: Stage) -> Spent:
        """Draw the new member. It does not predict before it is trained."""
        number = len(self._predictor) + 1
        untrained = self._training.untrained(self._member(number, stage.index), stage.folder / "grow")
        self._trainees = {number: untrained}
        return Spent()

    def _take(self, trained: list[Path], numbers: list[int]) -> None:
        self._predictor = [*self._predictor, *trained]
        self._trainees = {}


class GrowingMixture(LanguageModelLearner):
    """gMoE: before each stage the experts that lose most on the validation data are copied, in every mixture."""

    def num_experts(self, stage_index: int) -> int:
        return self.settings.experts + sum(self.settings.grown_experts(k) for k in range(2, stage_index + 1))

    def grow(self, stage: Stage) -> Spent:
        """Write a grown checkpoint for the stage to train on from; what was trained before predicts until then.

        The losses were charged by the validation that chose the checkpoint: growth costs no pass over the data.
        """
        s, target = self.settings, stage.folder / "grow" / "member_1" / "checkpoint_grown.pt"
        # A seed of its own at each growth: noise drawn twice would move twins of twins the same way.
        seed = s.seed * 1000 + stage.index
        (source,) = self._trainees.values()
        grow_checkpoint(source, target, s.grown_experts(stage.index), s.grow_router, s.grow_noise, seed)
        self._trainees = {1: target}
        return Spent()


LEARNERS: dict[str, type[LanguageModelLearner]] = {
    "sm": SingleModel,
    "ens": Ensemble,
    "gens": GrowingEnsemble,
    "gmoe": GrowingMixture,
}


def make_learner(settings: LanguageModelSettings, stream: StreamFolder, processes: Processes) -> LanguageModelLearner:
    """The learner that `settings.learner` names."""
    return LEARNERS[settings.learner](settings, stream, processes)
