"""The evaluator of alma-lm, which scores the learner. No other part of a run reads the test set."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.ledger import Scores
from fairseq_alma.core.store import Store
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.devices import default_devices
from fairseq_alma.evaluation.flops import count_forward_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import TokenScores, score_tokens
from fairseq_alma.evaluation.stored_scores import (
    MemberFacts,
    MemberScores,
    key_of_scores,
    read_scores,
    write_scores,
)

logger = logging.getLogger(__name__)

SPLITS = ("valid", "test")


class Predictor(Protocol):
    """The attributes of a learner that the evaluator uses."""

    @property
    def predictor(self) -> Sequence[Path]:
        """Checkpoints of the models that predict now. The prediction is the mean of their probabilities."""

    @property
    def frozen(self) -> Sequence[Path]:
        """The checkpoints in `predictor` that no later stage trains further.

        These models do not change, so the evaluator may store their outputs and use the outputs again.
        """

    @property
    def is_trained(self) -> bool:
        """Whether a stage has trained the models in `predictor`."""

    num_stored: int | None
    """Number of tokens of earlier mega-batches that are kept for replay. None without replay."""


class PerplexityEvaluator:
    """Scores the predictor of a learner on the test and the validation set of a stream.

    Scores that are needed again are stored in files (4 bytes for each token). There are two folders for these files:

    - `keep_in` has the scores of frozen members, which no later stage trains. Without them, all earlier members of a
      growing ensemble would be scored again after every stage.
    - `shared` has the scores of all checkpoints, for other runs. Two runs often have the same checkpoint, because one
      has copied the trained member of the other (setting `reuse_from`), or because they start from the same untrained
      model.

    Args:
        stream: the stream folder.
        keep_in: folder for the stored scores of this run. Scores that are not needed again are removed from it.
        devices: devices that compute the scores at the same time. By default all GPUs, or the CPU if there is none.
        shared: folder for the scores that runs share; None for none.
        arch: architecture of the models, if they are not switch_lm models.
        untrained_tokens: number of tokens of each split on which an untrained learner is scored; None for all. See
            `score_tokens`.
        code: digest of code of the user that computes the scores, such as a plugin; None if there is none.
    """

    def __init__(
        self,
        stream: StreamFolder,
        keep_in: Path,
        devices: Sequence[torch.device] | None = None,
        shared: Path | None = None,
        untrained_tokens: int | None = None,
        arch: str | None = None,
        code: str | None = None,
    ):
        self._stream, self._arch, self._code = stream, arch, code
        # The test set contains the test text of most periods, so it need not be scored again. Only the text of periods
        # that were added to the stream later is not in it.
        periods = range(1, stream.num_periods + 1)
        self._added = {t: f"mega_batch_{t}/test" for t in periods if stream.place_in_test(t) is None}
        self._splits = (*SPLITS, *self._added.values())
        self._kept = Store(keep_in, durable=False)
        self._shared = Store(shared, durable=False) if shared else None
        self._devices = list(devices or default_devices())
        # If no split has more than `untrained_tokens` tokens, score all tokens. Then the ledger has no `scored_tokens`.
        largest = max(stream.counts(split)["tokens"] for split in SPLITS)
        self._untrained_tokens = untrained_tokens if untrained_tokens and untrained_tokens < largest else None

    def __call__(self, learner: Predictor) -> Scores:
        """Return the scores of the learner's current predictor.

        Raises:
            StreamError, StageError: if a checkpoint is missing or damaged, or was trained with another dictionary, or
                if not all tokens of a split were scored.
        """
        max_tokens = None if learner.is_trained else self._untrained_tokens
        frozen = {checkpoint: self._key(checkpoint, max_tokens) for checkpoint in learner.frozen}
        self._kept.remove_all_but(list(frozen.values()))
        members = [self._scores_of(path, frozen.get(path), max_tokens) for path in learner.predictor]
        facts = [member.facts for member in members]
        results = {}
        for split in self._splits:
            arrays = [member.log_probability_T[split] for member in members]
            counts = self._stream.counts(split)
            num_masked = self._stream.num_masked(split, end=len(arrays[0]))
            results[split] = combine(arrays, counts["words"], counts.get("bytes"), num_masked)
        num_scored = {split: len(members[0].log_probability_T[split]) for split in self._splits}
        is_sample = any(num_scored[split] < self._stream.counts(split)["tokens"] for split in SPLITS)
        num_experts = [one.num_experts for one in facts if one.num_experts is not None]
        return Scores(
            num_params=sum(one.num_params for one in facts),
            forward_flops=sum(one.forward_flops for one in facts),
            perplexity=results["test"].perplexity,
            # If only the first tokens of the test set (a sample) were scored, there is no score per word or per byte,
            # because the numbers of words and bytes in these tokens are not known.
            word_perplexity=None if is_sample else results["test"].word_perplexity,
            bits_per_byte=None if is_sample else results["test"].bits_per_byte,
            validation_loss=results["valid"].loss,
            validation_perplexity=results["valid"].perplexity,
            num_experts=max(num_experts, default=None),
            num_members=len(facts),
            num_stored=learner.num_stored,
            expert_load=[[round(share, 4) for share in layer] for one in facts for layer in one.load] or None,
            overflow=sum(one.overflow for one in facts) / len(facts),
            scored_tokens=max(num_scored.values()) if is_sample else None,
            period_perplexities=None if is_sample else self._by_period(members),
        )

    def complete(self, learner: Predictor, scores: Scores) -> Scores:
        """Return scores of the learner's current predictor with its perplexities on periods that they lack.

        These periods were added to the stream after the scores were measured. For the errors, see `__call__`.
        """
        known = scores.period_perplexities
        if known is None or len(known) >= self._stream.num_periods:
            return scores
        now = self(learner).period_perplexities
        return scores if now is None else replace(scores, period_perplexities=[*known, *now[len(known) :]])

    def _by_period(self, members: Sequence[MemberScores]) -> list[float] | None:
        """Return the perplexity on the test text of each period; None if the stream has no periods.

        The first tokens of a period are predicted from the last ones of the period before, as in the whole test set.
        """
        perplexities = []
        for t in range(1, self._stream.num_periods + 1):
            place = self._stream.place_in_test(t)
            if place is None:
                arrays = [member.log_probability_T[self._added[t]] for member in members]
            else:
                arrays = [member.log_probability_T["test"][slice(*place)] for member in members]
            split = f"mega_batch_{t}/test"
            words, num_masked = self._stream.counts(split)["words"], self._stream.num_masked(split)
            perplexities.append(combine(arrays, words, num_masked=num_masked).perplexity)
        return perplexities or None

    def _key(self, checkpoint: Path, max_tokens: int | None) -> str:
        """Return the key under which the scores of a checkpoint are stored."""
        digests = {split: self._stream.digest(split) for split in self._splits}
        return key_of_scores(checkpoint, digests, self._stream.dictionary_digest, max_tokens, self._code)

    def _scores_of(self, checkpoint: Path, frozen_key: str | None, max_tokens: int | None) -> MemberScores:
        """Return the scores of a checkpoint. Compute them only if they are not stored yet, and store them.

        `frozen_key` is the key of the checkpoint's scores if the checkpoint is frozen, otherwise None.
        """
        if frozen_key is None and self._shared is None:
            return self._score(checkpoint, max_tokens)
        key = frozen_key or self._key(checkpoint, max_tokens)
        stores = [store for store in (self._kept if frozen_key else None, self._shared) if store]
        for store in stores:
            if found := read_scores(store, key):
                return found
        scores = self._score(checkpoint, max_tokens)
        for store in stores:
            try:
                write_scores(store, key, scores)
            except OSError as error:
                if store is self._kept:
                    raise
                # Only warn, because this run does not need the scores in the shared folder.
                logger.warning(
                    "cannot store the scores of %s in the shared folder (%s): this run continues, but other runs must "
                    "compute these scores again",
                    checkpoint,
                    error,
                )
        return scores

    def _score(self, checkpoint: Path, max_tokens: int | None) -> MemberScores:
        """Compute the scores of a checkpoint, without reading or writing stored scores."""
        model, task = load_member(checkpoint, self._stream, self._devices[0], self._arch)
        scores = {split: self._score_split(model, task, split, max_tokens) for split in self._splits}
        facts = MemberFacts(
            num_params=sum(p.numel() for p in model.parameters()),
            forward_flops=count_forward_flops(model).of_row(task.args.tokens_per_sample),
            num_experts=max((mixture.num_experts for mixture in model.mixtures), default=None),
            load=scores["valid"].load,
            overflow=scores["valid"].overflow,
        )
        del model
        if self._devices[0].type == "cuda":
            torch.cuda.empty_cache()  # free the GPU memory for the training, which runs in another process
        return MemberScores(facts, {split: token_scores.log_probability_T for split, token_scores in scores.items()})

    def _score_split(self, model: Any, task: Any, split: str, max_tokens: int | None) -> TokenScores:
        """Return the scores of a model on a split. Without `max_tokens`, raise StreamError if a token has none."""
        scores = score_tokens(model, task, split, self._devices, max_tokens=max_tokens, title=f"the split {split}")
        expected = self._stream.counts(split)["tokens"]
        if max_tokens is None and len(scores.log_probability_T) != expected:
            raise StreamError(
                f"{len(scores.log_probability_T)} tokens of the split {split} were scored, but stream.json says "
                f"{expected}: run `alma-prep` again"
            )
        return scores
