"""The environment's side: the only part of a run that reads the test set."""

import torch

from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.ledger import Scores
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.flops import count_forward_flops
from fairseq_alma.perplexity import default_device, load_members, score


class PerplexityEvaluator:
    """Scores what a learner would predict with now, on the test and the validation set of a stream."""

    def __init__(self, stream: StreamFolder, device: torch.device | None = None):
        self._stream = stream
        self._device = device or default_device()

    def __call__(self, learner) -> Scores:
        """Raises StreamError where not every token of a split is scored exactly once."""
        models, task = load_members(learner.predictor, self._stream, self._device)
        results = {}
        for split in ("valid", "test"):
            results[split] = score(models, task, split)
            wanted = self._stream.counts(split)["tokens"]
            if results[split].num_tokens != wanted:
                raise StreamError(f"{split}: {results[split].num_tokens} tokens scored, the .idx holds {wanted}")
        length = task.args.tokens_per_sample
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the next stage is another process, and wants the memory
        num_experts = {mixture.num_experts for model in models for mixture in model.mixtures}
        return Scores(
            num_params=sum(p.numel() for model in models for p in model.parameters()),
            forward_flops=sum(count_forward_flops(model).of_row(length) for model in models),
            perplexity=results["test"].perplexity,
            word_perplexity=results["test"].word_perplexity,
            validation_loss=results["valid"].loss,
            validation_perplexity=results["valid"].perplexity,
            num_experts=max(num_experts, default=None),
            num_members=len(models),
            expert_load=[[round(share, 4) for share in layer] for layer in results["valid"].load] or None,
            overflow=results["valid"].overflow,
        )
