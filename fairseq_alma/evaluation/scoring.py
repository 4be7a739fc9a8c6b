"""Scores of a language model on the tokens of a split, computed on one or several devices."""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.devices import CPU_TOKENS, default_tokens_per_batch, on_each
from fairseq_alma.evaluation.progress import scoring_progress

# Names of array dimensions: B blocks in a batch, L tokens in a block, T tokens in a split, E experts. A name that ends
# in _T belongs to an array with the dimension T.


@dataclass(frozen=True)
class TokenScores:
    """The scores of one model on T tokens of a split."""

    log_probability_T: np.ndarray
    """Log-probability of each scored token, in nats, in the order of the split; 0 for masked ones. float32 [T]."""
    load: list[list[float]]
    """For each mixture, the fraction of the tokens that the router sent to each expert. Empty without mixtures."""
    overflow: float
    """Fraction of the routed tokens that were dropped because their expert was full; 0 without a capacity limit."""


def score_tokens(
    model: Any,
    task: Any,
    split: str,
    devices: Sequence[torch.device] | None = None,
    tokens_per_batch: int | None = None,
    max_tokens: int | None = None,
    title: str | None = None,
) -> TokenScores:
    """Return the log-probability of every token of a split, and how the routers distribute the tokens over experts.

    As in fairseq-eval-lm, the tokens are cut into blocks of tokens_per_sample tokens. The input of a block begins with
    the last token of the previous block, so each token, even the first one of a block, is scored exactly once.

    The batches are the same for any number of devices. The devices take the next batch whenever they have finished one,
    so a slow device delays the others by at most one batch.

    Args:
        model, task: the model and the task that load_member returns.
        split: "valid" or "test".
        devices: the devices that compute the scores, each with a copy of the model. By default the model's device.
        tokens_per_batch: number of tokens in one forward pass. It changes the scores only if the experts have a
            capacity limit. None: see `_default_tokens_per_batch`.
        max_tokens: maximum number of tokens to score, from the beginning of the split, rounded down to whole blocks,
            but at least one block. None to score all tokens.
        title: what is scored, to show the progress; None shows none.
    """
    own_device = next(model.parameters()).device
    devices = list(devices or [own_device])
    length, pad = task.args.tokens_per_sample, task.source_dictionary.pad()
    num_blocks = max(1, (tokens_per_batch or _default_tokens_per_batch(model, devices)) // length)
    tokens_T = _tokens(task.stream, split)
    if max_tokens is not None:
        tokens_T = tokens_T[: max(1, max_tokens // length) * length]
    spans = deque(_spans(len(tokens_T), length, num_blocks))

    @torch.inference_mode()
    def score(model: Any) -> tuple[list[tuple[int, Tensor]], _RoutingCounts]:
        """Score batches until none is left. Return (start, log-probabilities) of each batch, and the routing counts.

        `start` is the position of the batch's first token in the split.
        """
        device, scored, routing = next(model.parameters()).device, [], _RoutingCounts()
        while spans:
            try:
                start, end = spans.popleft()
            except IndexError:  # no batch is left, because another device took the last one
                break
            source, target = _batch(tokens_T, start, end, length, task.source_dictionary.eos())
            has_padding = bool((source == pad).any())  # on the host: masked text is padding
            nll_T, extra = model(source.to(device), nll_of=target.to(device), per_token=True, has_padding=has_padding)
            scored.append((start, -nll_T))
            advance(end - start)
            routing.add(extra)
        # Copy the results to the host only after the last batch, because the host must wait for each copy.
        return [(start, scores_T.cpu()) for start, scores_T in scored], routing

    models = [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]
    with scoring_progress(title, len(tokens_T)) if title else nullcontext(lambda num_tokens: None) as advance:
        results = on_each([model.to(devices[0]), *models[1:]], score, cancel=spans.clear)
    log_probability_T = np.empty(len(tokens_T), np.float32)
    for scored, _ in results:
        for start, scores_T in scored:
            log_probability_T[start : start + len(scores_T)] = scores_T.numpy()
    return TokenScores(log_probability_T, *_RoutingCounts.summary([routing for _, routing in results]))


def batches_of(task: Any, split: str, tokens_per_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and the targets of the batches of a split, two int64 tensors [B, L]; see `score_tokens`.

    A batch has at most `tokens_per_batch` tokens, rounded down to whole blocks, but at least one block.
    """
    length = task.args.tokens_per_sample
    tokens_T = _tokens(task.stream, split)
    for start, end in _spans(len(tokens_T), length, max(1, tokens_per_batch // length)):
        yield _batch(tokens_T, start, end, length, task.source_dictionary.eos())


def _default_tokens_per_batch(model: Any, devices: Sequence[torch.device]) -> int:
    # If the experts have a capacity limit, the scores must not depend on the devices.
    has_limit = any(mixture.eval_capacity_factor > 0 for mixture in model.mixtures)
    return CPU_TOKENS if has_limit else default_tokens_per_batch(devices)


def _tokens(stream: StreamFolder, split: str) -> np.ndarray:
    """Return all tokens of a split, [T], memory-mapped. Raise StreamError if the file has changed.

    They are read from the .bin file, in which the documents follow one another. fairseq's datasets need 0.5 ms to read
    a block of 512 tokens, and a GPU scores the block in less time.
    """
    stream.verify_bytes([split])
    return np.memmap(stream.prefix(split).with_suffix(".bin"), dtype=stream.description["dtype"], mode="r")


def _spans(num_tokens: int, length: int, num_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the batches of a split as pairs (start, end) of token positions.

    A batch has at most `num_blocks` blocks of `length` tokens. A shorter block at the end is a batch by itself.
    """
    whole = num_tokens - num_tokens % length
    for start in range(0, whole, num_blocks * length):
        yield start, min(start + num_blocks * length, whole)
    if whole < num_tokens:
        yield whole, num_tokens


def _batch(tokens_T: np.ndarray, start: int, end: int, length: int, eos: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of the batch of tokens from `start` to `end` - 1, two int64 tensors [B, L].

    L is `length`, or less for a single shorter block. `eos` is the input for the first token of the split.
    """
    target = torch.from_numpy(np.asarray(tokens_T[start:end], np.int64))
    first = int(tokens_T[start - 1]) if start else eos
    source = torch.cat([torch.tensor([first]), target[:-1]])
    columns = min(length, end - start)
    return source.view(-1, columns), target.view(-1, columns)


class _RoutingCounts:
    """Counts, over several batches, how many tokens the routers sent to each expert and how many were dropped."""

    def __init__(self) -> None:
        self._load: list[Tensor] = []
        self._dropped = self._routed = 0

    def add(self, extra: dict[str, Any]) -> None:
        """Add the counts of one batch, given the second output of SwitchDecoder.forward."""
        mixtures = extra.get("mixtures", [])
        if not self._load:
            self._load = [torch.zeros_like(m.plan.load_E) for m in mixtures]
        for layer, mixture in enumerate(mixtures):
            self._load[layer] += mixture.plan.load_E
            self._routed += mixture.routing.expert_T.numel()
            # Keep `_dropped` as a tensor on the device of the model, so that the host need not wait for the device.
            self._dropped = self._dropped + mixture.num_dropped

    @staticmethod
    def summary(counts: Sequence["_RoutingCounts"]) -> tuple[list[list[float]], float]:
        """Return the values of TokenScores.load and TokenScores.overflow for the batches of all devices together."""
        loads = [[load_E.cpu().double() for load_E in one._load] for one in counts if one._load]
        totals = [torch.stack(layer).sum(0) for layer in zip(*loads, strict=True)]
        dropped, routed = sum(int(one._dropped) for one in counts), sum(one._routed for one in counts)
        return [(load_E / load_E.sum()).tolist() for load_E in totals], dropped / routed if routed else 0.0
