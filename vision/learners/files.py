"""Write, read and delete the files of a vision learner: the networks after each step, and predictor.json.

A step is the growth or the training of a learner in one stage. A small file, the done mark, records that a step is
finished.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fairseq_alma.core.files import sha256_of, write_json
from vision.checkpoints import read_checkpoint, write_checkpoint
from vision.networks import Stack


class StackFiles:
    """Stores the networks of a learner after each step, and deletes files that are not needed any more.

    The files of the last two steps are always kept: if the process is killed before the done mark of a step is written,
    the next process continues from the files of the step before.

    Args:
        keep_all: if True, no file is deleted.
    """

    def __init__(self, keep_all: bool):
        self.current: Path | None = None
        """File that contains the networks in their current state, or None if no file does."""
        self._keep_all = keep_all
        self._recent: list[Path] = []

    def read(self, device: torch.device) -> Stack:
        """Return the networks in `current`.

        Raises:
            StageError: if the file is missing or damaged.
        """
        assert self.current is not None, "networks that are not in memory are always in a file"
        return read_checkpoint(self.current, device)

    def write(self, stack: Stack, path: Path) -> None:
        """Write the networks to `path`, unless a file already contains them in their current state."""
        if self.current is None:
            write_checkpoint(stack, path)
            self.use(path)

    def use(self, path: Path) -> None:
        """Record that the file `path` contains the networks in their current state."""
        self.current = path
        if path not in self._recent:
            self._recent.append(path)

    def delete_unneeded(self, needed: Sequence[Path]) -> None:
        """Delete files of earlier steps, except those in `needed` and those of the last two steps."""
        while len(self._recent) > 2:
            path = self._recent.pop(0)
            if not self._keep_all and path not in needed:
                path.unlink(missing_ok=True)


class PredictorFile:
    """Writes predictor.json, the list of checkpoints that form the current predictor of a run.

    Args:
        run_folders: run folder of each seed.
        networks_per_seed: number of networks per seed in each checkpoint. Each contains the networks of all seeds.
    """

    def __init__(self, run_folders: Sequence[Path], networks_per_seed: int):
        self._run_folders, self._networks_per_seed = run_folders, networks_per_seed
        self._digests: list[str] = []

    def write(self, paths: Sequence[Path], combine: str, dataset: str) -> None:
        """Write the predictor.json of each seed.

        Args:
            paths: checkpoints, ordered by stage. Digests are cached, so a checkpoint that was passed in an earlier call
                must not have changed, except for the last in this list.
            combine: how the outputs of the networks are combined into one prediction.
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
            write_json(
                folder / "predictor.json",
                {"combine": combine, "dataset": dataset, "checkpoints": checkpoints},
                durable=False,
            )
