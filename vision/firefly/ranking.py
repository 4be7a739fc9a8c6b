"""The two passes over the data that score candidates, for growth in width and in depth alike.

A candidate changes the network by small weights, its noise, which are random at first. The first pass trains the noise
of all candidates for one epoch. The second pass multiplies the noise of each candidate by 1 + gate, where all gates
are 0, and computes the gradient of the loss with respect to the gates. This gradient is the candidate's score: the
smallest score, along which the loss decreases fastest, is the best.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.firefly.chain import Chain
from vision.flops import flops_of_call

SPLIT_PENALTY, NEW_UNIT_PENALTY = 1e-2, 1e-4
"""Factors of the squared noise of splits and of new layers, and of the squared weights with which new units read old
ones."""

Batch = tuple[Tensor, Tensor]
"""Examples, [b, i] or [b, channels, s, s], and their classes, [b]."""
BatchSource = Callable[[], Iterable[Batch]]
"""A function that returns the batches of one epoch. Each call starts a new epoch."""
Draw = Callable[[tuple[int, ...]], Tensor]
"""A function that returns random numbers of a shape."""


class Candidates(Protocol):
    """A network with everything that a growth can add to it."""

    @property
    def variables(self) -> list[Tensor]:
        """The noise that the first pass trains."""

    def penalty(self) -> Tensor:
        """Return what is added to the loss to keep the noise small, a scalar."""

    def gates(self) -> list[Tensor]:
        """Return zeros that require gradients, one tensor per layer and one number per candidate."""

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits of the network with all candidates, [b, classes]."""


@dataclass(frozen=True)
class Growth:
    """The network after a growth, and what the growth cost."""

    chain: Chain
    flops: int
    """FLOPs of the passes that ranked candidates, forward and backward."""


class Ranking(NamedTuple):
    """The scores of all candidates, and what computing them cost."""

    scores: list[Tensor]
    """Per layer, the gradient of the loss with respect to the gate of each candidate."""
    flops: int
    """FLOPs of both passes, forward and backward."""
    num_examples: int
    """Number of examples in one pass."""
    example: Tensor
    """One of the examples, [1, ...]."""


def rank(candidates: Candidates, batches: BatchSource) -> Ranking:
    """Train the noise of candidates for one epoch, then score every candidate in a second epoch.

    Args:
        candidates: the network and what can be added to it. Their noise changes.
        batches: the data that the next stage trains on.
    """
    optimizer = torch.optim.RMSprop(candidates.variables, lr=1e-3, momentum=0.1, alpha=0.9)
    flops_per_example = 0
    for x, y in batches():
        flops_per_example = flops_per_example or _flops_of_example(candidates, x[:1], y[:1])
        optimizer.zero_grad()
        (F.cross_entropy(candidates.logits(x), y) + candidates.penalty()).backward()
        optimizer.step()
    gates, scores, num_batches, num_examples = candidates.gates(), None, 0, 0
    for x, y in batches():
        if not num_batches:
            flops_per_example += _flops_of_example(candidates, x[:1], y[:1], gates)
        gradients = torch.autograd.grad(F.cross_entropy(candidates.logits(x, gates), y), gates)
        scores = list(gradients) if scores is None else [a + b for a, b in zip(scores, gradients, strict=True)]
        num_batches, num_examples = num_batches + 1, num_examples + len(y)
    assert scores is not None
    # The example is cloned, because a view would keep its whole batch in memory.
    return Ranking(
        [score / num_batches for score in scores], flops_per_example * num_examples, num_examples, x[:1].clone()
    )


def best_first(scores: Sequence[Tensor]) -> list[int]:
    """Return the numbers of all candidates, counted through all layers, from the best to the worst."""
    return torch.cat(list(scores)).argsort(stable=True).tolist()


def trainable(value: Tensor) -> Tensor:
    """Return a copy of `value` that requires gradients."""
    return value.detach().clone().requires_grad_()


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers, a scalar."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def draws(chain: Chain, generator: torch.Generator) -> tuple[Draw, Draw]:
    """Return a function that draws uniform numbers in [0, 1), and one that draws standard normal numbers.

    Both use the same generator, and return tensors of the chain's device and dtype.
    """
    like = chain.head_weight

    def draw_uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator).to(like)

    def draw_normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    return draw_uniform, draw_normal


def _flops_of_example(candidates: Candidates, x: Tensor, y: Tensor, gates: Sequence[Tensor] | None = None) -> int:
    """Return the FLOPs of one example, forward and backward: of the second pass if gates are given, else of the first.

    Args:
        candidates: the network and what can be added to it.
        x: one example, [1, ...].
        y: its class, [1].
        gates: as `Candidates.gates` returns them.
    """

    def forward_and_backward() -> None:
        loss = F.cross_entropy(candidates.logits(x, gates), y)
        torch.autograd.grad(loss, candidates.variables if gates is None else gates)

    return flops_of_call(forward_and_backward)
