"""fairseq checkpoints as files: read, written, and repaired after a kill. Needs torch, not fairseq.

A checkpoint holds only plain values and tensors, so that torch loads it without running code.
"""

import errno
import logging
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import unfinished_files, written_aside

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
"""Parts of torch's error messages for a truncated file. A lack of memory or of file handles gives other messages."""


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the checkpoint in `path`, with tensors memory-mapped; None if it is missing or damaged.

    Raises:
        OSError, RuntimeError: the file cannot be read now, for lack of memory, file handles or access. It may be whole.
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


def require_checkpoint(path: Path) -> dict[str, Any]:
    """Return the checkpoint in `path`, with tensors memory-mapped.

    Raises:
        StageError: it is missing or damaged.
        OSError, RuntimeError: see read_checkpoint.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        raise StageError(f"{path} is missing or damaged: run the same command again")
    return checkpoint


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Replace the file `path` by a checkpoint in one step. On return the bytes have reached the disk.

    Args:
        checkpoint: plain values and tensors.
        path: its folder is created if it is missing.

    Raises:
        OSError: no space or no access.
    """
    for leftover in unfinished_files(path.parent, path.name):  # a killed process may have left one, and they are large
        leftover.unlink(missing_ok=True)
    try:
        with written_aside(path) as temporary, open(temporary, "wb") as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        # When a write fails, torch raises an error about a position in the file; the cause is in its context.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def num_updates(checkpoint: dict[str, Any]) -> int:
    """Return the number of optimizer updates that its stage had made when the checkpoint was saved."""
    return checkpoint["optimizer_history"][-1]["num_updates"]


def repair_stage_folder(folder: Path) -> None:
    """Repair the checkpoints of a member's folder so that fairseq-train can resume after a kill at any moment.

    fairseq writes a checkpoint under one name and then copies it, byte by byte, to its other names. A kill during a
    copy leaves a truncated file. This function renames damaged files to `*.damaged`, copies the newest whole checkpoint
    to checkpoint_last.pt, and copies the checkpoint that it names as the best to checkpoint_best.pt. Only a checkpoint
    with the optimizer's state can be resumed. If there is none, or if the best checkpoint is lost, all checkpoints are
    deleted and the stage starts again.
    """
    found = {path: read_checkpoint(path) for path in folder.glob("checkpoint*.pt")}
    whole = {path: checkpoint for path, checkpoint in found.items() if checkpoint is not None}
    for path in found.keys() - whole.keys():
        os.replace(path, path.with_name(path.name + ".damaged"))
    for leftover in [*folder.glob("*.pt.tmp"), *unfinished_files(folder), folder / CRASH]:
        leftover.unlink(missing_ok=True)
    resumable = [path for path, checkpoint in whole.items() if "last_optimizer_state" in checkpoint]
    if not resumable:
        for path in whole:
            path.unlink()
        return
    newest = max(resumable, key=lambda path: (num_updates(whole[path]), path.name == LAST))
    best_loss = whole[newest]["extra_state"].get("best")
    best = folder / BEST
    if best_loss is not None and (best not in whole or whole[best]["extra_state"]["val_loss"] != best_loss):
        source = next((path for path, c in whole.items() if c["extra_state"]["val_loss"] == best_loss), None)
        if source is None:
            logger.warning("%s: the best checkpoint is lost, so the stage starts again", folder)
            for path in whole:
                path.unlink()
            return
        _copy(source, best)
    if newest.name != LAST:
        _copy(newest, folder / LAST)


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer's state, two thirds of the file, from a checkpoint of a finished stage.

    Raises:
        StageError: the checkpoint is missing or damaged.
    """
    checkpoint = require_checkpoint(path)
    if "last_optimizer_state" not in checkpoint:
        return
    del checkpoint["last_optimizer_state"]
    write_checkpoint(checkpoint, path)


def _copy(source: Path, target: Path) -> None:
    # Not synced to the disk: another copy of the checkpoint exists, and a damaged file is repaired again.
    with written_aside(target, durable=False) as temporary:
        shutil.copyfile(source, temporary)
