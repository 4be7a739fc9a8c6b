"""Write, read and delete the files of a vision learner: its networks, its state, and predictor.json.

`fairseq_alma.core.run_record` decides when a learner is saved to a folder such as stages/stage_001/train.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from fairseq_alma.core.errors import RunError
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
    """The file that contains the networks of a stack in their current state."""

    def __init__(self, backbone: str) -> None:
        self._backbone = backbone
        self.current: Path | None = None
        """The file. None if no file contains the networks in their current state."""

    def read(self, device: torch.device) -> Stack:
        """Return the networks that the file contains. Raise StageError if it is missing or damaged."""
        assert self.current is not None, "the networks cannot be read, because no file contains their current state"
        return read_checkpoint(self.current, device, self._backbone)

    def write(self, stack: Stack, path: Path) -> Path:
        """Write the networks to `path`, and return it. If a file already contains them, only return that file."""
        if self.current is None:
            write_checkpoint(stack, path)
            self.current = path
        return self.current


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


def write_predictor(
    run_folders: Sequence[Path],
    stage: int | None,
    paths: Sequence[Path],
    networks_per_seed: int,
    description: Mapping[str, str],
) -> None:
    """Write the predictor.json of each seed, the list of the checkpoints with which a run predicts.

    Args:
        run_folders: run folder of each seed.
        stage: the stage after which these checkpoints predict; None for the current predictor.
        paths: files that contain networks of all seeds, ordered by stage.
        networks_per_seed: number of networks per seed in each file.
        description: the values of "combine" and "dataset".
    """
    for number, folder in enumerate(run_folders):
        first = number * networks_per_seed
        networks = list(range(first, first + networks_per_seed))
        checkpoints = [
            {"path": os.path.relpath(path, folder), "sha256": sha256_once(path), "networks": networks} for path in paths
        ]
        write_json(RunFolder(folder).predictor(stage), {**description, "checkpoints": checkpoints}, durable=False)
