"""Convert a stack of one network to a `Chain` (a list of layers, which growth needs), and a grown chain to a stack."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from fairseq_alma.core.errors import SettingError
from vision.firefly.chain import Chain, Layer, Norm
from vision.networks import MLPStack, ModuleStack, Stack, Structure
from vision.networks.architectures import untrained_module
from vision.networks.narrow import EPS
from vision.networks.parameters import Parameters

NEEDED = (
    "learner=ff needs a torch.nn.Sequential of 3 x 3 convolutions with padding 1 and without bias, each followed by "
    "BatchNorm2d, ReLU and, if wanted, MaxPool2d(2), and at the end AdaptiveAvgPool2d(1), Flatten and Linear"
)
"""Which networks Firefly can grow, for error messages."""


def chain_from_stack(stack: Stack) -> Chain:
    """Return the only network of a stack as a chain, whose tensors are views of the tensors of the stack.

    Args:
        stack: a stack of M = 1 network.

    Raises:
        SettingError: if Firefly cannot grow this network.
    """
    if isinstance(stack, MLPStack):
        parameters, count = stack.parameters, len(stack.sizes) - 1
        layers = [
            Layer(parameters[f"weight_{number}"][0], parameters[f"bias_{number}"][0], None)
            for number in range(1, count)
        ]
        return Chain(layers, parameters[f"weight_{count}"][0], parameters[f"bias_{count}"][0])
    if isinstance(stack, ModuleStack):
        return _chain_from_module(stack.module(0), stack.structure)
    raise SettingError(f"{NEEDED}, or a perceptron (backbone=mlp). It cannot grow a {type(stack).__name__}")


def _chain_from_module(module: nn.Module, structure: Structure) -> Chain:
    """Return a module as a chain, whose tensors are those of the module."""
    layers: list[Layer] = []
    weight: Tensor | None = None
    norm: Norm | None = None
    head: nn.Linear | None = None
    is_averaged = False
    for part in _parts(module, structure):
        # A layer is complete after its ReLU. Only then may pooling follow.
        is_complete = weight is None and norm is None and bool(layers)
        if isinstance(part, nn.Conv2d):
            fits = _is_plain_convolution(part) and weight is None and not is_averaged
            weight = part.weight.detach()
        elif isinstance(part, nn.BatchNorm2d):
            fits = weight is not None and norm is None and part.affine and part.eps == EPS
            fits = fits and part.running_mean is not None
            if fits:
                assert part.running_mean is not None and part.running_var is not None
                norm = Norm(part.weight.detach(), part.bias.detach(), part.running_mean, part.running_var)
        elif isinstance(part, nn.ReLU):
            fits = weight is not None and norm is not None
            if fits:
                assert weight is not None
                layers.append(Layer(weight, None, norm))
                weight = norm = None
        elif isinstance(part, nn.MaxPool2d):
            fits = is_complete and not layers[-1].is_pooled and not is_averaged and _halves(part)
            if fits:
                layers[-1] = replace(layers[-1], is_pooled=True)
        elif isinstance(part, nn.AdaptiveAvgPool2d):
            fits, is_averaged = is_complete and part.output_size in (1, (1, 1)), True
        elif isinstance(part, nn.Linear):
            fits, head = head is None and is_averaged and part.in_features == layers[-1].width, part
        else:
            fits = isinstance(part, nn.Identity) or (isinstance(part, nn.Flatten) and is_averaged)
        if not fits:
            raise SettingError(f"{NEEDED}. In backbone={structure.backbone}, this layer does not fit: {part}")
    if head is None or head.bias is None:
        raise SettingError(f"{NEEDED}. backbone={structure.backbone} does not end with a Linear that has a bias")
    return Chain(layers, head.weight.detach(), head.bias.detach())


def _is_plain_convolution(part: nn.Conv2d) -> bool:
    """Return True if this is a 3 x 3 convolution with zeros around the image and without bias."""
    kind = (part.kernel_size, part.stride, part.padding, part.dilation, part.groups)
    return kind == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and part.padding_mode == "zeros" and part.bias is None


def _halves(part: nn.MaxPool2d) -> bool:
    """Return True if this is MaxPool2d(2)."""
    pairs = all(value in (2, (2, 2)) for value in (part.kernel_size, part.stride))
    return pairs and part.padding in (0, (0, 0)) and part.dilation in (1, (1, 1)) and not part.ceil_mode


def _parts(module: nn.Module, structure: Structure) -> Iterator[nn.Module]:
    """Yield the layers of a Sequential, also of Sequentials that it contains, in order."""
    if not isinstance(module, nn.Sequential):
        raise SettingError(f"{NEEDED}. backbone={structure.backbone} is a {type(module).__name__}")
    for part in module:
        # A block that only groups layers is a Sequential. All other modules with parts compute something of their own.
        if isinstance(part, nn.Sequential) or next(part.children(), None) is not None:
            yield from _parts(part, structure)
        else:
            yield part


def stack_from_chain(chain: Chain, like: Stack) -> Stack:
    """Return a stack of one network with copies of the tensors of the chain.

    Args:
        chain: the network.
        like: a stack. The new stack has the same kind, the same number of inputs and the same device.
    """
    if isinstance(like, MLPStack):
        return _mlp_stack(chain, like)
    assert isinstance(like, ModuleStack)
    return _module_stack(chain, like)


def _mlp_stack(chain: Chain, like: MLPStack) -> MLPStack:
    """Return a stack of one multilayer perceptron with copies of the tensors of the chain."""
    tensors: dict[str, Tensor] = {}
    pairs = [*((layer.weight, layer.bias) for layer in chain.layers), (chain.head_weight, chain.head_bias)]
    for number, (weight, bias) in enumerate(pairs, start=1):
        assert bias is not None
        tensors |= {f"weight_{number}": weight[None], f"bias_{number}": bias[None]}
    sizes = [like.sizes[0], *chain.widths, len(chain.head_bias)]
    return MLPStack(sizes, Parameters.from_state(tensors, like.parameters.device))


def _module_stack(chain: Chain, like: ModuleStack) -> ModuleStack:
    """Return a stack of one convolutional network with copies of the tensors of the chain."""
    layers = tuple((layer.width, layer.is_pooled) for layer in chain.layers)
    structure = replace(like.structure, layers=layers)
    module = untrained_module(structure, torch.Generator())
    convs = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    (head,) = (part for part in module.modules() if isinstance(part, nn.Linear))
    with torch.no_grad():
        for layer, conv, norm in zip(chain.layers, convs, norms, strict=True):
            assert layer.norm is not None and norm.running_mean is not None and norm.running_var is not None
            conv.weight.copy_(layer.weight)
            norm.weight.copy_(layer.norm.scale)
            norm.bias.copy_(layer.norm.shift)
            norm.running_mean.copy_(layer.norm.mean)
            norm.running_var.copy_(layer.norm.variance)
        head.weight.copy_(chain.head_weight)
        head.bias.copy_(chain.head_bias)
    return ModuleStack([module], structure, like.parameters.device)
