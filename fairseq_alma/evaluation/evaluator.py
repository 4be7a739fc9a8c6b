"""The environment's side: the only part of a run that reads the test set."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import read_json, sha256_of, write_json
from fairseq_alma.core.ledger import Scores
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.flops import count_forward_flops
from fairseq_alma.evaluation.perplexity import combine, default_device, load_member, score_tokens

SPLITS = ("valid", "test")


@dataclass(frozen=True)
class MemberFacts:
    """What the environment measures of one checkpoint, beside the log-probability of each token."""

    num_params: int
    forward_flops: int
    num_experts: int | None
    load: list[list[float]]
    overflow: float


class PerplexityEvaluator:
    """Scores what a learner would predict with now, on the test and the validation set of a stream.

    Args:
        stream: whose sets.
        keep_in: where the outputs of members that later stages leave as they are lie, so that an ensemble which
            grows is not scored anew as a whole at each stage: gEns would cost O(t^2). 4 bytes a token and member.
    """

    def __init__(self, stream: StreamFolder, keep_in: Path, device: torch.device | None = None):
        self._stream = stream
        self._keep_in = keep_in
        self._device = device or default_device()

    def __call__(self, learner) -> Scores:
        """Raises StreamError where not every token of a split is scored exactly once."""
        frozen = learner.frozen
        outputs = [self._outputs(checkpoint, keep=checkpoint in frozen) for checkpoint in learner.predictor]
        facts = [one for one, _ in outputs]
        results = {}
        for split in SPLITS:
            results[split] = combine([arrays[split] for _, arrays in outputs], self._stream.counts(split)["words"])
        num_experts = [one.num_experts for one in facts if one.num_experts is not None]
        return Scores(
            num_params=sum(one.num_params for one in facts),
            forward_flops=sum(one.forward_flops for one in facts),
            perplexity=results["test"].perplexity,
            word_perplexity=results["test"].word_perplexity,
            validation_loss=results["valid"].loss,
            validation_perplexity=results["valid"].perplexity,
            num_experts=max(num_experts, default=None),
            num_members=len(facts),
            expert_load=[[round(share, 4) for share in layer] for one in facts for layer in one.load] or None,
            overflow=sum(one.overflow for one in facts) / len(facts),
        )

    def _outputs(self, checkpoint: Path, keep: bool) -> tuple[MemberFacts, dict[str, np.ndarray]]:
        if not keep:
            return self._score(checkpoint)
        # Named by what it was made of, and the JSON file written last: what is found is whole and of this checkpoint.
        name = f"{sha256_of(checkpoint)[:16]}_{'_'.join(self._stream.digest(split)[:8] for split in SPLITS)}"
        paths = {split: self._keep_in / f"{name}.{split}.npy" for split in SPLITS}
        mark = self._keep_in / f"{name}.json"
        if mark.exists() and (arrays := self._kept(paths)) is not None:
            return MemberFacts(**read_json(mark)), arrays
        facts, arrays = self._score(checkpoint)
        self._keep_in.mkdir(parents=True, exist_ok=True)
        for split, path in paths.items():
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                np.save(file, arrays[split])
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        write_json(mark, asdict(facts))
        return facts, arrays

    def _kept(self, paths: dict[str, Path]) -> dict[str, np.ndarray] | None:
        """Outputs of every token of every split; None where a file is gone or cut short: then it is scored anew."""
        try:
            arrays = {split: np.load(path, mmap_mode="r") for split, path in paths.items()}
        except (OSError, ValueError):
            return None
        whole = all(len(arrays[split]) == self._stream.counts(split)["tokens"] for split in paths)
        return arrays if whole else None

    def _score(self, checkpoint: Path) -> tuple[MemberFacts, dict[str, np.ndarray]]:
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
            torch.cuda.empty_cache()  # the next stage is another process, and wants the memory
        return facts, {split: one.log_probability_T for split, one in scores.items()}

    def _score_split(self, model: Any, task: Any, split: str):
        scores = score_tokens(model, task, split)
        wanted = self._stream.counts(split)["tokens"]
        if len(scores.log_probability_T) != wanted:
            raise StreamError(f"{split}: {len(scores.log_probability_T)} tokens scored, the .idx holds {wanted}")
        return scores
