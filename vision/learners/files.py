"""Write, read and delete the files of a vision learner: its networks, and predictor.json.

Here, a step is the growth or the training of the learner in one stage. The networks are saved after each step. Then a
small file, the done mark, is written. It records that the step is finished.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fairseq_alma.core.files import sha256_of, write_json
from fairseq_alma.core.predictors import predictor_file
from vision.checkpoints import read_checkpoint, write_checkpoint
from vision.networks import Stack


class StackFiles:
    """Writes the networks of a learner to a file after each step, and deletes files that are not needed any more.

    A step is the growth or the training of the learner in one stage. The files of the last two steps are always kept,
    because the process may be killed before the done mark of the last step is written. Then the next process continues
    from the file of the step before the last one.

    Args:
        keep_all: if True, no file is deleted.
    """

    def __init__(self, keep_all: bool):
        self.current: Path | None = None
        """File that contains the networks in their current state. None if there is no such file."""
        self._keep_all = keep_all
        self._recent: list[Path] = []
        """Network files of the most recent steps, oldest first. A step is the growth or the training in one stage."""

    def read(self, device: torch.device) -> Stack:
        """Return the networks that the file `self.current` contains.

        Raises:
            StageError: if the file is missing or damaged.
        """
        assert self.current is not None, "the networks cannot be read, because no file contains their current state"
        return read_checkpoint(self.current, device)

    def write(self, stack: Stack, path: Path) -> None:
        """Write the networks to `path`. If a file already contains the current networks, do nothing."""
        if self.current is None:
            write_checkpoint(stack, path)
            self.use(path)

    def use(self, path: Path) -> None:
        """Record that the file `path` contains the networks in their current state."""
        self.current = path
        if path not in self._recent:
            self._recent.append(path)

    def delete_unneeded(self, needed: Sequence[Path]) -> None:
        """Delete network files of old steps, except the files in `needed`. The files of the last two steps are kept.

        A step is the growth or the training of the learner in one stage. If `keep_all` is True, no file is deleted.
        """
        old, newest = self._recent[:-2], self._recent[-2:]
        for path in set(old).difference(needed):
            if not self._keep_all:
                path.unlink(missing_ok=True)
        self._recent = [*(path for path in old if path in needed), *newest]


class PredictorFile:
    """Writes predictor.json, the list of the checkpoints with which a run predicts now.

    A checkpoint is a file that contains networks of all seeds.

    Args:
        run_folders: run folder of each seed.
        networks_per_seed: number of networks per seed in each checkpoint.
        keep_all: whether to write predictors/STAGE.json too, because the checkpoints of all stages are kept.
    """

    def __init__(self, run_folders: Sequence[Path], networks_per_seed: int, keep_all: bool = False):
        self._keep_all = keep_all
        self._run_folders, self._networks_per_seed = run_folders, networks_per_seed
        self._digests: list[str] = []

    def write(self, paths: Sequence[Path], combine: str, dataset: str, stage: str) -> None:
        """Write the predictor.json of each seed.

        Args:
            stage: name of the folder of the stage that was trained.
            paths: checkpoints, ordered by stage. The last one may have changed since the previous call. The others
                must not have changed, because their digests are cached.
            combine: how the networks form one prediction (see `vision.predictor.Predictor`).
            dataset: name of the dataset.
        """
        for path in paths[len(self._digests) :]:
            self._digests.append(sha256_of(path))
        self._digests[-1] = sha256_of(paths[-1])
        for number, folder in enumerate(self._run_folders):
            first = number * self._networks_per_seed
            networks = list(range(first, first + self._networks_per_seed))
            checkpoints = [
                {"path": os.path.relpath(path, folder), "sha256": digest, "networks": networks}
                for path, digest in zip(paths, self._digests, strict=True)
            ]
            description = {"combine": combine, "dataset": dataset, "checkpoints": checkpoints}
            for name in (None, stage) if self._keep_all else (None,):
                write_json(folder / predictor_file(name), description, durable=False)
