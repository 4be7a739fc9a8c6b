"""The evaluator of alma-lm, which scores the learner. No other part of a run reads the test set."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import read_json, sha256_of, unfinished_files, write_json, written_aside
from fairseq_alma.core.ledger import Scores
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.flops import count_forward_flops
from fairseq_alma.evaluation.perplexity import TokenScores, combine, default_device, load_member, score_tokens

SPLITS = ("valid", "test")


class Predictor(Protocol):
    """The attributes of a learner that the evaluator uses."""

    @property
    def predictor(self) -> Sequence[Path]:
        """Checkpoints of the models that predict now. The prediction is the mean of their probabilities."""

    @property
    def frozen(self) -> Sequence[Path]:
        """The checkpoints in `predictor` that no later stage trains further.

        They do not change, so the evaluator may store the outputs of these models and use them again.
        """


@dataclass(frozen=True)
class MemberFacts:
    """Measurements of one checkpoint: its size, its cost and the load of its experts."""

    num_params: int
    """Number of parameters."""
    forward_flops: int
    """FLOPs of a forward pass on one sequence of tokens_per_sample tokens."""
    num_experts: int | None
    """Number of experts in the largest mixture of the model; None if the model has no mixture."""
    load: list[list[float]]
    """For each mixture, the fraction of the validation tokens that the router sent to each expert."""
    overflow: float
    """Fraction of the routed validation tokens that were dropped because their expert was full."""


class PerplexityEvaluator:
    """Scores the predictor of a learner on the test and the validation set of a stream.

    Frozen members are members that no later stage trains. The log-probabilities that they assign to the tokens are
    stored in files (4 bytes for each token and member) and are not computed again. Without these files, all earlier
    members of a growing ensemble would be scored again after every stage.

    Args:
        stream: the stream folder.
        keep_in: folder for the stored log-probabilities.
        device: device that computes the scores. By default a GPU if there is one.
    """

    def __init__(self, stream: StreamFolder, keep_in: Path, device: torch.device | None = None):
        self._stream = stream
        self._keep_in = keep_in
        self._device = device or default_device()

    def __call__(self, learner: Predictor) -> Scores:
        """Return the scores of the learner's current predictor.

        Raises:
            StreamError: if a checkpoint is missing or does not fit the stream, or if the number of scored tokens is not
                the number of tokens in the split.
        """
        frozen = learner.frozen
        outputs = [self._outputs(checkpoint, keep=checkpoint in frozen) for checkpoint in learner.predictor]
        members = [facts for facts, _ in outputs]
        results = {}
        for split in SPLITS:
            results[split] = combine([arrays[split] for _, arrays in outputs], self._stream.counts(split)["words"])
        num_experts = [facts.num_experts for facts in members if facts.num_experts is not None]
        return Scores(
            num_params=sum(facts.num_params for facts in members),
            forward_flops=sum(facts.forward_flops for facts in members),
            perplexity=results["test"].perplexity,
            word_perplexity=results["test"].word_perplexity,
            validation_loss=results["valid"].loss,
            validation_perplexity=results["valid"].perplexity,
            num_experts=max(num_experts, default=None),
            num_members=len(members),
            expert_load=[[round(share, 4) for share in layer] for facts in members for layer in facts.load] or None,
            overflow=sum(facts.overflow for facts in members) / len(members),
        )

    def _outputs(self, checkpoint: Path, keep: bool) -> tuple[MemberFacts, dict[str, np.ndarray]]:
        """Return the measurements of a checkpoint and, for each split, the log-probability of each token.

        If `keep` is True, the measurements and log-probabilities are stored in files. Later calls for the same
        checkpoint read these files instead of computing the results again.
        """
        if not keep:
            return self._score(checkpoint)
        # The file names contain digests of the checkpoint and of the splits, so that the files of another checkpoint or
        # stream are never used. The JSON file is written last: if it exists, the other files are complete.
        name = f"{sha256_of(checkpoint)[:16]}_{'_'.join(self._stream.digest(split)[:8] for split in SPLITS)}"
        paths = {split: self._keep_in / f"{name}.{split}.npy" for split in SPLITS}
        mark = self._keep_in / f"{name}.json"
        if mark.exists() and (arrays := self._kept(paths)) is not None:
            return MemberFacts(**read_json(mark)), arrays
        facts, arrays = self._score(checkpoint)
        for leftover in unfinished_files(self._keep_in):
            leftover.unlink(missing_ok=True)
        for split, path in paths.items():
            with written_aside(path) as temporary:
                np.save(temporary, arrays[split])
        write_json(mark, asdict(facts))
        return facts, arrays

    def _kept(self, paths: dict[str, Path]) -> dict[str, np.ndarray] | None:
        """Return the stored log-probabilities of each split; None if a file is missing or truncated."""
        try:
            arrays = {split: np.load(path, mmap_mode="r") for split, path in paths.items()}
        except (OSError, ValueError):
            return None
        whole = all(len(arrays[split]) == self._stream.counts(split)["tokens"] for split in paths)
        return arrays if whole else None

    def _score(self, checkpoint: Path) -> tuple[MemberFacts, dict[str, np.ndarray]]:
        """Compute the return value of `_outputs`, without reading or writing stored results."""
        model, task = load_member(checkpoint, self._stream, self._device)
        scores = {split: self._score_split(model, task, split) for split in SPLITS}
        facts = MemberFacts(
            num_params=sum(p.numel() for p in model.parameters()),
            forward_flops=count_forward_flops(model).of_row(task.args.tokens_per_sample),
            num_experts=max((mixture.num_experts for mixture in model.mixtures), default=None),
            load=scores["valid"].load,
            overflow=scores["valid"].overflow,
        )
        del model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # free the GPU memory for fairseq-train, which runs in another process
        return facts, {split: token_scores.log_probability_T for split, token_scores in scores.items()}

    def _score_split(self, model: Any, task: Any, split: str) -> TokenScores:
        """Return the scores of a model on a split. Raise StreamError if not all tokens were scored."""
        scores = score_tokens(model, task, split)
        expected = self._stream.counts(split)["tokens"]
        if len(scores.log_probability_T) != expected:
            raise StreamError(
                f"{split}: {len(scores.log_probability_T)} tokens were scored, but its .idx file contains {expected}"
            )
        return scores
