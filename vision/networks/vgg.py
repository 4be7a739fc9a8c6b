"""The reduced VGG19: 16 convolutions of 3 x 3 of c channels each, batch normalised, and a linear head.

Pooling follows convolutions 2, 4, 8, 12 and 16, so that an image of 32 x 32 ends as one pixel of c channels. It has
27c + 135c^2 + 32c + 10c + 10 parameters: the network of the Firefly paper's authors, whose convolutions have no bias.
The original ALMA code gives them one, which changes nothing that the network computes.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from vision.networks.block import ConvBlock
from vision.networks.conv import ConvLayer, ConvTensors, draw_conv
from vision.networks.parameters import Parameters, draw_linear
from vision.networks.plain import linear_of
from vision.networks.stack import Stack

BLOCKS = (2, 2, 4, 4, 4)
"""Convolutions before each pooling."""
SIDE = 32
"""Of an image: five poolings make it one pixel."""

# M networks, G groups of M / G that see the same examples, b examples, s side, C input and D output channels.


class VGGStack(Stack):
    """M networks of equal widths. Each is computed by itself: even of 4 channels a convolution is work, not overhead.

    Args:
        num_inputs: channels of an image.
        widths: of the convolutions, in order.
        blocks: how many convolutions there are before each pooling.
        parameters: conv_1 [M, D, 3, 3, C], scale_1 [M, D], shift_1 [M, D], ...; weight_head, bias_head.
        statistics: mean_1 [M, D], variance_1 [M, D], ...
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
        self.gradient = parameters.empty_like()
        self.examples_at_once = max(50, min(2000, 40_000 // max(widths)))
        names = [str(layer) for layer in range(1, len(self.widths) + 1)]
        self._blocks = [
            blocks_of(names, self.blocks, number, self.parameters, self.gradient, self.statistics)
            for number in range(len(self))
        ]
        self._head_inputs: list[Tensor] = []

    @classmethod
    def drawn(
        cls,
        num_inputs: int,
        widths: Sequence[int],
        num_classes: int,
        generators: Sequence[torch.Generator],
        device: torch.device,
        blocks: Sequence[int] = BLOCKS,
    ) -> "VGGStack":
        """Initialised as torch's modules are, one generator a network."""
        shapes: dict[str, tuple[int, ...]] = {}
        statistics: dict[str, tuple[int, ...]] = {}
        for layer, (num_in, num_out) in enumerate(pairwise([num_inputs, *widths]), start=1):
            add_conv_shapes(str(layer), num_in, num_out, shapes, statistics)
        shapes |= {"weight_head": (num_classes, widths[-1]), "bias_head": (num_classes,)}
        count = len(generators)
        stack = cls(num_inputs, widths, blocks, *(Parameters(s, count, device) for s in (shapes, statistics)))
        stack.draw(generators)
        return stack

    def draw(self, generators: Sequence[torch.Generator]) -> None:
        for layer in range(1, len(self.widths) + 1):
            draw_conv_layer(str(layer), self.parameters, self.statistics, generators)
        draw_head(self.parameters, generators)

    def compute_in(self, dtype: torch.dtype) -> None:
        for blocks in self._blocks:
            for block in blocks:
                block.compute_in(dtype)

    @property
    def plain_input_shape(self) -> tuple[int, ...]:
        return (self.num_inputs, SIDE, SIDE)

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        networks_per_group, logits, inputs = len(self) // len(x), [], []
        for number, blocks in enumerate(self._blocks):
            y = x[number // networks_per_group]
            for block in blocks:
                y = block.forward(y, training)
            y = y.reshape(len(y), -1)
            inputs.append(y)
            weight, bias = self.parameters["weight_head"][number], self.parameters["bias_head"][number]
            logits.append(torch.addmm(bias, y, weight.t()))
        if training:
            self._head_inputs = inputs
        return torch.stack(logits)

    def forget(self) -> None:
        self._head_inputs = []
        for blocks in self._blocks:
            for block in blocks:
                block.forget()

    def backward(self, d_logits_MbC: Tensor) -> None:
        for number, (blocks, x) in enumerate(zip(self._blocks, self._head_inputs, strict=True)):
            dy = d_logits_MbC[number]
            torch.mm(dy.t(), x, out=self.gradient["weight_head"][number])
            torch.sum(dy, 0, out=self.gradient["bias_head"][number])
            dx: Tensor | None = torch.mm(dy, self.parameters["weight_head"][number]).view(len(x), 1, 1, -1)
            for first in range(len(blocks) - 1, -1, -1):
                assert dx is not None
                dx = blocks[first].backward(dx, wants_dx=first > 0)

    def state(self) -> dict:
        return {
            "kind": "vgg",
            "num_inputs": self.num_inputs,
            "widths": self.widths,
            "blocks": self.blocks,
            "parameters": self.parameters.state(),
            "statistics": self.statistics.state(),
        }

    @classmethod
    def from_state(cls, state: dict, device: torch.device) -> "VGGStack":
        tensors = (Parameters.from_state(state[name], device) for name in ("parameters", "statistics"))
        return cls(state["num_inputs"], state["widths"], state["blocks"], *tensors)

    def plain(self, network: int) -> nn.Module:
        modules: list[nn.Module] = []
        ends = set(accumulate(self.blocks))
        for layer in range(1, len(self.widths) + 1):
            modules += plain_conv(str(layer), network, self.parameters, self.statistics)
            if layer in ends:
                modules.append(nn.MaxPool2d(2))
        return nn.Sequential(
            *modules,
            nn.Flatten(),
            linear_of(self.parameters["weight_head"][network], self.parameters["bias_head"][network]),
        )


def add_conv_shapes(
    name: str, num_in: int, num_out: int, shapes: dict[str, tuple[int, ...]], statistics: dict[str, tuple[int, ...]]
) -> None:
    """What a layer of that name is made of."""
    shapes |= {f"conv_{name}": (num_out, 3, 3, num_in), f"scale_{name}": (num_out,), f"shift_{name}": (num_out,)}
    statistics |= {f"mean_{name}": (num_out,), f"variance_{name}": (num_out,)}


def draw_conv_layer(
    name: str, parameters: Parameters, statistics: Parameters, generators: Sequence[torch.Generator]
) -> None:
    """A layer as torch initialises it: a random convolution, a norm that does nothing yet."""
    num_out, _, _, num_in = parameters.shapes[f"conv_{name}"]
    parameters[f"conv_{name}"].copy_(draw_conv(num_out, num_in, generators))
    for tensors, kind, value in ((parameters, "scale", 1), (parameters, "shift", 0), (statistics, "mean", 0),
                                 (statistics, "variance", 1)):  # fmt: skip
        tensors[f"{kind}_{name}"].fill_(value)


def draw_head(parameters: Parameters, generators: Sequence[torch.Generator]) -> None:
    """The linear head as torch initialises it."""
    num_classes, num_inputs = parameters.shapes["weight_head"]
    weight, bias = draw_linear(num_classes, num_inputs, generators)
    parameters["weight_head"].copy_(weight)
    parameters["bias_head"].copy_(bias)


def blocks_of(
    names: Sequence[str],
    blocks: Sequence[int],
    network: int,
    parameters: Parameters,
    gradient: Parameters,
    statistics: Parameters,
) -> list[ConvBlock]:
    """The layers of one network, in blocks."""
    layers = []
    for name in names:
        own, d_own = (
            ConvTensors(*(tensors[f"{kind}_{name}"][network] for kind in ("conv", "scale", "shift")))
            for tensors in (parameters, gradient)
        )
        layers.append(ConvLayer(own, d_own, *(statistics[f"{kind}_{name}"][network] for kind in ("mean", "variance"))))
    ends = list(accumulate(blocks, initial=0))
    return [ConvBlock(layers[start:end]) for start, end in pairwise(ends)]


def plain_conv(name: str, network: int, parameters: Parameters, statistics: Parameters) -> list[nn.Module]:
    """A layer as torch's own modules."""
    weight = parameters[f"conv_{name}"][network].permute(0, 3, 1, 2)
    conv, norm = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1, bias=False), nn.BatchNorm2d(weight.shape[0])
    with torch.no_grad():
        conv.weight.copy_(weight)
        norm.weight.copy_(parameters[f"scale_{name}"][network])
        norm.bias.copy_(parameters[f"shift_{name}"][network])
        for kind, into in (("mean", norm.running_mean), ("variance", norm.running_var)):
            assert into is not None
            into.copy_(statistics[f"{kind}_{name}"][network])
    return [conv, norm, nn.ReLU()]
