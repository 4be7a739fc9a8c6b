"""Write, read and delete the files of a vision learner: its networks, its state, and predictor.json.

A step is the growth or the training of the learner in one stage. After some steps, the learner is saved (see
`fairseq_alma.core.run_record`) to a folder such as stages/stage_001/train.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from fairseq_alma.core.errors import RunError, StageError
from fairseq_alma.core.files import remove, sha256_once, write_json
from fairseq_alma.core.json_types import Amount, Fraction, Loss
from fairseq_alma.core.predictors import Checkpoint, read_predictor
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.core.settings import NonNegative
from vision.checkpoints import read_checkpoint, write_checkpoint
from vision.networks import Stack

NETWORKS, AVERAGED, STATE = "networks.pt", "predictor.pt", "learner.json"
"""Names of the files in a folder in which a learner was saved."""


class State(TypedDict):
    """The content of learner.json."""

    networks: str
    """File with the networks, relative to the folder given by `out=`."""
    files: list[Checkpoint]
    """All files that the learner and its predictor need."""
    stage: NonNegative
    stage_length: NonNegative
    validation: list[tuple[Loss, Fraction] | None]
    validated_on: tuple[NonNegative, NonNegative]
    num_stored: NonNegative | None
    averaged_networks: NotRequired[str]
    num_averaged: NotRequired[NonNegative]
    num_frozen: NotRequired[NonNegative]
    expert_load: NotRequired[list[list[list[Amount]]] | None]


class StackFile:
    """The file that contains the networks of a stack in their current state.

    Args:
        backbone: name of the network in the settings of the run.
    """

    def __init__(self, backbone: str) -> None:
        self._backbone = backbone
        self.current: Path | None = None
        """The file. None if no file contains the networks in their current state."""

    def read(self, device: torch.device) -> Stack:
        """Return the networks that the file contains.

        Raises:
            StageError: if the file is missing or damaged.
        """
        assert self.current is not None, "the networks cannot be read, because no file contains their current state"
        return read_checkpoint(self.current, device, self._backbone)

    def write(self, stack: Stack, path: Path) -> None:
        """Write the networks to `path`. If a file already contains the current networks, do nothing."""
        if self.current is None:
            write_checkpoint(stack, path)
            self.current = path


def file_of_run(out: Path, name: str) -> Path:
    """Return the path of a file that learner.json names.

    Raises:
        RunError: if it is not in the run folder. It is not ours then, and a later save would delete it.
    """
    path = Path(os.path.normpath(out / name))
    if not path.is_relative_to(os.path.normpath(out)):
        raise RunError(f"the run in {out} names the file {path}, which is not in its folder: start a new run (out=)")
    return path


class SavedFiles:
    """The files of the saves of a learner. It deletes those that are not needed any more.

    After the training of a stage, the files of the last two such saves are needed, because a reader may have read
    predictor.json just before this save.

    Args:
        run: the folder with the stages. It is searched only once, for files of earlier processes.
        names: names of the files that may be deleted.
        kept: normalised paths of files that are never deleted.
    """

    def __init__(self, run: RunFolder, names: Collection[str], kept: Collection[Path] = ()):
        self._names = names
        found = {path for stage in run.stage_folders() for path in stage.glob("*/*") if path.name in names}
        self._found = {path for path in found if Path(os.path.normpath(path)) not in kept}
        self._before: set[Path] = set()
        self._needed: set[Path] = set()
        """The files of the saves since the last but one save after a training, and since the last one."""

    def wrote(self, *paths: Path) -> None:
        """Take note of files that may be deleted later. They need not exist."""
        self._found.update(path for path in paths if path.name in self._names)

    def saved(self, paths: Collection[Path]) -> None:
        """Take note of the files that the last save needs."""
        self._needed.update(paths)
        self.wrote(*paths)

    def delete_old(self, stage: int) -> None:
        """After a save that follows the training of a stage: delete the files that are not needed.

        Folders that become empty are deleted, too. Files of later stages are kept: they belong to another process, if
        that process has taken over the lease.
        """
        for path in self._found - self._needed - self._before:
            if index_of_stage(path.parents[1]) <= stage:
                self._found.remove(path)
                remove(path)
                with suppress(OSError):  # a folder is not empty
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
        self._before, self._needed = self._needed, set()


def files_of_predictors(run_folder: Path) -> set[Path]:
    """Return the files with the networks of the predictors after single stages, which keep_stages=true has recorded."""
    return {
        Path(os.path.normpath(run_folder / entry["path"]))
        for stage in RunFolder(run_folder).stages_with_predictor()
        for entry in read_predictor(run_folder, stage)["checkpoints"]
    }


def check_files_of_members(learner: str, files: Sequence[Path], num_members: int) -> None:
    """Raise StageError if a learner names another number of files than it has stacks that predict together."""
    if len(files) != num_members:
        raise StageError(
            f"learner={learner} predicts with {num_members} stacks of networks (members), but predictor_files names "
            f"{len(files)} files: override predictor_files too, so that what is deployed is what was evaluated"
        )


class PredictorFile:
    """Writes predictor.json, the list of the checkpoints with which a run predicts now.

    A checkpoint is a file that contains networks of all seeds.

    Args:
        run_folders: run folder of each seed.
        networks_per_seed: number of networks per seed in each checkpoint.
    """

    def __init__(self, run_folders: Sequence[Path], networks_per_seed: int):
        self._run_folders, self._networks_per_seed = run_folders, networks_per_seed
        self._digests: list[str] = []

    def write(self, stage: int | None, paths: Sequence[Path], combine: str, dataset: str) -> None:
        """Write the predictor.json of each seed.

        Args:
            stage: the stage after which these checkpoints predict; None for the current predictor.
            paths: checkpoints, ordered by stage. The last one may have changed since the previous call. The others
                must not have changed, because their digests are cached.
            combine: how the networks form one prediction (see `vision.predictor.Predictor`).
            dataset: name of the dataset.
        """
        for path in paths[len(self._digests) :]:
            self._digests.append(sha256_once(path))
        self._digests[-1] = sha256_once(paths[-1])
        for number, folder in enumerate(self._run_folders):
            first = number * self._networks_per_seed
            networks = list(range(first, first + self._networks_per_seed))
            checkpoints = [
                {"path": os.path.relpath(path, folder), "sha256": digest, "networks": networks}
                for path, digest in zip(paths, self._digests, strict=True)
            ]
            description = {"combine": combine, "dataset": dataset, "checkpoints": checkpoints}
            write_json(RunFolder(folder).predictor(stage), description, durable=False)
