"""Read and write fairseq checkpoint files, and repair them after a process was killed.

This module needs torch, but not fairseq. A checkpoint contains only tensors and plain values (numbers, strings, lists
and dictionaries), so torch can load the file without running code from it.
"""

import errno
import hashlib
import logging
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import check_zip, remove, remove_unfinished, unfinished_files, written_aside
from fairseq_alma.core.store import link_or_copy

logger = logging.getLogger(__name__)

LAST, BEST, CRASH = "checkpoint_last.pt", "checkpoint_best.pt", "crash.pt"
CONTINUATION = "checkpoint_continuation.pt"
"""Checkpoint of a stage from which the next stage continues, if it is not BEST: the model after the last update."""
GROWN = "checkpoint_grown.pt"
"""Checkpoint with changed weights, from which a stage starts. It has no state of an optimizer."""
AVERAGE = "average"
"""Entry of `extra_state` in a checkpoint: {"count": number of averaged states, "model": name -> averaged weights}."""
EXPERT_DIGESTS = "expert_digests"
"""Entry of `extra_state` in a checkpoint that was written while the experts were spread over ranks.

It maps the name of each tensor [E, ...] with the weights of E experts to the SHA-256 digests of these experts."""
DAMAGE = (
    "PytorchStreamReader",
    "mmap can only be used",
    "central directory",
    "Invalid magic number",
    "corrupt",
    "unexpected EOF",
)
"""If an error message of torch contains one of these texts, the checkpoint file is damaged. Messages about other
problems, such as too little memory or too many open files, contain none of these texts."""


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the checkpoint in `path`, with tensors memory-mapped; None if the file is missing or damaged.

    Raises:
        OSError, RuntimeError: if the file cannot be read for another reason, for example too little memory, too many
            open files or a missing permission. The file itself may be undamaged.
    """
    try:
        check_zip(path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in DAMAGE):
            raise
        # Of all OSErrors, only EINVAL means a damaged file. EINVAL occurs if the file is truncated, because torch then
        # seeks a position that does not exist.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        logger.warning("the checkpoint %s is damaged (%s), so it is not used", path, error)
        return None


def require_checkpoint(path: Path) -> dict[str, Any]:
    """Like `read_checkpoint`, but raise StageError if the file is missing or damaged."""
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        raise StageError(f"the checkpoint {path} is missing or damaged: run the same command again")
    return checkpoint


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Atomically replace the file `path` with a checkpoint: plain values and tensors. Afterwards, the disk has it."""
    # Delete the temporary files that killed processes have left behind, because they are large.
    remove_unfinished(path)
    with written_aside(path) as temporary, open(temporary, "wb") as file:
        torch.save(checkpoint, file)


def digest_of_model(checkpoint: Path) -> str:
    """Return the SHA-256 digest of the weights and buffers in a checkpoint. For the errors, see `require_checkpoint`.

    The other contents of the file are ignored, because they include folder names and times.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(require_checkpoint(checkpoint)["model"].items()):
        digest.update(name.encode())
        _add(digest, tensor)
    return digest.hexdigest()


def digest_of_state(checkpoint: Path) -> str | None:
    """Return the SHA-256 digest of the optimizer state and of the average in a checkpoint; None if it has neither.

    For the errors, see `require_checkpoint`.
    """
    content = require_checkpoint(checkpoint)
    state = [content.get("last_optimizer_state"), content["extra_state"].get(AVERAGE)]
    if state == [None, None]:
        return None
    digest = hashlib.sha256()
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add a tensor, a plain value, or a list or dictionary of them, to a digest."""
    if isinstance(value, torch.Tensor):
        digest.update(f" {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        _add(digest, [part for name in sorted(value, key=str) for part in (name, value[name])])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} parts".encode())
        for part in value:
            _add(digest, part)
    else:
        digest.update(repr(value).encode())


def dictionary_of(state: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 digest of the dict.txt with which the model in a checkpoint was trained; None if unknown."""
    extra_state = state.get("extra_state")
    entry = extra_state.get("AlmaLanguageModelingTask") if isinstance(extra_state, dict) else None
    return entry.get("dict_sha256") if isinstance(entry, dict) else None


def num_updates(checkpoint: dict[str, Any]) -> int:
    """Return the number of optimizer updates that the stage had done when the checkpoint was saved."""
    return checkpoint["optimizer_history"][-1]["num_updates"]


def repair_stage_folder(folder: Path, needs_best: bool = True) -> None:
    """Repair the checkpoints of one member (network) in one stage, so that a killed training can be resumed.

    The repair has three steps:

    1. Rename damaged checkpoints to `*.damaged`.
    2. Choose the newest checkpoint that contains the optimizer state, because training can only be resumed with this
       state. Make it checkpoint_last.pt. If there is none, delete all checkpoints. Then the training starts again.
    3. Read the best validation score so far, which is stored in the newest checkpoint. Find the checkpoint with this
       score, and make it checkpoint_best.pt. If it is lost, the training continues all the same: the next validation
       gives a new best checkpoint.

    Args:
        folder: the folder of the member in the stage folder.
        needs_best: False leaves out step 3. If the predictor is an average of weights, the end of the stage writes it
            to checkpoint_best.pt, so after a kill there, the checkpoint with the best score is missing and not needed.
    """
    found = {path: read_checkpoint(path) for path in folder.glob("checkpoint*.pt")}
    whole = {path: checkpoint for path, checkpoint in found.items() if checkpoint is not None}
    for path in found.keys() - whole.keys():
        with written_aside(path.with_name(path.name + ".damaged"), durable=False) as temporary:
            os.replace(path, temporary)
    for leftover in [*folder.glob("*.pt.tmp"), *unfinished_files(folder), folder / CRASH]:
        remove(leftover)
    resumable = [path for path, checkpoint in whole.items() if "last_optimizer_state" in checkpoint]
    if not resumable:
        for path in whole:
            remove(path)
        return
    newest = max(resumable, key=lambda path: (num_updates(whole[path]), path.name == LAST))
    best_loss = whole[newest]["extra_state"].get("best") if needs_best else None
    best = folder / BEST
    if best_loss is not None and (best not in whole or whole[best]["extra_state"]["val_loss"] != best_loss):
        source = next((path for path, c in whole.items() if c["extra_state"]["val_loss"] == best_loss), None)
        if source is None:
            logger.warning(
                "%s: the checkpoint with the best validation score is lost. The training continues, and keeps the best "
                "checkpoint from now on",
                folder,
            )
            remove(best)
        else:
            link(source, best)
    if newest.name != LAST:
        link(newest, folder / LAST)


def link(source: Path, target: Path) -> None:
    """Atomically create `target` as a hard link to the file `source`, or as a copy where there are no hard links."""
    with written_aside(target, durable=False) as temporary:
        link_or_copy(source, temporary)


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer state from the checkpoint of a finished stage. The file shrinks to a third of its size."""
    checkpoint = require_checkpoint(path)
    if "last_optimizer_state" not in checkpoint:
        return
    del checkpoint["last_optimizer_state"]
    write_checkpoint(checkpoint, path)
