"""Perplexity on a split of a stream: every token scored exactly once, by one model or an ensemble.

alma-eval RUN
alma-eval CHECKPOINT [CHECKPOINT ...] --stream STREAM
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import AlmaError, StreamError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.stream_folder import StreamFolder

# N members, B blocks, L tokens of a block, M mixture layers, E experts.

TOKENS_PER_BATCH = 8192
"""Of one forward pass. Scores do not depend on it while evaluation has no capacity limit."""


@dataclass(frozen=True)
class PerplexityScore:
    """What scoring a split gives. Documents are scored end to end, end-of-document tokens included."""

    nll_sum: float
    """Nats, summed over tokens."""
    num_tokens: int
    num_words: int
    """Whitespace-separated words of the raw text."""
    load: list[list[float]]
    """[M][E]: share of the tokens that the router sent to each expert; empty without mixtures, or for
    an ensemble."""
    overflow: float
    """Share of the routed tokens that found their expert full; 0 without a capacity limit."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """The same probability mass, spread over words: comparable between tokenizers."""
        return _exp(self.nll_sum / self.num_words)


def load_members(checkpoints: Sequence[Path], stream: StreamFolder, device: torch.device) -> tuple[list, Any]:
    """Models in evaluation mode, and the task that reads `stream` as the first of them was trained.

    Raises:
        StreamError: a checkpoint is missing or damaged, or was trained with another dictionary.
    """
    import fairseq_alma

    fairseq_alma.register()
    from fairseq import checkpoint_utils

    task, models = None, []
    for path in checkpoints:
        _check_checkpoint(Path(path), stream)
        # The checkpoint remembers where its stream and our package lay: they may have moved.
        overrides = {"data": str(stream.path), "user_dir": str(Path(__file__).parent.absolute())}
        # What its stage trained on need not be in this stream.
        overrides |= {"mega_batches": "1", "replay_mega_batches": None, "replay_share": 0.0}
        loaded, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides, task=task)
        models += [model.to(device).eval() for model in loaded]
    return models, task


@torch.no_grad()
def score(models: Sequence[Any], task, split: str, tokens_per_batch: int = TOKENS_PER_BATCH) -> PerplexityScore:
    """Score every token of `split` ("valid" or "test") once.

    Blocks of tokens_per_sample as fairseq-eval-lm cuts them: a block's first input is the last token
    of the block before. Log-probabilities are float32; members' probabilities are averaged token by token.
    """
    task.load_dataset(split)
    dataset = task.dataset(split)
    device = next(models[0].parameters()).device
    nll_sum, num_tokens = 0.0, 0
    routing = _RoutingCounts()
    for sample in _batches(dataset, max(1, tokens_per_batch // task.args.tokens_per_sample)):
        source, target = sample["net_input"]["src_tokens"].to(device), sample["target"].to(device)
        is_token = target.ne(task.target_dictionary.pad())
        log_probability_N = []
        for model in models:
            scores, extra = model(source)
            log_probability_N.append(-_nll(scores, target)[is_token])
            routing.add(extra)
        log_probability = torch.stack(log_probability_N).logsumexp(0) - math.log(len(models))
        nll_sum -= log_probability.double().sum().item()
        num_tokens += log_probability.numel()
    load, overflow = routing.summary() if len(models) == 1 else ([], routing.summary()[1])
    return PerplexityScore(nll_sum, num_tokens, task.stream.counts(split)["words"], load, overflow)


def _nll(scores: Tensor, target: Tensor) -> Tensor:
    """[B, L] nats; float32 whatever the model computes in."""
    return F.cross_entropy(scores.float().transpose(1, 2), target, reduction="none")


def _batches(dataset, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Blocks in order, none left out."""
    for start in range(0, len(dataset), num_blocks):
        yield dataset.collater([dataset[i] for i in range(start, min(start + num_blocks, len(dataset)))])


