"""The form of a network that growth works on: a chain of layers with ReLU, followed by a linear head.

All forward passes are in evaluation mode, so the running statistics of batch normalisations do not change.

Shapes: b examples, s x s pixels of an image, C inputs and D outputs of a layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError
from vision.networks import MLPStack, ModuleStack, Stack
from vision.networks.architectures import untrained_module
from vision.networks.narrow import EPS
from vision.networks.parameters import Parameters

NEEDED = (
    "learner=ff needs a torch.nn.Sequential of 3 x 3 convolutions with padding 1 and without bias, each followed by "
    "BatchNorm2d, ReLU and, if wanted, MaxPool2d(2), and at the end AdaptiveAvgPool2d(1), Flatten and Linear"
)
"""Which networks Firefly can grow, for error messages."""
MAY_FOLLOW: dict[type[nn.Module], tuple[type[nn.Module] | None, ...]] = {
    nn.Conv2d: (None, nn.ReLU, nn.MaxPool2d),
    nn.BatchNorm2d: (nn.Conv2d,),
    nn.ReLU: (nn.BatchNorm2d,),
    nn.MaxPool2d: (nn.ReLU,),
    nn.AdaptiveAvgPool2d: (nn.ReLU, nn.MaxPool2d),
    nn.Linear: (nn.AdaptiveAvgPool2d,),
}
"""Kind of module -> the kinds that it may follow in a network that Firefly can grow; None: it may be the first."""


class Norm(NamedTuple):
    """Batch normalisation in evaluation mode. Every tensor has shape [D], one element per unit."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    variance: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` normalised. The shape does not change."""
        return F.batch_norm(x, self.mean, self.variance, self.scale, self.shift, training=False, eps=EPS)

    def select(self, units: Tensor) -> "Norm":
        """Return a norm for only some units of this norm. `units` contains their indices."""
        return Norm(*(values[units] for values in self))

    def join(self, other: "Norm") -> "Norm":
        """Return a norm for the units of both norms: first the units of `self`, then the units of `other`."""
        return Norm(*map(torch.cat, zip(self, other, strict=True)))

    @staticmethod
    def identity(like: Tensor, num_units: int) -> "Norm":
        """Return a norm that changes nothing (up to EPS), with the device and the dtype of the tensor `like`."""
        zeros, ones = like.new_zeros(num_units), like.new_ones(num_units)
        return Norm(ones, zeros, zeros, ones)


