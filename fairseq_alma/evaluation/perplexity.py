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

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import AlmaError, StreamError
from fairseq_alma.core.files import read_json
from fairseq_alma.core.stream_folder import StreamFolder

# N members, B blocks, L tokens of a block, M mixture layers, E experts.

TOKENS_PER_BATCH = 8192
"""Of one forward pass. Scores do not depend on it while evaluation has no capacity limit."""

TOKENS_PER_PIECE = 1 << 20
"""Of an ensemble's log-probabilities that are averaged at a time."""


@dataclass(frozen=True)
class TokenScores:
    """What one model says of a split."""

    log_probability_T: np.ndarray
    """float32, in nats: of every token of the split, in the order in which they stand there."""
    load: list[list[float]]
    """[M][E]: share of the tokens that the router sent to each expert; empty without mixtures."""
    overflow: float
    """Share of the routed tokens that found their expert full; 0 without a capacity limit."""


@dataclass(frozen=True)
class PerplexityScore:
    """Documents are scored end to end, end-of-document tokens included."""

    nll_sum: float
    """Nats, summed over tokens."""
    num_tokens: int
    num_words: int
    """Whitespace-separated words of the raw text."""

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


def load_member(checkpoint: Path, stream: StreamFolder, device: torch.device) -> tuple[Any, Any]:
    """A model in evaluation mode, and the task that reads `stream` as it was trained.

    Raises:
        StreamError: the checkpoint is missing or damaged, or was trained with another dictionary.
    """
    import fairseq_alma

    fairseq_alma.register()
    from fairseq import checkpoint_utils

    _check_checkpoint(Path(checkpoint), stream)
    # The checkpoint remembers where its stream and our package lay: they may have moved.
    overrides = {"data": str(stream.path), "user_dir": str(Path(__file__).parents[1].absolute())}
    # What its stage trained on need not be in this stream.
    overrides |= {"mega_batches": "1", "replay_mega_batches": None, "replay_share": 0.0}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], overrides)
    return model.to(device).eval(), task


@torch.no_grad()
def score_tokens(model, task, split: str, tokens_per_batch: int = TOKENS_PER_BATCH) -> TokenScores:
    """Score every token of `split` ("valid" or "test") once, in order.

    Blocks of tokens_per_sample as fairseq-eval-lm cuts them: a block's first input is the last token
    of the block before. Log-probabilities are float32.
    """
    task.load_dataset(split)
    dataset = task.dataset(split)
    device = next(model.parameters()).device
    pieces = []
    routing = _RoutingCounts()
    for sample in _batches(dataset, max(1, tokens_per_batch // task.args.tokens_per_sample)):
        source, target = sample["net_input"]["src_tokens"].to(device), sample["target"].to(device)
        scores, extra = model(source)
        pieces.append(-_nll(scores, target)[target.ne(task.target_dictionary.pad())].cpu().numpy())
        routing.add(extra)
    return TokenScores(np.concatenate(pieces), *routing.summary())


def combine(log_probability_N: Sequence[np.ndarray], num_words: int) -> PerplexityScore:
    """The score of an ensemble: its members' probabilities are averaged token by token, in float64.

    Args:
        log_probability_N: log_probability_T of each of the N members, of one split.
    """
    num_tokens, nll_sum = len(log_probability_N[0]), 0.0
    for start in range(0, num_tokens, TOKENS_PER_PIECE):
        piece_NT = np.stack(
            [np.asarray(one[start : start + TOKENS_PER_PIECE], np.float64) for one in log_probability_N]
        )
        nll_sum -= float((np.logaddexp.reduce(piece_NT, axis=0) - math.log(len(piece_NT))).sum())
    return PerplexityScore(nll_sum, num_tokens, num_words)


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
            self._load[layer] += mixture.plan.load_E
            self._routed += mixture.routing.expert_T.numel()
            self._dropped += mixture.num_dropped

    def summary(self) -> tuple[list[list[float]], float]:
        load = [(load_E.double() / load_E.sum()).tolist() for load_E in self._load]
        return load, self._dropped / self._routed if self._routed else 0.0


def _check_checkpoint(path: Path, stream: StreamFolder) -> None:
    from fairseq_alma.lm.checkpoints import read_whole

    state = read_whole(path)
    if state is None:
        hint = "train a stage first (alma-lm, or fairseq-train)"
        if path.is_dir():
            hint = "a run folder is scored alone; of several runs give the checkpoints that predictor.json names"
        raise StreamError(f"no whole checkpoint at {path}: {hint}")
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
        members = []
        for checkpoint in checkpoints:  # one model in memory at a time
            model, task = load_member(checkpoint, stream, default_device())
            members.append(score_tokens(model, task, arguments.split, arguments.tokens_per_batch).log_probability_T)
        result = combine(members, stream.counts(arguments.split)["words"])
    except AlmaError as error:
        print(f"alma-eval: {error}", file=sys.stderr)
        return 2
    in_idx = stream.counts(arguments.split)["tokens"]
    if result.num_tokens != in_idx:
        print(f"alma-eval: scored {result.num_tokens} tokens of {in_idx}", file=sys.stderr)
        return 1
    summary = {
        "split": arguments.split,
        "num_members": len(members),
        "num_tokens": result.num_tokens,
        "num_words": result.num_words,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "word_perplexity": result.word_perplexity,
    }
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(f"{len(members)} member(s) on {stream.path}, {arguments.split} split")
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
        settings = read_json(run / "settings.json")
        if "stream" not in settings:
            raise StreamError(
                f"{run} is no run of alma-lm (its settings name no stream): alma-eval scores language models"
            )
        return checkpoints, stream or Path(settings["stream"])
    if stream is None:
        raise StreamError("checkpoints need --stream STREAM, the folder to score them on")
    return list(paths), stream


if __name__ == "__main__":
    sys.exit(main())
