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
from pathlib import Path
from typing import Any

from fairseq_alma.checkpoints import BEST, CONTINUATION, digest_of_model
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import digest_of_code, written_aside
from fairseq_alma.core.provenance import version_of
from fairseq_alma.core.store import Store

TRAINING_CODE = (
    "criteria", "data", "models", "modules", "optim", "tasks",
    "core/averaging.py", "lm/average.py", "lm/compilation.py", "lm/train_member.py", "lm/training_loop.py",
    "lm/updates.py",
    "evaluation/flops.py",  # computes the training FLOPs in done.json, which is copied with a trained member
)  # fmt: skip
"""Packages and files of `fairseq_alma` whose code determines the files of a trained member.

The key of a shared member is a digest that depends on this code. So members that were trained with other code are not
reused."""


class SharedMembers:
    """A store of trained members (networks). Runs copy finished members to it, and other runs reuse these members.

    An entry has the files checkpoint_best.pt, log.txt and done.json (the cost of the training), and, if the next stage
    continues from another checkpoint, checkpoint_continuation.pt. Its key is a digest of everything on which the
    training depends (see key_of).

    Args:
        folder: the shared folder. It must be accessible to all runs that share members, and several runs may use it at
            the same time. It is created if it is missing.
    """

    FILES = (BEST, CONTINUATION, "log.txt", "done.json")
    """The files of a member. They are copied to a run in this order: if done.json exists there, the others do."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._store = Store(self.folder / "trained", durable=False)

    def copy_to(self, member_folder: Path, key: str) -> bool:
        """Copy the member with this key to `member_folder`. Return False if it is missing or damaged."""
        entry = self._store.take(key)
        if entry is None or not {BEST, "log.txt", "done.json"} <= entry.files.keys():
            return False
        for name in (name for name in self.FILES if name in entry.files):
            # Durable, because the done marks of the run, which rely on these files, are durable too.
            with written_aside(member_folder / name) as temporary:
                shutil.copyfile(entry.folder / name, temporary)
                if name == "log.txt":
                    with open(temporary, "a", encoding="utf-8") as log:
                        log.write(f"copied from {entry.folder}, not trained here\n")
        return True

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
        """Copy a finished member to the shared folder, unless it is there already. Raise OSError if this fails."""
        names = [name for name in self.FILES if name != CONTINUATION or (member_folder / name).exists()]
        self._store.put(key, {name: member_folder / name for name in names})


def key_of(recipe: Mapping[str, Any], start: Path) -> str:
    """Return the key of a member's training: a digest of `recipe`, the initial weights, library versions and code.

    Args:
        recipe: values that JSON can represent, among them the training options and the digests of the data.
        start: the checkpoint from which the training starts.
    """
    versions = {name: version_of(name) for name in ("fairseq-alma", "torch", "fairseq-fixed")}
    everything = {
        **recipe,
        "start": digest_of_model(start),
        "versions": versions,
        "code": digest_of_code(TRAINING_CODE),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()
