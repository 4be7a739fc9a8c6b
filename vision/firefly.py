"""Firefly (Wu et al., "Firefly neural architecture descent", NeurIPS 2020): growth of one network by gradient scores.

Width: every unit may be split in two and every layer may get new units; what lowers the loss fastest is taken, splits
and new units in one ranking. As the authors' code does it, but that the head's bias stays as it is, that the head reads
new units as it did when they were ranked (there: not at all), that n units are taken where it takes n + 1 and widens
the head of a network that ends in a flattening layer too, and that noise is a convolution, not a product with unfolded
images: memory grows with the batch alone. Depth, which the ALMA paper names
and neither public code has: a layer that does almost nothing may follow any layer, ranked by the same gradient.

A network is a chain here, whichever stack it came from: layers of units (channels, or hidden units of a perceptron)
with ReLU, and a linear head. All passes are in testing mode: the statistics of norms stay as they are.

Shapes: b examples, C inputs and D outputs of a layer, k the convolution's 3 x 3 or nothing, K candidates.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError
from vision.networks import MLPStack, Stack, VGGStack
from vision.networks.conv import EPS
from vision.networks.parameters import Parameters

logger = logging.getLogger(__name__)
CANDIDATES = 70
"""K: new units that each layer is offered."""
SPLIT_PENALTY, NEW_PENALTY = 1e-2, 1e-4
"""Of the squares of what splits a unit, and of what a new unit reads."""

Batch = tuple[Tensor, Tensor]
"""Examples, [b, i] or [b, channels, s, s], and their classes."""
Batches = Callable[[], Iterable[Batch]]
"""Of one epoch, again at each call."""
HowMany = Callable[[list[tuple[int, bool]]], int]
"""Of the candidates in their order, (layer, whether new) of each, how many are taken."""


@dataclass(frozen=True)
class Norm:
    """Batch normalisation in testing."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    variance: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.scale, self.shift, training=False, eps=EPS)

    def units(self, which: Tensor) -> "Norm":
        return Norm(self.scale[which], self.shift[which], self.mean[which], self.variance[which])

    def join(self, other: "Norm") -> "Norm":
        return Norm(
            torch.cat([self.scale, other.scale]),
            torch.cat([self.shift, other.shift]),
            torch.cat([self.mean, other.mean]),
            torch.cat([self.variance, other.variance]),
        )

    @staticmethod
    def fresh(like: Tensor, num_units: int) -> "Norm":
        """Does nothing."""
        zeros, ones = like.new_zeros(num_units), like.new_ones(num_units)
        return Norm(ones, zeros, zeros, ones)


