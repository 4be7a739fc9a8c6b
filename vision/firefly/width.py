"""Growth in width: split units in two, and add new units to layers.

A candidate is the possible split of a unit, or a possible new unit. Candidates are ranked, and only the best are added.

The effect of a candidate on the network depends on small weights, called the noise of the candidate, which are random
at first. The candidates are scored in two passes over the data. The first pass trains the noise of all candidates for
one epoch. The second pass multiplies the noise of each candidate by 1 + gate, where all gates are 0, and computes the
gradient of the loss with respect to the gates. The score of a candidate is the gradient with respect to its gate.

Shapes: b examples, s x s pixels of an image, C inputs and D outputs of a layer, K new units per layer among the
candidates. The weights of a layer have the shape [D, C, 3, 3] (convolution) or [D, C] (linear layer).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.firefly.chain import Chain, Norm, head_input
from vision.flops import flops_of_call

logger = logging.getLogger(__name__)
NUM_CANDIDATES = 70
"""Default number of possible new units per layer, K. Growth adds only the best of them."""

SPLIT_PENALTY, NEW_UNIT_PENALTY = 1e-2, 1e-4
"""Factors of the sums of squares that are added to the loss: of the noise of splits, and of the input weights of new
units."""

Batch = tuple[Tensor, Tensor]
"""Examples, [b, inputs] or [b, channels, s, s], and their classes, [b], or class probabilities, [b, classes]."""
BatchSource = Callable[[], Iterable[Batch]]
"""A function that returns the batches of one epoch. Each call starts a new epoch."""
Draw = Callable[[tuple[int, ...]], Tensor]
"""A function that returns a tensor of random numbers with the given shape."""
CountRule = Callable[[list[tuple[int, bool]]], int]
"""A function that returns how many of the best candidates to add. Its argument lists all candidates from the best to
the worst. Each candidate is a pair: the index of its layer, and True for a new unit or False for a split."""


class Growth(NamedTuple):
    """The result of growing a network."""

    chain: Chain
    """The grown network."""
    flops: int
    """FLOPs of all passes over the data that the growth needed."""


class WidthCandidates:
    """A network with all candidates for growth in width: the split of every unit, and K new units in every layer.

    Args:
        num_candidates: number of new units per layer, K.
        draw_uniform: function that returns uniform random numbers in [0, 1).
        draw_normal: function that returns standard normal random numbers.
    """

    def __init__(self, chain: Chain, num_candidates: int, draw_uniform: Draw, draw_normal: Draw):
        self.chain, self.num_candidates = chain, num_candidates
        self.splits: list[Tensor] = []
        """For each layer, the noise v of the splits, a tensor of the same shape as the weights of the layer. The split
        of a unit with weights W replaces it by two units, called its halves, with the weights W + v and W - v."""
        self.new_units: list[Tensor] = []
        """For each layer, the input weights of its new units, [K, C] or, for a convolution, [K, C, 3, 3]. The inputs
        are the old units of the previous layer or, for the first layer, the inputs of the network."""
        self.weights_on_new: list[Tensor | None] = []
        """For each layer, the weights from the K new units of the previous layer to the units of this layer,
        [D + K, K] or, for a convolution, [D + K, K, 3, 3]. The first D rows belong to the old units of this layer, the
        last K rows to its new units. None for the first layer, because it has no previous layer."""

        def uniform(bound: float, *shape: int) -> Tensor:
            return ((draw_uniform(shape) * 2 - 1) * bound).requires_grad_()

        for number, layer in enumerate(chain.layers):
            num_in, *kernel = layer.weight.shape[1:]
            self.splits.append(uniform(0.1, layer.width, num_in, *kernel))
            self.new_units.append((draw_normal((num_candidates, num_in, *kernel)) * 0.1).requires_grad_())
            shape = (layer.width + num_candidates, num_candidates, *kernel)
            self.weights_on_new.append(uniform(0.01, *shape) if number else None)
        self.head_weight_on_new = uniform(0.01, len(chain.head_bias), num_candidates)
        """Weights from the K new units of the last layer to the head, [classes, K]."""

    @property
    def variables(self) -> list[Tensor]:
        """The noise of all candidates: small random weights, which the first of the two ranking passes trains."""
        weights_on_new = [weight for weight in self.weights_on_new if weight is not None]
        return [*self.splits, *self.new_units, *weights_on_new, self.head_weight_on_new]

    def penalty(self) -> Tensor:
        """Return the penalty that is added to the loss, a scalar. It keeps the noise small."""
        splits, new_units = (
            torch.stack([tensor.square().sum() for tensor in tensors]).sum()
            for tensors in (self.splits, self.new_units)
        )
        return SPLIT_PENALTY * splits + NEW_UNIT_PENALTY * new_units

    def gates(self) -> list[Tensor]:
        """Return the gates of the candidates: for each layer a tensor of zeros [D + K], which requires gradients.

        The first D elements belong to the splits of the D units, the last K elements to the K new units.
        """
        return [
            torch.zeros(layer.width + self.num_candidates, device=layer.weight.device, requires_grad=True)
            for layer in self.chain.layers
        ]

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits of the network with all candidates, [b, classes], for examples x.

        In the second ranking pass, `gates` are those from `gates()`.
        """
        x_new: Tensor | None = None
        for number, layer in enumerate(self.chain.layers):
            width = layer.width
            # Three tensors of weights are multiplied by the same input x: the weights of the old units, the noise of
            # the splits and the weights of the new units. Concatenate them, so that one product is enough.
            weights = torch.cat([layer.weight, self.splits[number], self.new_units[number]])
            z, noise, z_new = layer.product(x, weights).split([width, width, self.num_candidates], dim=1)
            if gates is not None:
                gate = gates[number].view(1, -1, *[1] * (x.dim() - 2))
                # All gates are 0, so the product noise * gate adds only zeros to the gradient with respect to `noise`.
                # detach() saves the computation of these zeros.
                noise = noise + noise.detach() * gate[:, :width]
                z_new = z_new + z_new.detach() * gate[:, width:]
            z, weight_on_new = layer.add_bias(z), self.weights_on_new[number]
            if x_new is not None and weight_on_new is not None:
                more, more_new = layer.product(x_new, weight_on_new).split([width, self.num_candidates], dim=1)
                z, z_new = z + more, z_new + more_new
            halves = layer.activate(z + noise, layer.norm) + layer.activate(z - noise, layer.norm)
            new_norm = None if layer.norm is None else Norm.identity(layer.weight, self.num_candidates)
            # A split replaces a unit by two units, its halves. Pool the mean of their outputs, as the code of the
            # Firefly authors does. This is an approximation, because the grown network pools each half separately.
            x, x_new = layer.pool(halves / 2), layer.pool(layer.activate(z_new, new_norm))
        assert x_new is not None
        old = F.linear(head_input(x), self.chain.head_weight, self.chain.head_bias)
        return old + F.linear(head_input(x_new), self.head_weight_on_new)

    def grown_chain(self, splits: Sequence[Tensor], new_units: Sequence[Tensor]) -> Chain:
        """Return the network grown by the given candidates.

        A grown layer contains first the old units, then the second halves of the split units, then the new units. The
        first half of a split unit takes the place of the old unit.

        Args:
            splits: for each layer, the indices of the units to split.
            new_units: for each layer, the indices of the new units to add, from 0 to K - 1.
        """
        layers = []
        for number, layer in enumerate(self.chain.layers):
            split, added = splits[number], new_units[number]
            first_halves = layer.weight.clone()
            second_halves = layer.weight[split] - self.splits[number][split]
            first_halves[split] += self.splits[number][split]
            weight = torch.cat([first_halves, second_halves, self.new_units[number][added]])
            if (on_new := self.weights_on_new[number]) is not None:
                # Each new unit of the previous layer is a new input of this layer, so this layer needs a new column
                # of weights for it. `rows` contains a column for each of the K possible new units of the previous
                # layer. Its rows belong to the units of the grown layer: old units, second halves of splits, new units.
                rows = torch.cat([on_new[: layer.width], on_new[split], on_new[layer.width + added]])
                old_columns = _with_split_inputs(weight, splits[number - 1])
                weight = torch.cat([old_columns, rows[:, new_units[number - 1]]], dim=1)
            norm, bias = layer.norm, layer.bias
            if norm is not None:
                norm = norm.join(norm.select(split)).join(Norm.identity(layer.weight, len(added)))
            if bias is not None:
                bias = torch.cat([bias, bias[split], bias.new_zeros(len(added))])
            layers.append(replace(layer, weight=weight.detach(), bias=bias, norm=norm))
        old_columns = _with_split_inputs(self.chain.head_weight, splits[-1])
        head = torch.cat([old_columns, self.head_weight_on_new[:, new_units[-1]]], dim=1)
        return Chain(layers, head.detach(), self.chain.head_bias)


