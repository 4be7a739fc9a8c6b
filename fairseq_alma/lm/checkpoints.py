"""fairseq checkpoints as files: made untrained, found whole, mended after a kill, slimmed.

What is saved is plain values and tensors only, so that torch loads it without running code.
"""

import contextlib
import errno
import io
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_alma.core.errors import SettingError, StageError

logger = logging.getLogger(__name__)

LAST, BEST, CRASH = "checkpoint_last.pt", "checkpoint_best.pt", "crash.pt"
DAMAGE = (
    "PytorchStreamReader",
    "mmap can only be used",
    "central directory",
    "Invalid magic number",
    "corrupt",
    "unexpected EOF",
)
"""What torch says of a file that was cut short, and not of a machine that is out of memory or file handles."""


def parse_train_arguments(train_arguments: Sequence[str]):
    """The namespace that `fairseq-train` with these arguments (without the program) would run.

    Raises:
        SettingError: fairseq does not know an option, or refuses its value.
    """
    import fairseq_alma

    fairseq_alma.register()
    from fairseq import options

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # argparse prints pages of usage before its one line
            return options.parse_args_and_arch(options.get_training_parser(), list(train_arguments))
    except SystemExit as error:
        reason = (said.getvalue().strip().splitlines() or ["they ask for help, not for training"])[-1]
        raise SettingError(f"fairseq-train refuses these options: {reason}") from error


def write_untrained(train_arguments: Sequence[str], path: Path) -> None:
    """The checkpoint that `fairseq-train` with these arguments would start from, before its first update.

    Raises:
        SettingError: see parse_train_arguments.
    """
    arguments = parse_train_arguments(train_arguments)
    # Here, in this process, whatever the machine: a fairseq-train would spawn a rank for every GPU it sees.
    arguments.distributed_world_size, arguments.cpu = 1, True
    from fairseq import tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    cfg = convert_namespace_to_omegaconf(arguments)
    np.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.consolidate_optimizer()  # fairseq calls it before each save; without it state_dict() fails
    trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1}, "val_loss": None, **task.get_checkpoint_dict()})


def read_whole(path: Path) -> dict[str, Any] | None:
    """The checkpoint in `path`, tensors still on disk; None when there is none or it is cut short.

    Raises:
        OSError, RuntimeError: it cannot be read now (no memory, no file handle, a file system that is away).
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in DAMAGE):
            raise
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek beyond the end of the file
            raise
        logger.warning("%s is damaged (%s)", path, error)
        return None


def num_updates(checkpoint: dict[str, Any]) -> int:
    return checkpoint["optimizer_history"][-1]["num_updates"]


def mend(folder: Path) -> None:
    """Make a stage's folder fit to continue after a kill at any moment, inside a checkpoint write too.

    fairseq writes one checkpoint in one step and then copies it, byte after byte, to its other names: a
    kill in between leaves a copy cut short. Whatever is whole and newest becomes checkpoint_last.pt
    again, and checkpoint_best.pt the one that it says is best. With nothing whole that holds the optimizer's
    state, without which training does not go on, the stage begins anew.
    """
    found = {path: read_whole(path) for path in folder.glob("checkpoint*.pt")}
    whole = {path: state for path, state in found.items() if state is not None}
    for path in found.keys() - whole.keys():
        os.replace(path, path.with_name(path.name + ".damaged"))
    for leftover in [*folder.glob("*.tmp"), folder / CRASH]:
        leftover.unlink(missing_ok=True)
    continuable = [path for path, state in whole.items() if "last_optimizer_state" in state]
    if not continuable:
        for path in whole:
            path.unlink()
        return
    newest = max(continuable, key=lambda path: (num_updates(whole[path]), path.name == LAST))
    best_loss = whole[newest]["extra_state"].get("best")
    best = folder / BEST
    if best_loss is not None and (best not in whole or whole[best]["extra_state"]["val_loss"] != best_loss):
        source = next((p for p, s in whole.items() if s["extra_state"]["val_loss"] == best_loss), None)
        if source is None:
            logger.warning("%s: the best checkpoint is lost, the stage begins anew", folder)
            for path in whole:
                path.unlink()
            return
        _copy_whole(source, best)
    if newest.name != LAST:
        _copy_whole(newest, folder / LAST)


def slim(path: Path) -> None:
    """Drop the optimizer's state, two thirds of the file: a finished stage is not continued.

    Raises:
        StageError: there is no whole checkpoint.
    """
    state = read_whole(path)
    if state is None:
        raise StageError(f"{path} is missing or damaged: run the same command again")
    if "last_optimizer_state" not in state:
        return
    del state["last_optimizer_state"]
    write_checkpoint(state, path)


def write_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Replace `path` in one step by `state` (plain values and tensors). On return the bytes have reached the disk.

    Raises:
        OSError: there is no room, or no access.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from error  # torch speaks of a position in the file
        raise


def _copy_whole(source: Path, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    shutil.copyfile(source, temporary)
    os.replace(temporary, target)
