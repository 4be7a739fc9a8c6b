"""Perplexity of a predictor on any text of a stream, by which a run is steered: never on the test set."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fairseq_alma.core.ledger import Prequential
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.devices import default_devices
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import PerplexityScore, combine
from fairseq_alma.evaluation.scoring import score_tokens

NEW_TOKENS = 20_000
"""Number of tokens of a new mega-batch that are scored before a stage trains on it, if it has no validation text."""


def scores_of(
    checkpoints: Sequence[Path],
    stream: StreamFolder,
    splits: Iterable[str],
    arch: str | None = None,
    max_tokens: int | None = None,
) -> dict[str, PerplexityScore]:
    """Return the score of an ensemble on each split. `max_tokens` limits the tokens of each split to the first ones.

    Raise StreamError if a checkpoint or a split is missing or damaged.
    """
    splits, devices = list(splits), default_devices()
    members: dict[str, list[np.ndarray]] = {split: [] for split in splits}
    for checkpoint in checkpoints:  # load one model after the other, to limit the memory use
        model, task = load_member(checkpoint, stream, devices[0], arch)
        for split in splits:
            scores = score_tokens(model, task, split, devices, max_tokens=max_tokens, title=f"the split {split}")
            members[split].append(scores.log_probability_T)
    return {
        split: combine(arrays, stream.counts(split)["words"], num_masked=stream.num_masked(split, end=len(arrays[0])))
        for split, arrays in members.items()
    }


def score_before_training(
    checkpoints: Sequence[Path], stream: StreamFolder, t: int, arch: str | None = None
) -> Prequential | None:
    """Return the score of a predictor on mega-batch t, which no stage has used yet. For the errors, see `scores_of`.

    It is that on the validation text of the mega-batch, if the stream has such text, and otherwise on its first tokens.
    There is none if alma-forget has masked them.
    """
    own, split = f"mega_batch_{t}/valid", f"mega_batch_{t}"
    if t <= stream.num_periods and stream.counts(own)["words"]:
        (score,) = scores_of(checkpoints, stream, [own], arch).values()
    else:
        (score,) = scores_of(checkpoints, stream, [split], arch, NEW_TOKENS).values()
    return Prequential(None, score.loss, score.num_tokens) if score.num_tokens else None
