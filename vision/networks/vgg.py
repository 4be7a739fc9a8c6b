"""The reduced VGG19: 16 convolutions (3 x 3, c channels each) with batch normalisation and ReLU, and a linear head.

Max pooling follows convolutions 2, 4, 8, 12 and 16, so that an image of 32 x 32 pixels is reduced to one pixel of c
channels. For images with 3 channels and 10 classes, the network has 27c + 135c^2 + 32c + 10c + 10 parameters: the first
convolution, the other convolutions, batch normalisation, weights of the head, biases of the head.

As in the code of the Firefly authors, the convolutions have no bias. In the original ALMA code the convolutions have a
bias, but the batch normalisation removes the bias, so the output of the network is the same.

Shapes: M networks in G groups, b examples, s x s pixels of an image, C input and D output channels of a convolution.
The M / G networks of a group read the same examples.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vision.networks.block import ConvBlock
from vision.networks.conv import ConvLayer, ConvTensors, draw_conv
from vision.networks.modules import linear_module
from vision.networks.parameters import Parameters, draw_linear
from vision.networks.stack import Stack

BLOCKS = (2, 2, 4, 4, 4)
"""Number of convolutions in each block. Max pooling follows every block."""
SIDE = 32
"""Side of an image in pixels. The five poolings reduce the image to one pixel."""


class VGGStack(Stack):
    """M reduced VGG19 networks of equal widths, computed one after the other.

    Computing several networks by one torch operation saves time only if starting an operation takes longer than its
    arithmetic, as in small multilayer perceptrons. In a convolution, even with 4 channels, the arithmetic takes much
    longer than starting the operation.

    Args:
        num_inputs: number of channels of an image.
        widths: number of output channels of each convolution.
        blocks: number of convolutions in each block. Pooling follows every block.
        parameters: conv_1 [M, D, 3, 3, C], scale_1 [M, D], shift_1 [M, D], ..., weight_head, bias_head.
        statistics: running statistics of the batch normalisation: mean_1 [M, D], variance_1 [M, D], ...
    """

    statistics: Parameters

    def __init__(
        self,
        num_inputs: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        parameters: Parameters,
        statistics: Parameters,
    ):
        self.num_inputs, self.widths, self.blocks = num_inputs, list(widths), list(blocks)
        self.parameters, self.statistics = parameters, statistics
        self.gradient = parameters.zeros_like()
        self.examples_at_once = max(50, min(2000, 40_000 // max(widths)))
        names = [str(layer) for layer in range(1, len(self.widths) + 1)]
        self._blocks = [
            make_blocks(names, self.blocks, network, self.parameters, self.gradient, self.statistics)
            for network in range(len(self))
        ]
        self._head_inputs: list[Tensor] = []

    @classmethod
    def initialised(
        cls,
        num_inputs: int,
        widths: Sequence[int],
        num_classes: int,
        generators: Sequence[torch.Generator],
        device: torch.device,
        blocks: Sequence[int] = BLOCKS,
    ) -> "VGGStack":
        """Return untrained networks, with the initialisation of the corresponding torch modules.

        Args:
            num_inputs: number of channels of an image.
            widths: number of output channels of each convolution.
            num_classes: number of classes.
            generators: random generators, one per network.
            device: device on which the networks are stored.
            blocks: number of convolutions in each block. Pooling follows every block.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        statistics: dict[str, tuple[int, ...]] = {}
        for layer, (num_in, num_out) in enumerate(pairwise([num_inputs, *widths]), start=1):
            add_conv_shapes(str(layer), num_in, num_out, shapes, statistics)
        shapes |= {"weight_head": (num_classes, widths[-1]), "bias_head": (num_classes,)}
        count = len(generators)
        stack = cls(num_inputs, widths, blocks, *(Parameters(s, count, device) for s in (shapes, statistics)))
        stack.reset_parameters(generators)
        return stack

    def reset_parameters(self, generators: Sequence[torch.Generator]) -> None:
        for layer in range(1, len(self.widths) + 1):
            reset_conv_layer(str(layer), self.parameters, self.statistics, generators)
        reset_head(self.parameters, generators)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        for blocks in self._blocks:
            for block in blocks:
                block.set_compute_dtype(dtype)

    @property
    def module_input_shape(self) -> tuple[int, ...]:
        return (self.num_inputs, SIDE, SIDE)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        networks_per_group, logits, inputs = len(self) // len(x), [], []
        for network, blocks in enumerate(self._blocks):
            y = x[network // networks_per_group]
            for block in blocks:
                y = block.forward(y, training)
            y = y.reshape(len(y), -1)
            inputs.append(y)
            weight, bias = self.parameters["weight_head"][network], self.parameters["bias_head"][network]
            logits.append(torch.addmm(bias, y, weight.t()))
        if training:
            self._head_inputs = inputs
        return torch.stack(logits)

    def free_activations(self) -> None:
        self._head_inputs = []
        for blocks in self._blocks:
            for block in blocks:
                block.free_activations()

    def backward(self, d_logits_MbC: Tensor) -> None:
        for network, (blocks, x) in enumerate(zip(self._blocks, self._head_inputs, strict=True)):
            dy = d_logits_MbC[network]
            torch.mm(dy.t(), x, out=self.gradient["weight_head"][network])
            torch.sum(dy, 0, out=self.gradient["bias_head"][network])
            dx: Tensor | None = torch.mm(dy, self.parameters["weight_head"][network]).view(len(x), 1, 1, -1)
            for number in range(len(blocks) - 1, -1, -1):
                assert dx is not None
                dx = blocks[number].backward(dx, wants_dx=number > 0)

    def state(self) -> dict[str, Any]:
        return {
            "kind": "vgg",
            "num_inputs": self.num_inputs,
            "widths": self.widths,
            "blocks": self.blocks,
            "parameters": self.parameters.state(),
            "statistics": self.statistics.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "VGGStack":
        tensors = (Parameters.from_state(state[name], device) for name in ("parameters", "statistics"))
        return cls(state["num_inputs"], state["widths"], state["blocks"], *tensors)

    def to_module(self, network: int) -> nn.Module:
        modules: list[nn.Module] = []
        last_layers_of_blocks = set(accumulate(self.blocks))
        for layer in range(1, len(self.widths) + 1):
            modules += conv_modules(str(layer), network, self.parameters, self.statistics)
            if layer in last_layers_of_blocks:
                modules.append(nn.MaxPool2d(2))
        weight, bias = (self.parameters[name][network] for name in ("weight_head", "bias_head"))
        return nn.Sequential(*modules, nn.Flatten(), linear_module(weight, bias))


def add_conv_shapes(
    name: str, num_in: int, num_out: int, shapes: dict[str, tuple[int, ...]], statistics: dict[str, tuple[int, ...]]
) -> None:
    """Add the shapes of the tensors of a convolutional layer and its batch normalisation to two dictionaries.

    Args:
        name: suffix of the names of the tensors of this layer, for example "3" in conv_3.
        num_in: number of input channels, C.
        num_out: number of output channels, D.
        shapes: shapes of all parameters by name, extended in place.
        statistics: shapes of all running statistics by name, extended in place.
    """
    shapes |= {f"conv_{name}": (num_out, 3, 3, num_in), f"scale_{name}": (num_out,), f"shift_{name}": (num_out,)}
    statistics |= {f"mean_{name}": (num_out,), f"variance_{name}": (num_out,)}


def reset_conv_layer(
    name: str, parameters: Parameters, statistics: Parameters, generators: Sequence[torch.Generator]
) -> None:
    """Initialise a convolutional layer in place, as torch does.

    The convolution is random. The batch normalisation gets scale 1, shift 0, mean 0 and variance 1.

    Args:
        name: suffix of the names of the tensors of this layer, for example "3" in conv_3.
        parameters: parameters of all layers. The parameters of this layer are changed in place.
        statistics: running statistics of all layers. The statistics of this layer are changed in place.
        generators: random generators, one per network.
    """
    num_out, _, _, num_in = parameters.shapes[f"conv_{name}"]
    parameters[f"conv_{name}"].copy_(draw_conv(num_out, num_in, generators))
    for tensors, kind, value in ((parameters, "scale", 1), (parameters, "shift", 0), (statistics, "mean", 0),
                                 (statistics, "variance", 1)):  # fmt: skip
        tensors[f"{kind}_{name}"].fill_(value)


def reset_head(parameters: Parameters, generators: Sequence[torch.Generator]) -> None:
    """Initialise the linear head in place, as torch.nn.Linear does."""
    num_classes, num_inputs = parameters.shapes["weight_head"]
    weight, bias = draw_linear(num_classes, num_inputs, generators)
    parameters["weight_head"].copy_(weight)
    parameters["bias_head"].copy_(bias)


def make_blocks(
    names: Sequence[str],
    blocks: Sequence[int],
    network: int,
    parameters: Parameters,
    gradient: Parameters,
    statistics: Parameters,
) -> list[ConvBlock]:
    """Return the blocks of one network. Their parameters, gradients and statistics are views of the given tensors.

    Args:
        names: for each layer, the suffix of the names of its tensors, for example "3" in conv_3.
        blocks: number of layers in each block.
        network: index of the network.
        parameters: parameters of all networks.
        gradient: gradients of the parameters of all networks.
        statistics: running statistics of all networks.
    """
    layers = []
    for name in names:
        own, d_own = (
            ConvTensors(*(tensors[f"{kind}_{name}"][network] for kind in ("conv", "scale", "shift")))
            for tensors in (parameters, gradient)
        )
        layers.append(ConvLayer(own, d_own, *(statistics[f"{kind}_{name}"][network] for kind in ("mean", "variance"))))
    ends = list(accumulate(blocks, initial=0))
    return [ConvBlock(layers[start:end]) for start, end in pairwise(ends)]


def conv_modules(name: str, network: int, parameters: Parameters, statistics: Parameters) -> list[nn.Module]:
    """Return the torch modules of one layer: convolution, batch normalisation and ReLU, with copies of the tensors.

    Args:
        name: suffix of the names of the tensors of this layer, for example "3" in conv_3.
        network: index of the network.
        parameters: parameters of all networks.
        statistics: running statistics of all networks.
    """
    weight = parameters[f"conv_{name}"][network].permute(0, 3, 1, 2)
    conv, norm = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1, bias=False), nn.BatchNorm2d(weight.shape[0])
    with torch.no_grad():
        conv.weight.copy_(weight)
        norm.weight.copy_(parameters[f"scale_{name}"][network])
        norm.bias.copy_(parameters[f"shift_{name}"][network])
        for kind, buffer in (("mean", norm.running_mean), ("variance", norm.running_var)):
            assert buffer is not None
            buffer.copy_(statistics[f"{kind}_{name}"][network])
    return [conv, norm, nn.ReLU()]
