"""Share trained members between runs: a run copies a network that another run has already trained in the same way.

Different runs often train the same network in the same way. For example, the first stage of gMoE equals the first stage
of SM, and member 1 of an ensemble equals the model of SM. If all runs of the paper's Table 2 share their members, they
need a fifth less training. A member is only reused by a run with the same number of devices, because another number of
devices changes the result slightly.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fairseq_alma.checkpoints import BEST, CONTINUATION, digest_of_model, read_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import digest_of_code, written_aside

TRAINING_CODE = (
    "criteria", "data", "models", "modules", "optim", "tasks",
    "core/averaging.py", "lm/average.py", "lm/continuation.py", "lm/expert_digests.py", "lm/train_member.py",
    "evaluation/flops.py",  # computes the training FLOPs in done.json, which is copied with a trained member
)  # fmt: skip
"""Packages and files of `fairseq_alma` whose code determines the files of a trained member.

The key of a shared member is a digest that depends on this code. So members that were trained with other code are not
reused."""


class SharedStages:
    """A folder of trained members (networks). Runs copy finished members to it, and other runs reuse these members.

    Each member has a subfolder with the files checkpoint_best.pt, log.txt and done.json (the cost of the training). The
    name of the subfolder is the key: a digest of everything on which the training depends (see key_of).

    Args:
        folder: the shared folder. It must be accessible to all runs that share members, and several runs may use it at
            the same time. It is created if it is missing.
    """

    FILES = (BEST, CONTINUATION, "log.txt", "done.json")
    """The files that are copied for a member, in this order, if they exist. If done.json exists, the other files are
    complete, because done.json is copied last."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def copy_to(self, member_folder: Path, key: str) -> bool:
        """Copy the member with the key `key` from the shared folder to `member_folder`, and return True.

        If the shared folder does not contain this member, or if its checkpoint is damaged, return False.
        """
        source = self.folder / key
        if not (source / "done.json").exists() or not self._is_whole(source):
            return False
        for name in self._files_in(source):
            # Durable, because the done marks of the run, which rely on these files, are durable too.
            with written_aside(member_folder / name) as temporary:
                shutil.copyfile(source / name, temporary)
                if name == "log.txt":
                    with open(temporary, "a", encoding="utf-8") as log:
                        log.write(f"copied from {source}, not trained here\n")
        return True

    def _is_whole(self, folder: Path) -> bool:
        """Return whether the checkpoints of a shared member can be read."""
        names = [name for name in self._files_in(folder) if name in (BEST, CONTINUATION)]
        return all(read_checkpoint(folder / name) is not None for name in names)

    def _files_in(self, folder: Path) -> list[str]:
        """Return the names of the files to copy. Only some members have a checkpoint CONTINUATION."""
        return [name for name in self.FILES if name != CONTINUATION or (folder / name).exists()]

    def check(self) -> None:
        """Raise SettingError if no file can be written in the shared folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise SettingError(
                f"reuse_from={self.folder} is not writable ({error.strerror}): choose another folder"
            ) from error

    def publish(self, member_folder: Path, key: str) -> None:
        """Atomically copy a finished member to the shared folder.

        If the shared folder already contains the member, undamaged, nothing is copied.

        Raises:
            OSError: if a file is missing, or the shared folder cannot be written.
        """
        target = self.folder / key
        if target.exists():
            if self._is_whole(target):
                return
            shutil.rmtree(target)  # the checkpoint is damaged, so delete the member and copy it again below
        try:
            with written_aside(target, durable=False) as temporary:
                temporary.mkdir()
                for name in self._files_in(member_folder):
                    shutil.copyfile(member_folder / name, temporary / name)
        except OSError:
            # If the target exists now, another run has just copied the same member to it, so there is no error.
            if not target.exists():
                raise


def key_of(recipe: Mapping[str, Any], start: Path) -> str:
    """Return the key of a member's training, a digest of its options, data, initial weights, library versions and code.

    Args:
        recipe: values that JSON can represent, among them the training options and the digests of the data.
        start: the checkpoint from which the training starts.
    """
    versions = {name: metadata.version(name) for name in ("fairseq-alma", "torch", "fairseq-fixed")}
    everything = {**recipe, "start": digest_of_model(start), "versions": versions, "code": _digest_of_code()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def _digest_of_code() -> str:
    """Return the digest of the code of `fairseq_alma` that runs when a member is trained.

    The key of a trained member contains this digest in addition to the version number of the package, because a
    developer may change the code without a new version number.
    """
    return digest_of_code(TRAINING_CODE)
