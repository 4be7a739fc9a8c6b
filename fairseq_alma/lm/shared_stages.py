"""Stages computed once: what one run has trained, another takes that would train the very same.

Many rows of a study share their beginnings: the first stage of gMoE is that of SM, member 1 of an ensemble is SM, the
first two of four members are the ensemble of two. By the paper's Table 2 that is a fifth of all training, where members
have equal devices.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.lm.checkpoints import BEST, read_whole

ROOMS_OF_TRAINING = ("criteria", "data", "models", "modules", "tasks")


class SharedStages:
    """A folder of finished members, each under the digest of all that its training depends on.

    KEY/checkpoint_best.pt, log.txt, done.json (what it cost when it was computed)

    Args:
        folder: on a file system that all runs see; made where it is missing. Several runs may use it at once.
    """

    FILES = (BEST, "log.txt", "done.json")
    """The done mark last: it says that the others are there."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def take(self, key: str, into: Path) -> bool:
        """Copy the member `key` into its folder in a run, the done mark last. False where there is no whole one."""
        source = self.folder / key
        if not (source / "done.json").exists() or read_whole(source / BEST) is None:
            return False
        into.mkdir(parents=True, exist_ok=True)
        for name in self.FILES:
            temporary = into / f".{name}.tmp"
            shutil.copyfile(source / name, temporary)
            if name == "log.txt":
                with open(temporary, "a", encoding="utf-8") as log:
                    log.write(f"taken from {source}, not trained here\n")
            os.replace(temporary, into / name)
        return True

    def check(self) -> None:
        """Raises SettingError where the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise SettingError(f"share={self.folder} cannot be written ({error.strerror}): choose another") from error

    def give(self, key: str, member_folder: Path) -> None:
        """Publish a finished member, whole or not at all; of two runs that finish the same one the first counts."""
        target = self.folder / key
        if target.exists():
            if read_whole(target / BEST) is not None:
                return
            shutil.rmtree(target)  # a disk has damaged it
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=self.folder))
        try:
            temporary.chmod(0o755)  # mkdtemp is for one user alone
            for name in self.FILES:
                shutil.copyfile(member_folder / name, temporary / name)
            os.rename(temporary, target)
        except OSError:
            if not target.exists():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def key_of(recipe: Mapping[str, Any], start: Path) -> str:
    """The digest of a training: its options and data, the weights it starts from, the versions that compute it."""
    versions = {name: metadata.version(name) for name in ("fairseq-alma", "torch", "fairseq-fixed")}
    everything = {**recipe, "start": digest_of_model(start), "versions": versions, "code": _digest_of_code()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def digest_of_model(checkpoint: Path) -> str:
    """Of the weights and buffers alone: the rest of a checkpoint names folders and clocks."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_whole(checkpoint)["model"].items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest_of_code() -> str:
    """Of what runs inside fairseq-train: another version of it may train otherwise under the same version number."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    paths = [path for room in ROOMS_OF_TRAINING for path in sorted((package / room).glob("*.py"))]
    for path in [*paths, package / "evaluation" / "flops.py"]:  # the done mark says what it cost
        digest.update(f"{path.relative_to(package)} {sha256_of(path)}".encode())
    return digest.hexdigest()
