"""Trains one member of a stage: python -m fairseq_alma.lm.train_member CONFIG [--checkpoint-minutes N]

alma-lm starts this program. CONFIG is a file with fairseq's configuration, which alma-lm writes to the folder of the
member. The training is that of fairseq-train, with two changes that fairseq has no option for:

- Checkpoints are written at equal intervals of time, too, and not only after a validation.
- Every checkpoint is written once. fairseq writes it under three names.
"""

import argparse
import atexit
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq_cli import train as fairseq_train  # before fairseq, because the first of both decides how lines are logged

# isort: split
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import DictConfig, OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints import BEST, LAST, link

UPDATES_PER_CHECK = 10
"""With several processes, they agree every 10 updates on whether a checkpoint is due."""


class Checkpoints:
    """Decides when the checkpoints of a training are written, and writes them.

    checkpoint_last.pt is the newest checkpoint. checkpoint_best.pt is the one with the best validation score. If they
    are equal, they are two names of one file.

    Args:
        minutes: time between two checkpoints if there is no validation in between.
    """

    def __init__(self, minutes: float):
        self._seconds = 60 * minutes
        self._saved = time.monotonic()
        self._saved_at = 0
        self._validate_and_save = fairseq_train.validate_and_save

    def validate_and_save(
        self, cfg: DictConfig, trainer: Any, task: Any, epoch_itr: Any, valid_subsets: list[str], end_of_epoch: bool
    ) -> tuple[list[float | None], bool]:
        """Replaces the function of fairseq_cli.train with the same name. fairseq calls it after every update.

        After the first update, the garbage collector is switched off, because it would stop the training for up to half
        a second at a time. Instead, it runs before a checkpoint is written.
        """
        if gc.isenabled():
            gc.collect()
            gc.freeze()
            gc.disable()
            atexit.register(gc.unfreeze)  # otherwise, the library of triton prints at the end what it calls leaks
        losses, should_stop = self._validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        num_updates = trainer.get_num_updates()
        if num_updates != self._saved_at and self._is_due(num_updates, trainer.data_parallel_world_size):
            self.save(cfg.checkpoint, trainer, epoch_itr, None)
        return losses, should_stop

    def _is_due(self, num_updates: int, world_size: int) -> bool:
        """Return whether it is time for a checkpoint. All processes of a training get the same answer."""
        due = time.monotonic() - self._saved > self._seconds
        if world_size == 1:
            return due
        if num_updates % UPDATES_PER_CHECK:
            return False
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        answer = torch.tensor([int(due)], device=device)
        torch.distributed.broadcast(answer, src=0)
        return bool(answer.item())

    def save(self, cfg: DictConfig, trainer: Any, epoch_itr: Any, val_loss: float | None) -> str | None:
        """Replaces fairseq.checkpoint_utils.save_checkpoint. Return the path of the checkpoint, None on other ranks.

        Args:
            cfg: the group `checkpoint` of the configuration.
            trainer: fairseq's trainer.
            epoch_itr: the iterator over the training data, whose position is saved.
            val_loss: the validation score, the smaller the better; None if the model was not validated now.
        """
        self._saved, self._saved_at = time.monotonic(), trainer.get_num_updates()
        gc.collect()
        folder = Path(cfg.save_dir)
        # fairseq reads and writes the best score so far as an attribute of its function save_checkpoint.
        best = getattr(checkpoint_utils.save_checkpoint, "best", None)
        is_best = val_loss is not None and (best is None or val_loss <= best or not (folder / BEST).exists())
        if is_best:
            best = checkpoint_utils.save_checkpoint.best = val_loss
        trainer.consolidate_optimizer()
        if not trainer.should_save_checkpoint_on_current_rank:
            if trainer.always_call_state_dict_during_save_checkpoint:
                trainer.state_dict()
            return None
        extra_state = {
            "train_iterator": epoch_itr.state_dict(),
            "val_loss": val_loss,
            **trainer.task.get_checkpoint_dict(),
        }
        if best is not None:
            extra_state["best"] = best
        path = trainer.save_checkpoint(str(folder / LAST), extra_state)  # written aside and renamed
        if is_best:
            link(folder / LAST, folder / BEST)
        return path


def train(config: DictConfig, checkpoint_minutes: float) -> None:
    """Train in this process, which may be one of several. Arguments as those of the program."""
    fairseq_alma.register()
    checkpoints = Checkpoints(checkpoint_minutes)

    def save_checkpoint(cfg: DictConfig, trainer: Any, epoch_itr: Any, val_loss: float | None) -> str | None:
        return checkpoints.save(cfg, trainer, epoch_itr, val_loss)

    checkpoint_utils.save_checkpoint = save_checkpoint
    fairseq_train.validate_and_save = checkpoints.validate_and_save
    fairseq_train.main(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the member that the configuration file describes. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_alma.lm.train_member", description=__doc__)
    parser.add_argument("config", type=Path, help="file with fairseq's configuration")
    parser.add_argument(
        "--checkpoint-minutes", type=float, default=10.0, help="time between two checkpoints (default: 10 minutes)"
    )
    arguments = parser.parse_args(argv)
    config = OmegaConf.load(arguments.config)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    distributed_utils.call_main(config, train, checkpoint_minutes=arguments.checkpoint_minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
