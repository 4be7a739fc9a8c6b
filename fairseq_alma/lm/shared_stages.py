"""Stages that several runs share: a run copies the result of a training that another run has made in the same way.

Many runs of a study begin alike: the first stage of gMoE is that of SM, member 1 of an ensemble is SM, and the first
two of four members are the ensemble of two. For the rows of the paper's Table 2, sharing saves a fifth of all training
if every member has the same number of devices.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.checkpoints import BEST, read_checkpoint, require_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import sha256_of, written_aside

TRAINING_PACKAGES = ("criteria", "data", "models", "modules", "tasks")
"""Packages of `fairseq_alma` whose code runs inside fairseq-train."""


class SharedStages:
    """A folder of trained members. The name of each is a digest of everything on which its training depends.

    KEY/checkpoint_best.pt, log.txt, done.json (the cost of the training)

    Args:
        folder: must be visible to all runs that share. It is created if it is missing. Several runs may use it at the
            same time.
    """

    FILES = (BEST, "log.txt", "done.json")
    """The files of a member. done.json is copied last: where it exists, the others are complete."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def copy_to(self, member_folder: Path, key: str) -> bool:
        """Copy the shared member `key` into a run's folder of that member. Return False if there is none."""
        source = self.folder / key
        if not (source / "done.json").exists() or read_checkpoint(source / BEST) is None:
            return False
        for name in self.FILES:
            with written_aside(member_folder / name, durable=False) as temporary:
                shutil.copyfile(source / name, temporary)
                if name == "log.txt":
                    with open(temporary, "a", encoding="utf-8") as log:
                        log.write(f"copied from {source}, not trained here\n")
        return True

    def check(self) -> None:
        """Raise SettingError if the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise SettingError(f"share={self.folder} cannot be written ({error.strerror}): choose another") from error

    def publish(self, member_folder: Path, key: str) -> None:
        """Copy a finished member into the shared folder, in one step. A whole copy that already exists is kept.

        Raises:
            OSError: a file is missing, or the folder cannot be written.
        """
        target = self.folder / key
        if target.exists():
            if read_checkpoint(target / BEST) is not None:
                return
            shutil.rmtree(target)  # its checkpoint is damaged
        try:
            with written_aside(target, durable=False) as temporary:
                temporary.mkdir()
                for name in self.FILES:
                    shutil.copyfile(member_folder / name, temporary / name)
        except OSError:
            if not target.exists():  # otherwise another run has published the same member meanwhile
                raise


def key_of(recipe: Mapping[str, Any], start: Path) -> str:
    """Return the digest that names a training: of its options, data, initial weights, library versions and code.

    Args:
        recipe: options and digests of the data, as JSON values.
        start: the checkpoint from which the training starts.
    """
    versions = {name: metadata.version(name) for name in ("fairseq-alma", "torch", "fairseq-fixed")}
    everything = {**recipe, "start": digest_of_model(start), "versions": versions, "code": _digest_of_code()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def digest_of_model(checkpoint: Path) -> str:
    """Return the SHA-256 digest of the weights and buffers of a checkpoint.

    The rest of the file is left out: it contains folder names and clock times.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(require_checkpoint(checkpoint)["model"].items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest_of_code() -> str:
    """Return the digest of our code that runs inside fairseq-train: it may change without a new version number."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    paths = [path for name in TRAINING_PACKAGES for path in sorted((package / name).glob("*.py"))]
    for path in [*paths, package / "evaluation" / "flops.py"]:  # done.json contains the cost in FLOPs
        digest.update(f"{path.relative_to(package)} {sha256_of(path)}".encode())
    return digest.hexdigest()
