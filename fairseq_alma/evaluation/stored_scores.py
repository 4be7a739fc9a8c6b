"""Files with the scores of checkpoints, so that a checkpoint is scored only once."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_alma.checkpoints import digest_of_model, require_checkpoint
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import digest_of_code, read_json, remove, sha256_of, write_json, written_aside

CODE = ("models", "modules", "evaluation")
"""Packages of `fairseq_alma` whose code computes scores.

The key of stored scores depends on the source code of these packages. So if the code is changed, the checkpoints are
scored again, and scores that older code computed are not used."""


@dataclass(frozen=True)
class MemberFacts:
    """Measurements of one checkpoint: its size, its cost and the load of its experts."""

    num_params: int
    """Number of parameters of the model in the checkpoint."""
    forward_flops: int
    """FLOPs of a forward pass on one sequence of tokens_per_sample tokens."""
    num_experts: int | None
    """Number of experts in the largest mixture of the model; None if the model has no mixture."""
    load: list[list[float]]
    """For each mixture, the fraction of the validation tokens that the router sent to each expert."""
    overflow: float
    """Fraction of the routed validation tokens that were dropped because their expert was full."""


@dataclass(frozen=True)
class MemberScores:
    """The scores of one checkpoint."""

    facts: MemberFacts
    log_probability_T: Mapping[str, np.ndarray]
    """Mapping from split name to the log-probability of each scored token of the split, in nats and in the order of the
    split. float32 [T]."""


def key_of_scores(checkpoint: Path, splits: Mapping[str, str], dictionary: str, max_tokens: int | None) -> str:
    """Return the key under which the scores of a checkpoint are stored, a digest of all that the scores depend on.

    The key depends on the digest of the weights and not on the path of the checkpoint, so runs in different folders
    have the same key for the same model. The key also depends on the model's options, for example on the precision and
    on the number of tokens in a block.

    Args:
        checkpoint: the checkpoint of a switch_lm model.
        splits: mapping from split name to the digest of the data of the split.
        dictionary: digest of the dictionary.
        max_tokens: maximum number of tokens that are scored in each split; None for all.

    Raises:
        StageError: if the checkpoint is missing or damaged.
    """
    everything = {
        "model": digest_of_model(checkpoint),
        # Use float32 if the checkpoint has no option `precision`, because an earlier version of ALMA wrote such a
        # checkpoint, and that version used float32.
        "options": {"precision": "float32", **require_checkpoint(checkpoint)["cfg"]["model"]},
        "splits": dict(splits),
        "dictionary": dictionary,
        "max_tokens": max_tokens,
        "torch": metadata.version("torch"),
        "code": digest_of_code(CODE),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


class StoredScores:
    """A folder with the scores of checkpoints. Several processes may use it at the same time.

    Each checkpoint has a subfolder with one .npy file for each split (4 bytes for each token) and facts.json, which
    also has the digests of the .npy files. The name of the subfolder is the key of the scores. A process first writes
    the subfolder under a temporary name, and renames it when it is complete. So if a process is killed, it leaves no
    incomplete scores under a key. If a file is damaged later, `read` treats the scores as missing.

    Args:
        folder: the folder. It is created when the first scores are stored.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, key: str) -> MemberScores | None:
        """Return the stored scores, memory-mapped; None if there are none or a file is damaged."""
        folder = self.folder / key
        try:
            stored = read_json(folder / "facts.json")
            if any(sha256_of(folder / f"{split}.npy") != digest for split, digest in stored["sha256"].items()):
                return None
            arrays = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in stored["sha256"]}
            return MemberScores(MemberFacts(**stored["facts"]), arrays)
        except (OSError, RunError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, key: str, scores: MemberScores) -> None:
        """Atomically store the scores. If they are stored already and not damaged, do nothing.

        Raises:
            OSError: if the disk is full or the folder cannot be written.
        """
        target = self.folder / key
        if target.exists():
            if self.read(key) is not None:
                return
            remove(target)
        try:
            # Do not wait until the disk has stored the files. If a power failure damages them, `read` detects this,
            # because their digests do not match.
            with written_aside(target, durable=False) as temporary:
                temporary.mkdir()
                digests: dict[str, Any] = {}
                for split, array_T in scores.log_probability_T.items():
                    # The name of a period's split has a slash, so its file is in a subfolder.
                    (temporary / split).parent.mkdir(exist_ok=True)
                    np.save(temporary / f"{split}.npy", array_T)
                    digests[split] = sha256_of(temporary / f"{split}.npy")
                write_json(temporary / "facts.json", {"facts": asdict(scores.facts), "sha256": digests}, durable=False)
        except OSError:
            # Raise the error only if the scores are still missing. Another process may have stored the same scores in
            # the meantime, and then nothing is lost.
            if self.read(key) is None:
                raise

    def remove_all_but(self, keys: Collection[str]) -> None:
        """Remove all scores from this folder, except those with a key in `keys`. Also remove unfinished files.

        Call this method only if no other process uses the folder.
        """
        for path in self.folder.glob("*") if self.folder.is_dir() else ():
            if path.name not in keys:
                remove(path)
