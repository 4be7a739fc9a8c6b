"""The files of a run folder that list the checkpoints of a predictor, with digests: now, and after each stage."""

from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, overload

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, sha256_once
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.settings import Count, NonNegative
from fairseq_alma.core.stream_description import STREAM_FILE

T = TypeVar("T")


class Checkpoint(TypedDict):
    """A checkpoint file of a run, as the files of the run folder name it."""

    path: str
    """Path of the file, relative to the run folder."""
    sha256: NotRequired[str]
    """Digest of the file."""


class Predictor(TypedDict):
    """The content of predictor.json, and of predictors/STAGE.json."""

    checkpoints: list[Checkpoint]


class Continuation(Checkpoint):
    """A checkpoint from which the next stage trains a member."""

    member: Count


class LearnerState(TypedDict):
    """The content of learner.json of a language model, which says what a finished step has left for the next one."""

    predictor: list[Checkpoint]
    continuations: list[Continuation]
    num_stored: NotRequired[NonNegative | None]


def read_learner_state(folder: Path) -> LearnerState:
    """Return the content of learner.json in the folder of a step. Raise RunError if the file is damaged."""
    return read_json(folder / "learner.json", LearnerState, advice="restore the file from a backup")


class VisionCheckpoint(Checkpoint):
    """A checkpoint file of alma-vision."""

    networks: list[NonNegative]
    """Which of the networks in the file belong to the run."""


class VisionPredictor(TypedDict):
    """The same as `Predictor`, of alma-vision."""

    checkpoints: list[VisionCheckpoint]
    combine: Literal["probability", "logit", "vote", "logit_sum"]
    """How the predictions of the networks are combined."""


@overload
def read_predictor(folder: Path, stage: int | None = None) -> Predictor: ...
@overload
def read_predictor(folder: Path, stage: int | None, kind: type[T]) -> T: ...
def read_predictor(folder: Path, stage: int | None = None, kind: Any = Predictor) -> Any:
    """Return which checkpoints predict in a run, now or after a stage, as an object of the declared type `kind`.

    Raise RunError if the folder is not a run or has no such predictor, or if the file that names it is damaged.
    """
    run = RunFolder(folder)
    path = run.predictor(stage)
    if not path.is_file():
        if not run.predictor().is_file():
            raise RunError(_why_not_a_run(folder))
        stages = ", ".join(map(str, run.stages_with_predictor()))
        stored = f"predictors of these stages are stored: {stages}" if stages else "no earlier predictor is stored"
        hint = ". alma-vision keeps the networks of all stages with keep_stages=true" if kind is VisionPredictor else ""
        raise RunError(f"{folder} has no predictor of stage {stage}: {stored}{hint}")
    found = read_json(path, kind, advice="restore the file from a backup")
    if not found["checkpoints"]:
        raise RunError(f"{path} names no checkpoint: restore the file from a backup")
    return found


def checked_file(folder: Path, checkpoint: Checkpoint) -> Path:
    """Return the path of a checkpoint file of a run, which may not exist. Raise RunError if the file has changed."""
    path = folder / checkpoint["path"]
    if "sha256" in checkpoint and path.is_file() and sha256_once(path) != checkpoint["sha256"]:
        raise RunError(
            f"{path} cannot be read: it has changed since the run recorded its sha256. If the run is just finishing a "
            f"stage, wait for it; otherwise restore the file from a backup, or start a new run in another folder (out=)"
        )
    return path


def _why_not_a_run(folder: Path) -> str:
    """Return what a folder without predictor.json is, and what to give instead."""
    if (folder / "current").is_symlink():
        return f"{folder} contains the models that alma-deploy has copied: give {folder / 'current'}"
    if runs := [str(path.parent) for path in sorted(folder.glob("*/predictor.json"))]:
        return f"{folder} contains several runs. Give one of them: {', '.join(runs)}"
    if (folder / STREAM_FILE).is_file():
        return f"{folder} is a stream, not a run: train on it first, with alma-lm stream={folder} out=RUN"
    if (folder / "alma_export.json").is_file():
        return f"{folder} is an exported model: load it with transformers, or give the run from which it was exported"
    if RunFolder(folder).settings.is_file():
        return f"{folder} is a run without a finished stage: run its command again, which continues it"
    return f"{folder} has no predictor.json, so it is not a run: give the folder of a run (its out=)"