@dataclass(frozen=True)
class Layer:
    """Units and their ReLU: relu(norm(W x)), or relu(W x + bias)."""

    weight: Tensor
    """[D, C, *k]."""
    bias: Tensor | None
    norm: Norm | None
    is_pooled: bool = False
    """Whether 2 x 2 max pooling follows."""

    @property
    def width(self) -> int:
        """D."""
        return len(self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """W x of any weights of this kind."""
        return F.conv2d(x, weight, padding=1) if weight.dim() == 4 else F.linear(x, weight)

    def activate(self, before: Tensor, norm: Norm | None) -> Tensor:
        return (before if norm is None else norm(before)).relu()

    def pool(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2) if self.is_pooled else x

    def biased(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x + self.bias

    def params_of_copy(self) -> int:
        """Of a layer after this one that gives as many units as it gets."""
        return self.width**2 * self.weight[0, 0].numel() + (self.width if self.norm is None else 2 * self.width)


@dataclass(frozen=True)
class Chain:
    """One network."""

    layers: list[Layer]
    head_weight: Tensor
    """[classes, D]."""
    head_bias: Tensor

    @property
    def widths(self) -> list[int]:
        return [layer.width for layer in self.layers]

    def num_params(self, widths: Sequence[int] | None = None) -> int:
        """Of a network of these widths, and otherwise like this one."""
        first = self.layers[0].weight
        num_in, of_kernel, total = first.shape[1], first[0, 0].numel(), 0
        for layer, width in zip(self.layers, widths or self.widths, strict=True):
            total += num_in * width * of_kernel + (width if layer.norm is None else 2 * width)
            num_in = width
        return total + (num_in + 1) * len(self.head_bias)

    def logits(self, x: Tensor) -> Tensor:
        """[b, classes], in testing."""
        for layer in self.layers:
            x = layer.pool(layer.activate(layer.biased(layer.product(x, layer.weight)), layer.norm))
        return F.linear(x.flatten(1), self.head_weight, self.head_bias)


@dataclass(frozen=True)
class Grown:
    """A network that has grown."""

    chain: Chain
    flops: int
    """Of the passes that ranked candidates, forward and backward."""


def chain_of(stack: Stack) -> Chain:
    """The one network of a stack.

    Raises:
        TypeError: it is of no kind that can grow.
    """
    own = stack.parameters
    if isinstance(stack, MLPStack):
        count = len(stack.sizes) - 1
        layers = [Layer(own[f"weight_{number}"][0], own[f"bias_{number}"][0], None) for number in range(1, count)]
        return Chain(layers, own[f"weight_{count}"][0], own[f"bias_{count}"][0])
    if isinstance(stack, VGGStack):
        ends = set(accumulate(stack.blocks))
        layers = []
        for number in range(1, len(stack.widths) + 1):
            norm = Norm(
                own[f"scale_{number}"][0],
                own[f"shift_{number}"][0],
                stack.statistics[f"mean_{number}"][0],
                stack.statistics[f"variance_{number}"][0],
            )
            weight = own[f"conv_{number}"][0].permute(0, 3, 1, 2)
            layers.append(Layer(weight, None, norm, number in ends))
        return Chain(layers, own["weight_head"][0], own["bias_head"][0])
    raise TypeError(f"{type(stack).__name__} does not grow by Firefly")


def stack_of(chain: Chain, like: Stack) -> Stack:
    """A stack of one network, of the kind of another."""
    device = like.parameters.device
    if isinstance(like, MLPStack):
        tensors: dict[str, Tensor] = {}
        pairs = [*((layer.weight, layer.bias) for layer in chain.layers), (chain.head_weight, chain.head_bias)]
        for number, (weight, bias) in enumerate(pairs, start=1):
            assert bias is not None
            tensors |= {f"weight_{number}": weight[None], f"bias_{number}": bias[None]}
        sizes = [like.sizes[0], *chain.widths, len(chain.head_bias)]
        return MLPStack(sizes, Parameters.from_state(tensors, device))
    assert isinstance(like, VGGStack)
    parameters: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    blocks = [0]
    for number, layer in enumerate(chain.layers, start=1):
        norm = layer.norm
        assert norm is not None
        parameters |= {
            f"conv_{number}": layer.weight.permute(0, 2, 3, 1)[None],
            f"scale_{number}": norm.scale[None],
            f"shift_{number}": norm.shift[None],
        }
        statistics |= {f"mean_{number}": norm.mean[None], f"variance_{number}": norm.variance[None]}
        blocks[-1] += 1
        if layer.is_pooled:
            blocks.append(0)
    parameters |= {"weight_head": chain.head_weight[None], "bias_head": chain.head_bias[None]}
    own, gathered = (Parameters.from_state(tensors, device) for tensors in (parameters, statistics))
    return VGGStack(like.num_inputs, chain.widths, blocks[:-1], own, gathered)


class WidthCandidates:
    """Every split and every new unit that a chain is offered, with the noise that tells twins apart.

    Args:
        chain: the network.
        num_candidates: K.
        draw: of a shape, uniform in [0, 1).
        draw_normal: of a shape, of mean 0 and deviation 1.
    """

    def __init__(
        self,
        chain: Chain,
        num_candidates: int,
        draw: Callable[[tuple[int, ...]], Tensor],
        draw_normal: Callable[[tuple[int, ...]], Tensor],
    ):
        self.chain, self.num_candidates = chain, num_candidates
        self.splits: list[Tensor] = []
        """v [D, C, *k]: the twins are W + v and W - v."""
        self.new_units: list[Tensor] = []
        """[K, C, *k]: what new units read of old ones."""
        self.of_new: list[Tensor | None] = []
        """[D + K, K, *k]: what units, old and new, read of new ones; None in the first layer."""
        for number, layer in enumerate(chain.layers):
            num_in, *kernel = layer.weight.shape[1:]
            self.splits.append(_variable((draw((layer.width, num_in, *kernel)) * 2 - 1) * 0.1))
            self.new_units.append(_variable(draw_normal((num_candidates, num_in, *kernel)) * 0.1))
            shape = (layer.width + num_candidates, num_candidates, *kernel)
            self.of_new.append(_variable((draw(shape) * 2 - 1) * 0.01) if number else None)
        shape = (len(chain.head_bias), num_candidates)
        self.head_of_new = _variable((draw(shape) * 2 - 1) * 0.01)
        """[classes, K]."""

    @property
    def variables(self) -> list[Tensor]:
        of_new = [one for one in self.of_new if one is not None]
        return [*self.splits, *self.new_units, *of_new, self.head_of_new]

    def penalty(self) -> Tensor:
        return SPLIT_PENALTY * _squares(self.splits) + NEW_PENALTY * _squares(self.new_units)

    def gates(self) -> list[Tensor]:
        """y, zeros, one a layer: [D + K]. The loss's gradient with respect to them is the score of each candidate."""
        return [
            torch.zeros(layer.width + self.num_candidates, device=layer.weight.device, requires_grad=True)
            for layer in self.chain.layers
        ]

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """[b, classes], of the network with all candidates."""
        new: Tensor | None = None
        for number, layer in enumerate(self.chain.layers):
            width = layer.width
            # What reads x is one product: the units, the noise of their splits, the new units.
            weights = torch.cat([layer.weight, self.splits[number], self.new_units[number]])
            before, noise, of_old = layer.product(x, weights).split([width, width, self.num_candidates], dim=1)
            if gates is not None:
                y = gates[number].view(1, -1, *[1] * (x.dim() - 2))
                noise = noise + noise.detach() * y[:, :width]
                of_old = of_old + of_old.detach() * y[:, width:]
            before, of_new = layer.biased(before), self.of_new[number]
            if new is not None and of_new is not None:
                more, more_new = layer.product(new, of_new).split([width, self.num_candidates], dim=1)
                before, of_old = before + more, of_old + more_new
            twins = layer.activate(before + noise, layer.norm) + layer.activate(before - noise, layer.norm)
            fresh = None if layer.norm is None else Norm.fresh(layer.weight, self.num_candidates)
            # The mean of twins is pooled here, as the authors do; the network that comes of it pools each of them.
            x, new = layer.pool(twins / 2), layer.pool(layer.activate(of_old, fresh))
        assert new is not None
        head = self.chain
        return F.linear(x.flatten(1), head.head_weight, head.head_bias) + F.linear(new.flatten(1), self.head_of_new)

    def take(self, splits: Sequence[Tensor], new: Sequence[Tensor]) -> Chain:
        """The network with some of the candidates, layer by layer: indices of units to split, and of new units."""
        layers: list[Layer] = []
        old_inputs = new_inputs = None
        for number, layer in enumerate(self.chain.layers):
            which, added = splits[number], new[number]
            old = layer.weight.clone()
            twins = layer.weight[which] - self.splits[number][which]
            old[which] += self.splits[number][which]
            rows = [old, twins, self.new_units[number][added]]
            weight = torch.cat(rows)
            of_new = self.of_new[number]
            if old_inputs is not None and new_inputs is not None and of_new is not None:
                read = torch.cat([of_new[: layer.width], of_new[which], of_new[layer.width + added]])
                weight = torch.cat([_halved(weight, old_inputs), read[:, new_inputs]], dim=1)
            norm, bias = layer.norm, layer.bias
            if norm is not None:
                norm = norm.join(norm.units(which)).join(Norm.fresh(layer.weight, len(added)))
            if bias is not None:
                bias = torch.cat([bias, bias[which], bias.new_zeros(len(added))])
            layers.append(replace(layer, weight=weight.detach(), bias=bias, norm=norm))
            old_inputs, new_inputs = which, added
        assert old_inputs is not None and new_inputs is not None
        head = torch.cat([_halved(self.chain.head_weight, old_inputs), self.head_of_new[:, new_inputs]], dim=1)
        return Chain(layers, head.detach(), self.chain.head_bias)


class DepthCandidates:
    """A layer after each layer of a chain (before its pooling) that gives what it gets: relu(x + noise(x)) = x.

    Args:
        chain: the network.
        draw: of a shape, uniform in [0, 1).
    """

    def __init__(self, chain: Chain, draw: Callable[[tuple[int, ...]], Tensor]):
        self.chain = chain
        self.noise = [
            _variable((draw((layer.width, layer.width, *layer.weight.shape[2:])) * 2 - 1) * 0.01)
            for layer in chain.layers
        ]
        """[D, D, *k] of each."""

    @property
    def variables(self) -> list[Tensor]:
        return self.noise

    def penalty(self) -> Tensor:
        return SPLIT_PENALTY * _squares(self.noise)

    def gates(self) -> list[Tensor]:
        """y, zeros, [1] for each place, as for widths."""
        return [torch.zeros(1, device=one.device, requires_grad=True) for one in self.noise]

    def logits(self, x: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """[b, classes], of the network with all candidates."""
        for number, layer in enumerate(self.chain.layers):
            x = layer.activate(layer.biased(layer.product(x, layer.weight)), layer.norm)
            noise = layer.product(x, self.noise[number])
            if gates is not None:
                noise = noise + noise.detach() * gates[number]
            x = layer.pool((x + noise).relu())
        return F.linear(x.flatten(1), self.chain.head_weight, self.chain.head_bias)

    def take(self, places: Sequence[int], batches: Batches, with_noise: bool = True) -> Chain:
        """The network with a new layer after each of these layers.

        A new norm must give what it gets, too: it takes its mean and variance from what it will see, and scales and
        shifts them back.

        Args:
            places: numbers of layers, from 0.
            batches: of one epoch, what the new norms see.
            with_noise: else the new layers do exactly nothing.
        """
        normed = [place for place in places if self.chain.layers[place].norm]
        moments = _moments(self.chain, normed, batches()) if normed else {}
        layers = []
        for number, layer in enumerate(self.chain.layers):
            if number not in places:
                layers.append(layer)
                continue
            layers.append(replace(layer, is_pooled=False))
            weight = _identity(layer) + self.noise[number].detach() * with_noise
            norm, bias = None, None if layer.bias is None else torch.zeros_like(layer.bias)
            if number in moments:
                mean, variance = moments[number]
                norm = Norm((variance + EPS).sqrt(), mean, mean, variance)
            layers.append(Layer(weight, bias, norm, layer.is_pooled))
        return replace(self.chain, layers=layers)


def grow_width(
    chain: Chain,
    batches: Batches,
    how_many: HowMany,
    generator: torch.Generator,
    num_candidates: int = CANDIDATES,
) -> Grown:
    """Split units and add new ones: those whose noise lowers the loss fastest.

    Args:
        chain: the network.
        batches: of what it is to be trained on.
        how_many: candidates are taken.
        generator: draws the noise.
        num_candidates: K.
    """
    draw, draw_normal = _draws(chain, generator)
    candidates = WidthCandidates(chain, num_candidates, draw, draw_normal)
    scores, flops, *_ = rank(candidates, batches)
    places = [(layer, unit) for layer, of_layer in enumerate(scores) for unit in range(len(of_layer))]
    order = [places[place] for place in torch.cat(scores).argsort(stable=True).tolist()]
    widths = chain.widths
    count = how_many([(layer, unit >= widths[layer]) for layer, unit in order])
    splits: list[list[int]] = [[] for _ in widths]
    new: list[list[int]] = [[] for _ in widths]
    for layer, unit in order[:count]:
        (new[layer].append(unit - widths[layer]) if unit >= widths[layer] else splits[layer].append(unit))
    device = chain.head_weight.device
    as_tensors = [
        [torch.tensor(sorted(one), dtype=torch.long, device=device) for one in kind] for kind in (splits, new)
    ]
    return Grown(candidates.take(*as_tensors), flops)


def grow_depth(
    chain: Chain, batches: Batches, num_layers: int, generator: torch.Generator, most_params: int | None = None
) -> Grown:
    """Add layers that do almost nothing, after those layers where their noise lowers the loss fastest.

    Args:
        chain: the network.
        batches: of what it is to be trained on.
        num_layers: how many, at most.
        generator: draws the noise.
        most_params: of the network that comes of it: layers that would exceed it are not added.

    Raises:
        SettingError: more than there are layers.
    """
    if num_layers > len(chain.layers):
        raise SettingError(f"grow_depth={num_layers} is more than one new layer after each of {len(chain.layers)}")
    candidates = DepthCandidates(chain, _draws(chain, generator)[0])
    scores, flops, num_examples, example = rank(candidates, batches)
    places: list[int] = []
    num_params = chain.num_params()
    for place in torch.cat(scores).argsort(stable=True).tolist():
        num_params += chain.layers[place].params_of_copy()
        if len(places) == num_layers or (most_params is not None and num_params > most_params):
            break
        places.append(place)
    if len(places) < num_layers:
        logger.warning("%d of %d new layers fit into %d parameters", len(places), num_layers, most_params)
    if places and any(layer.norm for layer in chain.layers):
        # And the pass that new norms take their statistics from: the forward one of the network.
        flops += _forward_flops(chain, example) * num_examples
    return Grown(candidates.take(places, batches), flops)


class Ranked(NamedTuple):
    """What two passes over the data say of candidates."""

    scores: list[Tensor]
    """Of each candidate, layer by layer: the gradient of the loss with respect to how much of it there is."""
    flops: int
    """Of both passes, forward and backward."""
    num_examples: int
    example: Tensor
    """One of them, [1, ...]."""


def rank(candidates: WidthCandidates | DepthCandidates, batches: Batches) -> Ranked:
    """Score candidates, after their noise was trained for an epoch. The least is the best."""
    optimizer = torch.optim.RMSprop(candidates.variables, lr=1e-3, momentum=0.1, alpha=0.9)
    flops_of_one = 0
    for x, y in batches():
        flops_of_one = flops_of_one or _flops_of_one(candidates, x[:1], y[:1])
        optimizer.zero_grad()
        (F.cross_entropy(candidates.logits(x), y) + candidates.penalty()).backward()
        optimizer.step()
    gates, scores, count, num_examples = candidates.gates(), None, 0, 0
    for x, y in batches():
        if not count:
            flops_of_one += _flops_of_one(candidates, x[:1], y[:1], gates)
        gradients = torch.autograd.grad(F.cross_entropy(candidates.logits(x, gates), y), gates)
        scores = list(gradients) if scores is None else [a + b for a, b in zip(scores, gradients, strict=True)]
        count, num_examples = count + 1, num_examples + len(y)
    assert scores is not None
    # A copy: a view would hold its whole batch.
    return Ranked([score / count for score in scores], flops_of_one * num_examples, num_examples, x[:1].clone())


def enough_for_parameters(chain: Chain, num_params: int) -> HowMany:
    """For `grow_width`: the fewest units with which the network has that many parameters."""

    def how_many(order: list[tuple[int, bool]]) -> int:
        widths = chain.widths
        for count, (layer, _) in enumerate(order):
            if chain.num_params(widths) >= num_params:
                return count
            widths[layer] += 1
        if chain.num_params(widths) < num_params:
            logger.warning(
                "%d candidates are too few to come to %d parameters: raise candidates=", len(order), num_params
            )
        return len(order)

    return how_many


def share_of_width(chain: Chain, ratio: float) -> HowMany:
    """For `grow_width`: that share of all units, rounded down (the authors' rule)."""

    def how_many(order: list[tuple[int, bool]]) -> int:
        # The addend, because a whole number of units may be a little less than that to a computer.
        wanted = int(ratio * sum(chain.widths) + 1e-9)
        if wanted > len(order):
            logger.warning("%d candidates are too few for %d units: raise candidates=", len(order), wanted)
        return min(len(order), wanted)

    return how_many


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.square().sum() for one in tensors]).sum()


def _variable(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def _draws(
    chain: Chain, generator: torch.Generator
) -> tuple[Callable[[tuple[int, ...]], Tensor], Callable[[tuple[int, ...]], Tensor]]:
    like = chain.head_weight

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator).to(like)

    return draw, lambda shape: torch.randn(shape, generator=generator).to(like)


def _halved(weight: Tensor, twins: Tensor) -> Tensor:
    """Columns of inputs that have become two: each counts half, and again at the end."""
    weight = weight.clone()
    weight[:, twins] /= 2
    return torch.cat([weight, weight[:, twins]], dim=1)


def _identity(layer: Layer) -> Tensor:
    """Weights that give what they get, [D, D, *k]."""
    eye = torch.eye(layer.width, device=layer.weight.device, dtype=layer.weight.dtype)
    return F.pad(eye[..., None, None], (1, 1, 1, 1)) if layer.weight.dim() == 4 else eye


@torch.no_grad()
def _moments(chain: Chain, places: Sequence[int], batches: Iterable[Batch]) -> dict[int, tuple[Tensor, Tensor]]:
    """Mean and variance of each unit of some layers over all examples and pixels."""
    like = chain.head_weight
    sums = {place: [like.new_zeros(chain.layers[place].width).double() for _ in range(2)] for place in places}
    counts = dict.fromkeys(places, 0)
    for x, _ in batches:
        for number, layer in enumerate(chain.layers[: max(places) + 1]):
            x = layer.activate(layer.biased(layer.product(x, layer.weight)), layer.norm)
            if number in sums:
                each = x.movedim(1, -1).flatten(0, -2).double()
                counts[number] += len(each)
                sums[number][0] += each.sum(0)
                sums[number][1] += each.square().sum(0)
            x = layer.pool(x)
    moments = {}
    for place, (total, squares) in sums.items():
        mean = total / counts[place]
        variance = (squares / counts[place] - mean.square()).clamp_min(0)
        moments[place] = (mean.to(like), variance.to(like))
    return moments


def _forward_flops(chain: Chain, example: Tensor) -> int:
    """Of the network, of one example."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        chain.logits(example)
    return counter.get_total_flops()


def _flops_of_one(
    candidates: WidthCandidates | DepthCandidates, x: Tensor, y: Tensor, gates: Sequence[Tensor] | None = None
) -> int:
    """Forward and backward of one example, by torch's counter: in the first pass, or with gates in the second."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(candidates.logits(x, gates), y)
        torch.autograd.grad(loss, candidates.variables if gates is None else gates)
    return counter.get_total_flops()