def rank(candidates: WidthCandidates, batches: BatchSource) -> tuple[list[Tensor], int]:
    """Return the scores of all candidates, and the FLOPs spent on computing them.

    There is one tensor of scores for each layer: the gradient of the loss with respect to each gate, averaged over the
    batches. The smallest (most negative) score is the best: the loss falls fastest if the gate of this candidate grows.

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
    return [score / num_batches for score in scores], flops_per_example * num_examples


def grow_width(
    chain: Chain,
    batches: BatchSource,
    count_rule: CountRule,
    generator: torch.Generator,
    num_candidates: int = NUM_CANDIDATES,
) -> Growth:
    """Return the network grown in width by the splits and new units that lower the loss fastest.

    Args:
        chain: the network. It is not modified.
        batches: the data that the next stage trains on.
        count_rule: function that returns how many of the best candidates are added, see `CountRule`.
        generator: random generator for the initial values of the small weights of candidates (the noise).
        num_candidates: number of new units per layer among the candidates, K.
    """
    like, widths = chain.head_weight, chain.widths
    candidates = WidthCandidates(
        chain,
        num_candidates,
        lambda shape: torch.rand(shape, generator=generator).to(like),
        lambda shape: torch.randn(shape, generator=generator).to(like),
    )
    scores, flops = rank(candidates, batches)
    layers_and_units = [(layer, unit) for layer, layer_scores in enumerate(scores) for unit in range(len(layer_scores))]
    order = [layers_and_units[index] for index in torch.cat(scores).argsort(stable=True).tolist()]
    # In a layer of D units, the candidates with the indices 0 to D - 1 are the splits of the D units, and the
    # candidates with larger indices are new units.
    count = count_rule([(layer, unit >= widths[layer]) for layer, unit in order])
    chosen = sorted(order[:count])
    splits, new_units = [], []
    for number, width in enumerate(widths):
        units = torch.tensor([unit for layer, unit in chosen if layer == number], dtype=torch.long, device=like.device)
        splits.append(units[units < width])
        new_units.append(units[units >= width] - width)
    return Growth(candidates.grown_chain(splits, new_units), flops)


def count_by_num_params(chain: Chain, num_params: int) -> CountRule:
    """Return a rule that adds candidates, best first, until the network has at least `num_params` parameters.

    The rule logs a warning if there are too few candidates to reach this number.
    """

    def count_rule(order: list[tuple[int, bool]]) -> int:
        widths = chain.widths
        for count, (layer, _) in enumerate(order):
            if chain.num_params(widths) >= num_params:
                return count
            widths[layer] += 1  # by a split or a new unit
        if chain.num_params(widths) < num_params:
            _warn_of_too_few(order, f"reach {num_params} parameters")
        return len(order)

    return count_rule


def count_by_width_ratio(chain: Chain, ratio: float) -> CountRule:
    """Return a rule by which the network grows by `ratio` times its current number of units, rounded down.

    The code of the Firefly authors uses this rule. If there are too few candidates, the rule logs a warning, and all
    candidates are added.
    """

    def count_rule(order: list[tuple[int, bool]]) -> int:
        # Add 1e-9, because rounding can make the product slightly too small: 0.29 * 100 is 28.999999999999996.
        wanted = int(ratio * sum(chain.widths) + 1e-9)
        if wanted > len(order):
            _warn_of_too_few(order, f"add {wanted} units")
        return min(len(order), wanted)

    return count_rule


def _warn_of_too_few(order: Sequence[object], aim: str) -> None:
    logger.warning("%d candidates are too few to %s: increase the setting candidates=", len(order), aim)


def _with_split_inputs(weight: Tensor, split: Tensor) -> Tensor:
    """Return the weights of a layer after some of its inputs were split in two halves."""
    weight = weight.clone()
    weight[:, split] /= 2
    return torch.cat([weight, weight[:, split]], dim=1)


def _flops_of_example(candidates: WidthCandidates, x: Tensor, y: Tensor, gates: Sequence[Tensor] | None = None) -> int:
    """Return the FLOPs of one example in one ranking pass, forward and backward."""

    def forward_and_backward() -> None:
        loss = F.cross_entropy(candidates.logits(x, gates), y)
        torch.autograd.grad(loss, candidates.variables if gates is None else gates)

    return flops_of_call(forward_and_backward)