class _RoutingCounts:
    """Where the tokens went, summed over batches."""

    def __init__(self):
        self._load: list[Tensor] = []
        self._dropped = self._routed = 0

    def add(self, extra: dict[str, Any]) -> None:
        mixtures = extra.get("mixtures", [])
        if not self._load:
            self._load = [torch.zeros_like(m.plan.load_E) for m in mixtures]
        for layer, mixture in enumerate(mixtures):
            if self._load[layer].shape == mixture.plan.load_E.shape:  # members may differ in their experts
                self._load[layer] += mixture.plan.load_E
            self._routed += mixture.routing.expert_T.numel()
            self._dropped += mixture.num_dropped

    def summary(self) -> tuple[list[list[float]], float]:
        load = [(load_E.double() / load_E.sum()).tolist() for load_E in self._load]
        return load, self._dropped / self._routed if self._routed else 0.0


def _check_checkpoint(path: Path, stream: StreamFolder) -> None:
    from fairseq_alma.checkpoints import read_whole

    state = read_whole(path)
    if state is None:
        raise StreamError(f"no whole checkpoint at {path}: train a stage first (alma-lm, or fairseq-train)")
    embeddings = [v for k, v in state["model"].items() if k.endswith("embed_tokens.weight")]
    wanted = stream.description["dictionary_size"]
    if embeddings and len(embeddings[0]) != wanted:
        raise StreamError(
            f"{path} was trained with a dictionary of {len(embeddings[0])} types, {stream.path} has {wanted}: "
            f"give the stream it was trained on, or one made with the same tokenizer"
        )
    saved = (state["extra_state"].get("AlmaLanguageModelingTask") or {}).get("dict_sha256")
    if saved not in (None, stream.description["tokenizer"]["dict_sha256"]):
        raise StreamError(f"{path} was trained with another dictionary than {stream.path}/dict.txt")


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """The command alma-eval. Prints a table, or JSON with --json."""
    parser = argparse.ArgumentParser(prog="alma-eval", description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="+", type=Path, metavar="RUN|CHECKPOINT", help="a run folder, or checkpoints")
    parser.add_argument("--stream", type=Path, help="stream folder; that of the run by default")
    parser.add_argument("--split", choices=["test", "valid"], default="test")
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH, help="of one forward pass")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    try:
        checkpoints, stream_path = _resolve(arguments.path, arguments.stream)
        stream = StreamFolder.open(stream_path)
        models, task = load_members(checkpoints, stream, default_device())
        result = score(models, task, arguments.split, arguments.tokens_per_batch)
    except AlmaError as error:
        print(f"alma-eval: {error}", file=sys.stderr)
        return 2
    in_idx = stream.counts(arguments.split)["tokens"]
    if result.num_tokens != in_idx:
        print(f"alma-eval: scored {result.num_tokens} tokens of {in_idx}", file=sys.stderr)
        return 1
    summary = {
        "split": arguments.split,
        "num_members": len(models),
        "num_tokens": result.num_tokens,
        "num_words": result.num_words,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "word_perplexity": result.word_perplexity,
    }
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(f"{len(models)} member(s) on {stream.path}, {arguments.split} split")
        print(f"tokens scored     {result.num_tokens:,} (all of the .idx), {result.num_words:,} words")
        print(f"perplexity        {result.perplexity:.4f} per token, {result.word_perplexity:.4f} per word")
        print(f"loss              {result.loss:.6f} nats per token")
    return 0


def _resolve(paths: Sequence[Path], stream: Path | None) -> tuple[list[Path], Path]:
    """Checkpoints and stream: what the run would deploy now, or what was given."""
    if len(paths) == 1 and paths[0].is_dir():
        run = paths[0]
        predictor = run / "predictor.json"
        if not predictor.is_file():
            runs = [str(path.parent) for path in sorted(run.glob("*/predictor.json"))]
            if runs:
                raise StreamError(f"{run} holds several runs, score one of them: {', '.join(runs)}")
            raise StreamError(f"{run} has no predictor.json: no stage is finished there; run alma-lm first")
        checkpoints = [run / entry["path"] for entry in read_json(predictor)["checkpoints"]]
        return checkpoints, stream or Path(read_json(run / "settings.json")["stream"])
    if stream is None:
        raise StreamError("checkpoints need --stream STREAM, the folder to score them on")
    return list(paths), stream


if __name__ == "__main__":
    sys.exit(main())
