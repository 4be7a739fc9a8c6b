"""Files with the scores of checkpoints, so that a checkpoint is scored only once."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from fairseq_alma.checkpoints import digest_of_model, require_checkpoint
from fairseq_alma.core.files import digest_of_code
from fairseq_alma.core.store import Store

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
    """For each split, the log-probability of each scored token, in nats and in the order of the split. float32 [T]."""


def key_of_scores(
    checkpoint: Path, splits: Mapping[str, str], dictionary: str, max_tokens: int | None, code: str | None = None
) -> str:
    """Return the key under which the scores of a checkpoint are stored, a digest of all that the scores depend on.

    It depends on the digest of the weights, not on the path of the checkpoint, so runs in different folders have the
    same key for the same model. It also depends on the model's options, such as the number of tokens in a block.

    Args:
        checkpoint: the checkpoint of a switch_lm model.
        splits: mapping from split name to the digest of the data of the split.
        dictionary: digest of the dictionary.
        max_tokens: maximum number of tokens that are scored in each split; None for all.
        code: digest of code of the user that computes the scores; None if there is none.

    Raises:
        StageError: if the checkpoint is missing or damaged.
    """
    everything = {
        "model": digest_of_model(checkpoint),
        "options": require_checkpoint(checkpoint)["cfg"]["model"],
        "splits": dict(splits),
        "dictionary": dictionary,
        "max_tokens": max_tokens,
        "torch": metadata.version("torch"),
        "code": [digest_of_code(CODE), code],
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def read_scores(store: Store, key: str) -> MemberScores | None:
    """Return stored scores, memory-mapped; None if there are none or they are damaged."""
    entry = store.take(key)
    if entry is None:
        return None
    try:
        arrays = {name.removesuffix(".npy"): np.load(entry.folder / name, mmap_mode="r") for name in entry.files}
        return MemberScores(MemberFacts(**entry.value), arrays)
    except (OSError, ValueError, TypeError):  # removed meanwhile, or stored by other code
        return None


def write_scores(store: Store, key: str, scores: MemberScores) -> None:
    """Store scores, 4 bytes for each token, unless they are stored already. Raise OSError if the disk is full."""
    if store.take(key) is not None:
        return
    with store.writing(key, asdict(scores.facts)) as folder:
        for split, array_T in scores.log_probability_T.items():
            # The name of a period's split has a slash, so its file is in a subfolder.
            (folder / split).parent.mkdir(exist_ok=True)
            np.save(folder / f"{split}.npy", array_T)
