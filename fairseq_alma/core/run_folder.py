"""The paths in a run folder. Other modules get them from here.

A run trains one learner on one stream, with one choice of settings and one seed. Its folder, RUN, contains:

RUN/settings.json       values of all settings
RUN/provenance.json     command, commit, versions, machine
RUN/ledger.jsonl        one row per arrival
RUN/summary.json        metrics of the run
RUN/arrivals.json       digest of each mega-batch
RUN/decisions.jsonl     for each arrival, whether a stage was trained, the reason (wait=auto), the prequential score
RUN/errors.jsonl        images, if the stream drifts: error rate on each mega-batch and each class, for each stage
RUN/task_scores.jsonl   text: results on tasks of lm-evaluation-harness, if `alma-eval --tasks` has measured them
RUN/predictor.json      checkpoints of the current predictor; RUN/predictors/stage_001.json ...: those after each stage
RUN/rollback.json       text: what a rollback that is not finished does (see `fairseq_alma.lm.rollback`)
RUN/set_aside/1/        text: what the first rollback took away, with the paths of a run folder
RUN/stages/stage_001/   logs and checkpoints of stage 1, and a done mark for each finished step of the stage
RUN/seed_0/ ...         if the command has several seeds: the run folder of each seed. alma-vision trains the seeds
                        together, so the stages are in RUN/stages
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fairseq_alma.core.errors import RunError

DEPLOYED = "deployed.json"
"""Name of the file that describes a deployed model in its folder (see `fairseq_alma.deploy`)."""
EXPORTED = "alma_export.json"
"""Name of the file that says what was exported, with digests of the files (see `fairseq_alma.huggingface.export`)."""


class RunFolder:
    """The folder of a run, and the paths in it. They need not exist."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "settings.json"
        self.provenance = path / "provenance.json"
        self.ledger = path / "ledger.jsonl"
        self.summary = path / "summary.json"
        self.arrivals = path / "arrivals.json"
        self.decisions = path / "decisions.jsonl"
        self.task_scores = path / "task_scores.jsonl"
        self.rollback = path / "rollback.json"
        self.stages = path / "stages"

    def stage(self, k: int) -> Path:
        """Return the folder of stage k, which may not exist. Stage 0 belongs to the untrained learner."""
        return self.stages / f"stage_{k:03d}"

    def member(self, k: int, number: int) -> Path:
        """Return the folder in which stage k trains a member of a language-model learner."""
        return self.stage(k) / f"member_{number}"

    def set_aside(self, number: int) -> Path:
        """Return the folder of what a rollback has taken away. The first one has the number 1."""
        return self.path / "set_aside" / str(number)

    def stage_folders(self) -> list[Path]:
        """Return the folders of all stages that exist, in order."""
        return sorted(self.stages.glob("stage_*"))

    def mark(self, k: int, step: str) -> Path:
        """Return the path of the done mark of a step ("grow" or "train"). The learner is saved beside it."""
        return self.stage(k) / f"{step}.done.json"

    def routing(self, k: int) -> Path:
        """Return the path of the file that says which experts test images use after stage k."""
        return self.stage(k) / "routing.npz"

    def marks(self) -> Iterator[Path]:
        """Return the paths of all done marks."""
        return self.stages.glob("stage_*/*.done.json")

    def predictor(self, stage: int | None = None) -> Path:
        """Return the path of the file that lists the checkpoints of the predictor after a stage. None: the current."""
        return self.path / ("predictor.json" if stage is None else f"predictors/stage_{stage:03d}.json")

    def stages_with_predictor(self) -> list[int]:
        """Return the stages whose predictors can still be used."""
        return sorted(index_of_stage(path) for path in (self.path / "predictors").glob("stage_*.json"))

    def of_seed(self, seed: int) -> "RunFolder":
        """Return the folder of one of several seeds."""
        return RunFolder(self.path / f"seed_{seed}")

    def of_each_seed(self, first: int, num_seeds: int) -> list[Path]:
        """Return the run folder of each seed, from seed `first` on. With one seed, it is this folder."""
        return [self.path] if num_seeds == 1 else [self.of_seed(first + i).path for i in range(num_seeds)]

    def of_seeds(self) -> "list[RunFolder]":
        """Return the folders of all seeds that have started, if the command had several seeds."""
        return [RunFolder(path.parent) for path in sorted(self.path.glob("seed_*/settings.json"))]

    @property
    def is_of_one_of_several_seeds(self) -> bool:
        """Whether the folder has the name of the folder of one of several seeds."""
        return re.fullmatch(r"seed_\d+", self.path.name) is not None

    def refuse_nested(self) -> None:
        """Raise RunError if the folder is inside that of another run, or if a new run would be around other runs.

        No command would find the runs inside. A new run in a folder of a stream, of deployed predictors or of an
        exported model is refused, too: commands would take it for one or the other.
        """
        if not self.settings.exists():
            self.refuse_other_content("out=")
        if not self.settings.exists() and (found := [run for run in find_runs(self.path) if run != self.path]):
            raise RunError(f"{self.path} contains another run, {found[0]}: choose another out=")
        for parent in self.path.absolute().parents:
            if RunFolder(parent).ledger.exists() and RunFolder(parent).settings.exists():
                raise RunError(f"{self.path} is inside the run folder {parent}: choose an out= outside of it")

    def refuse_other_content(self, what: str) -> None:
        """Raise RunError if the folder, which `what` names in the message, has been written by another command."""
        contents = {"stream.json": "a stream", EXPORTED: "an exported model", DEPLOYED: "a deployed predictor"}
        found = next((text for name, text in contents.items() if (self.path / name).exists()), None)
        if found is None and next(self.path.glob(f"*/{DEPLOYED}"), None):
            found = "deployed predictors"
        if found:
            raise RunError(f"{self.path} contains {found}: give another folder, {what}FOLDER")

    def refuse_runs_in(self, folders: "Iterable[RunFolder]") -> None:
        """Raise RunError if one of these folders, which belong to other seeds than those of this run, has a run."""
        if found := [str(folder.path) for folder in folders if folder.settings.exists()]:
            raise RunError(
                f"{self.path} contains a run of other seeds ({', '.join(found)}).\n"
                f"To continue that run, set seed= and seeds= to the values with which it was started. For a new run, "
                f"set out= to a different folder."
            )


def index_of_stage(path: Path) -> int:
    """Return the index of a stage from the path of its folder, or of a file that is named after the stage."""
    return int(path.stem.removeprefix("stage_"))


def find_runs(folder: Path) -> list[Path]:
    """Return all run folders in `folder`, at any depth, sorted. If `folder` is a run folder, return only `folder`.

    Folders of deployed models are left out, although they have the settings of their run. A folder with a ledger, but
    without settings.json, is a damaged run folder, and is returned too. A sweep names its
    run folders after the settings, where a slash, such as the one in preset=table2/gmoe_w1, makes a nested folder.
    """
    found = []
    for path, folders, files in os.walk(folder):
        if DEPLOYED in files:
            folders.clear()
        elif not {"settings.json", "ledger.jsonl", "ledger.jsonl.gz"}.isdisjoint(files):
            found.append(Path(path))
            # Do not search the subfolders of a run folder. They contain no other run, but many checkpoints, so the
            # search would take long on a slow file system.
            folders.clear()
        elif "stages" in folders:
            # `path` contains runs with different seeds, which share the folder `stages`. Do not search this folder,
            # because it contains no run.
            folders.remove("stages")
    return sorted(found)