@dataclass(frozen=True)
class Layer:
    """One layer with ReLU. A convolution computes relu(norm(W x)), a linear layer relu(W x + bias)."""

    weight: Tensor
    """Weights for C inputs and D outputs, [D, C, 3, 3] for a convolution or [D, C] for a linear layer."""
    bias: Tensor | None
    """Biases, [D], or None if the layer has a norm."""
    norm: Norm | None
    """Batch normalisation between the convolution and ReLU. None for a linear layer."""
    is_pooled: bool = False
    """True if 2 x 2 max pooling follows the layer."""

    @property
    def width(self) -> int:
        """Number of units, D."""
        return len(self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution or the matrix product of `x` with the given weights, without a bias.

        Args:
            x: input of this layer, [b, C] or [b, C, s, s].
            weight: weights with any number of outputs, [outputs, C] or [outputs, C, 3, 3].
        """
        return F.conv2d(x, weight, padding=1) if weight.dim() == 4 else F.linear(x, weight)

    def activate(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return relu(norm(x)), or relu(x) if `norm` is None."""
        return (x if norm is None else norm(x)).relu()

    def add_bias(self, x: Tensor) -> Tensor:
        """Return x + bias, or `x` if the layer has no bias."""
        return x if self.bias is None else x + self.bias

    def pool(self, x: Tensor) -> Tensor:
        """Return `x` after 2 x 2 max pooling, or `x` unchanged if no pooling follows this layer."""
        return F.max_pool2d(x, 2) if self.is_pooled else x


@dataclass(frozen=True)
class Chain:
    """One network: a sequence of layers, followed by a linear head."""

    layers: list[Layer]
    """All layers except the head, in order."""
    head_weight: Tensor
    """Weights of the head, [classes, D of the last layer]."""
    head_bias: Tensor
    """Biases of the head, [classes]."""

    @property
    def widths(self) -> list[int]:
        """Number of units of each layer."""
        return [layer.width for layer in self.layers]

    def num_params(self, widths: Sequence[int] | None = None) -> int:
        """Return the number of parameters of this network, or of one whose layers have the given numbers of units."""
        first = self.layers[0].weight
        num_in, kernel_size, total = first.shape[1], first[0, 0].numel(), 0
        for layer, width in zip(self.layers, widths or self.widths, strict=True):
            total += num_in * width * kernel_size + (width if layer.norm is None else 2 * width)
            num_in = width
        return total + (num_in + 1) * len(self.head_bias)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits in evaluation mode, [b, classes], for x, [b, inputs] or [b, channels, s, s]."""
        for layer in self.layers:
            x = layer.pool(layer.activate(layer.add_bias(layer.product(x, layer.weight)), layer.norm))
        return F.linear(head_input(x), self.head_weight, self.head_bias)


def head_input(x: Tensor) -> Tensor:
    """Return what the head reads, [b, D]: for images [b, D, s, s], the mean over the pixels."""
    return x.mean((2, 3)) if x.dim() == 4 else x


def chain_from_stack(stack: Stack) -> Chain:
    """Return the only network of a stack as a chain, whose tensors are views of the tensors of the stack.

    Raises:
        SettingError: if Firefly cannot grow this network.
    """
    if isinstance(stack, MLPStack):
        count = len(stack.sizes) - 1
        *hidden, head = ([stack.parameters[f"{kind}_{n + 1}"][0] for kind in ("weight", "bias")] for n in range(count))
        return Chain([Layer(weight, bias, None) for weight, bias in hidden], *head)
    if isinstance(stack, ModuleStack):
        return _chain_from_module(stack.module(0), f"backbone={stack.structure.backbone}")
    raise SettingError(f"{NEEDED}, or a perceptron (backbone=mlp). It cannot grow a {type(stack).__name__}")


def _chain_from_module(module: nn.Module, where: str) -> Chain:
    layers: list[Layer] = []
    last: type[nn.Module] | None = None
    head: nn.Linear | None = None
    for part in _parts(module, where):
        kind = next((kind for kind in MAY_FOLLOW if isinstance(part, kind)), None)
        if isinstance(part, nn.Identity) or (
            isinstance(part, nn.Flatten) and last in (nn.AdaptiveAvgPool2d, nn.Linear)
        ):
            continue
        if kind is None or last not in MAY_FOLLOW[kind] or not _has_known_options(part, layers):
            raise SettingError(f"{NEEDED}. In {where}, this layer does not fit: {part}")
        last = kind
        if isinstance(part, nn.Conv2d):
            weight = part.weight.detach()
        elif isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None and part.running_var is not None
            norm = Norm(part.weight.detach(), part.bias.detach(), part.running_mean, part.running_var)
        elif isinstance(part, nn.ReLU):
            layers.append(Layer(weight, None, norm))
        elif isinstance(part, nn.MaxPool2d):
            layers[-1] = replace(layers[-1], is_pooled=True)
        elif isinstance(part, nn.Linear):
            head = part
    if head is None or head.bias is None:
        raise SettingError(f"{NEEDED}. {where} does not end with a Linear that has a bias")
    return Chain(layers, head.weight.detach(), head.bias.detach())


def _has_known_options(part: nn.Module, layers: Sequence[Layer]) -> bool:
    """Return True if a chain computes what a module of one of the kinds in MAY_FOLLOW computes after some layers.

    All parameters of a chain are trained, so none may be frozen.
    """
    if not all(value.requires_grad for value in part.parameters()):
        return False
    if isinstance(part, nn.Conv2d):
        numbers = (part.kernel_size, part.stride, part.padding, part.dilation, part.groups)
        known = ((3, 3), (1, 1), (1, 1), (1, 1), 1)
        return numbers == known and part.padding_mode == "zeros" and part.bias is None
    if isinstance(part, nn.BatchNorm2d):
        return part.affine and part.eps == EPS and part.momentum == 0.1 and part.running_mean is not None
    if isinstance(part, nn.MaxPool2d):
        halves = all(value in (2, (2, 2)) for value in (part.kernel_size, part.stride))
        return halves and part.padding in (0, (0, 0)) and part.dilation in (1, (1, 1)) and not part.ceil_mode
    if isinstance(part, nn.AdaptiveAvgPool2d):
        return part.output_size in (1, (1, 1))
    return not isinstance(part, nn.Linear) or part.in_features == layers[-1].width


def _parts(module: nn.Module, where: str) -> Iterator[nn.Module]:
    """Yield the layers of a Sequential, also of Sequentials that it contains, in order."""
    if not isinstance(module, nn.Sequential):
        raise SettingError(f"{NEEDED}. {where} is a {type(module).__name__}")
    for part in module:
        # A block that only groups layers is a Sequential. All other modules with parts compute something of their own.
        if isinstance(part, nn.Sequential) or next(part.children(), None) is not None:
            yield from _parts(part, where)
        else:
            yield part


def stack_from_chain(chain: Chain, like: Stack) -> Stack:
    """Return a stack of one network with copies of the tensors of the chain.

    Args:
        like: a stack. The new stack has the same kind, the same number of inputs and the same device.
    """
    device = like.parameters.device
    if isinstance(like, MLPStack):
        tensors: dict[str, Tensor] = {}
        pairs = [*((layer.weight, layer.bias) for layer in chain.layers), (chain.head_weight, chain.head_bias)]
        for number, (weight, bias) in enumerate(pairs, start=1):
            assert bias is not None
            tensors |= {f"weight_{number}": weight[None], f"bias_{number}": bias[None]}
        return MLPStack([like.sizes[0], *chain.widths, len(chain.head_bias)], Parameters.from_state(tensors, device))
    assert isinstance(like, ModuleStack)
    structure = replace(like.structure, layers=tuple((layer.width, layer.is_pooled) for layer in chain.layers))
    module = untrained_module(structure, torch.Generator())
    convs = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    (head,) = (part for part in module.modules() if isinstance(part, nn.Linear))
    with torch.no_grad():
        for layer, conv, norm in zip(chain.layers, convs, norms, strict=True):
            assert layer.norm is not None and norm.running_mean is not None and norm.running_var is not None
            conv.weight.copy_(layer.weight)
            ours = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
            for value, new in zip(ours, layer.norm, strict=True):
                value.copy_(new)
        head.weight.copy_(chain.head_weight)
        head.bias.copy_(chain.head_bias)
    return ModuleStack([module], structure, device)
