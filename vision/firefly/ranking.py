"""Score the candidates for growth, in width or in depth, in two passes over the data.

A candidate is one possible addition to the network: the split of a unit, a new unit or a new layer. Its effect on the
network depends on small weights, called the noise of the candidate, which are random at first. The first pass trains
the noise of all candidates for one epoch. The second pass multiplies the noise of each candidate by 1 + gate, where all
gates are 0, and computes the gradient of the loss with respect to the gates. The score of a candidate is the gradient
with respect to its gate. The smallest (most negative) score is the best: the loss falls fastest if the gate of this
candidate grows.
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
"""Factors of the penalties. A penalty is a sum of squared weights, multiplied by its factor and added to the loss.

SPLIT_PENALTY is for the noise (small trainable weights) of splits and of new layers. NEW_UNIT_PENALTY is for the input
weights of new units."""

Batch = tuple[Tensor, Tensor]
"""Examples, [b, inputs] or [b, channels, s, s], and their classes, [b], or class probabilities, [b, classes]."""
BatchSource = Callable[[], Iterable[Batch]]
"""A function that returns the batches of one epoch. Each call starts a new epoch."""
Draw = Callable[[tuple[int, ...]], Tensor]
"""A function that returns a tensor of random numbers with the given shape."""


class Candidates(Protocol):
    """A network together with all candidates for its growth."""

    @property
    def variables(self) -> list[Tensor]:
        """The noise of all candidates: small random weights, which the first of the two ranking passes trains."""

    def penalty(self) -> Tensor:
        """Return the penalty that is added to the loss, a scalar. It keeps the noise of the candidates small."""

    def gates(self) -> list[Tensor]:
        """Return the gates of the candidates: for each layer a tensor of zeros with one element per candidate.

        The tensors require gradients. A gate is the number whose gradient is the score of the candidate.
        """

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits of the network with all candidates, [b, classes].

        Args:
            x: examples, [b, inputs] or [b, channels, s, s].
            gates: the gates from `gates()`, in the second ranking pass. None in the first pass.
        """


@dataclass(frozen=True)
class Growth:
    """The result of growing a network: the grown network and the FLOPs spent on growing it."""

    chain: Chain
    flops: int
    """FLOPs of all passes over the data that the growth needed."""


class Ranking(NamedTuple):
    """The scores of all candidates, and the FLOPs spent on computing them."""

    scores: list[Tensor]
    """For each layer, the gradient of the loss with respect to each gate, averaged over the batches."""
    flops: int
    """FLOPs of the two passes over the data, each forward and backward."""
    num_examples: int
    """Number of examples in one pass."""
    example: Tensor
    """One example of the data, [1, ...]. It can be used to count the FLOPs that the network needs per example."""


def rank(candidates: Candidates, batches: BatchSource) -> Ranking:
    """Return the scores of all candidates and the FLOPs spent on computing them.

    The first epoch trains the noise (the small random weights of the candidates). The second epoch computes the scores.

    Args:
        candidates: the network and its candidates. The noise is modified in place.
        batches: the data that the next stage trains on.
    """
    optimizer = torch.optim.RMSprop(candidates.variables, lr=1e-3, momentum=0.1, alpha=0.9)
    flops_per_example = 0
    for x, y in batches():
        # Every example needs the same number of FLOPs, so count the FLOPs of the first example only.
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
    # Clone the example, because a view would keep the complete batch in memory.
    return Ranking(
        [score / num_batches for score in scores], flops_per_example * num_examples, num_examples, x[:1].clone()
    )


def best_first(scores: Sequence[Tensor]) -> list[int]:
    """Return the indices of all candidates, sorted from the best (smallest score) to the worst.

    The candidates are counted from 0: first those of the first layer, then those of the second layer, and so on.
    """
    return torch.cat(list(scores)).argsort(stable=True).tolist()


def trainable(value: Tensor) -> Tensor:
    """Return a copy of `value` that requires gradients."""
    return value.detach().clone().requires_grad_()


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements of all tensors, a scalar."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def draws(chain: Chain, generator: torch.Generator) -> tuple[Draw, Draw]:
    """Return two functions: one draws uniform numbers in [0, 1), the other draws standard normal numbers.

    Both functions use `generator` and return tensors with the device and the dtype of the chain.
    """
    like = chain.head_weight

    def draw_uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator).to(like)

    def draw_normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    return draw_uniform, draw_normal


def _flops_of_example(candidates: Candidates, x: Tensor, y: Tensor, gates: Sequence[Tensor] | None = None) -> int:
    """Return the FLOPs of one example in one ranking pass, forward and backward.

    Args:
        candidates: the network and its candidates.
        x: one example, [1, ...].
        y: the label of the example, [1] or [1, classes].
        gates: None for the first pass, the gates from `Candidates.gates` for the second pass.
    """

    def forward_and_backward() -> None:
        loss = F.cross_entropy(candidates.logits(x, gates), y)
        torch.autograd.grad(loss, candidates.variables if gates is None else gates)

    return flops_of_call(forward_and_backward)
