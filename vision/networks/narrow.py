"""A block of few channels on a CPU: the kernels of narrow.c in place of torch's convolutions.

torch's convolutions on a CPU fill a vector with channels: with four of them half of it is empty, and what is between
the convolutions, in passes over all the memory, costs as much again. narrow.c fills it with examples.
"""

from collections.abc import Sequence
from ctypes import CDLL, c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vision.networks.compiled import kernels
from vision.networks.conv import EPS, MOMENTUM, ConvLayer

SOURCE = Path(__file__).with_name("narrow.c")
NARROW = 16
"""Channels up to which narrow.c is the faster, on one thread: torch's convolutions can use more."""
TYPES = {torch.float32: "float", torch.float64: "double"}

# g groups of l examples (as many as a vector holds numbers), s side of an image, C input and D output channels.


@dataclass(frozen=True)
class Pass:
    """What the backward pass needs of a layer."""

    input_gssCl: Tensor
    below_4C: Tensor | None
    """The norm of the layer whose z the input is; None where the input is images."""
    z_gssDl: Tensor
    norm_4D: Tensor


class NarrowBlock:
    """Convolutions, one after the other, and max pooling: [b, s, s, C] to [b, s/2, s/2, D], as ConvBlock.

    Args:
        layers: of one network.
    """

    def __init__(self, layers: Sequence[ConvLayer]):
        self._layers = list(layers)
        weight = layers[0].parameters.weight_D33C
        self._dtype, self._is_cpu = weight.dtype, weight.device.type == "cpu"
        self._widest = max(max(layer.parameters.weight_D33C.shape[::3]) for layer in layers)
        self._num_examples = 0
        self._kept: list[Pass] = []

    def takes(self, x_bssC: Tensor) -> bool:
        """Whether it computes these, and is the way to do so."""
        return (
            self._is_cpu
            and x_bssC.device.type == "cpu"
            and self._widest * torch.get_num_threads() <= NARROW
            and x_bssC.dtype is self._dtype
            and self._dtype in TYPES
            and kernels(SOURCE, TYPES[self._dtype]) is not None
        )

    def forward(self, x_bssC: Tensor, training: bool = False) -> Tensor:
        """[b, s/2, s/2, D]. In training by the statistics of the batch, which the running ones follow."""
        library, at, (num_examples, side, also_side, channels) = self._library(), self._at, x_bssC.shape
        if side != also_side or side % 2 or channels != self._layers[0].parameters.weight_D33C.shape[3]:
            raise ValueError(f"images of {list(x_bssC.shape[1:])} do not fit this block: sides are equal and even")
        lanes = library.alma_lanes()
        groups = -(-num_examples // lanes)
        b, s = c_long(num_examples), c_long(side)
        images = x_bssC.contiguous()
        z = images.new_empty(groups, side, side, channels, lanes)
        library.alma_pack(at(images), at(z), b, c_long(side * side), c_long(channels))
        norm: Tensor | None = None
        passes = []
        for layer in self._layers:
            parameters, of_input, below = layer.parameters, z, norm
            width = len(parameters.scale_D)
            z, norm = of_input.new_empty(groups, side, side, width, lanes), of_input.new_empty(4, width)
            failed = library.alma_conv_forward(
                at(of_input), at(below), at(parameters.weight_D33C), at(parameters.scale_D),
                at(parameters.shift_D), at(layer.mean_D), at(layer.variance_D), at(z), at(norm), b, s,
                c_long(of_input.shape[3]), c_long(width), c_int(training), c_double(MOMENTUM), c_double(EPS),
            )  # fmt: skip
            _check(failed)
            if training:
                passes.append(Pass(of_input, below, z, norm))
        out = images.new_empty(num_examples, side // 2, side // 2, width)
        library.alma_pool_forward(at(z), at(norm), at(out), b, s, c_long(width))
        if training:
            self._num_examples, self._kept = num_examples, passes
        return out

    def forget(self) -> None:
        """Let go of what `backward` needed."""
        self._kept = []

    def backward(self, dy_bssD: Tensor, wants_dx: bool = True) -> Tensor | None:
        """Fill the gradients of all layers; give that of the input, where it is wanted."""
        assert self._kept, "there was no pass in training"
        library, at, last = self._library(), self._at, self._kept[-1]
        side, width = last.z_gssDl.shape[1], last.z_gssDl.shape[3]
        if dy_bssD.shape != (self._num_examples, side // 2, side // 2, width):
            raise ValueError(f"a gradient of {list(dy_bssD.shape)} is not of what this block gave")
        b, s = c_long(self._num_examples), c_long(side)
        d, sums = torch.empty_like(last.z_gssDl), dy_bssD.new_empty(2 * width, dtype=torch.float64)
        dy_bssD = dy_bssD.contiguous()
        library.alma_pool_backward(
            at(dy_bssD), at(last.z_gssDl), at(last.norm_4D), at(d), _sums_at(sums), b, s, c_long(width)
        )
        for number in range(len(self._layers) - 1, -1, -1):
            layer, kept = self._layers[number], self._kept[number]
            channels, width = kept.input_gssCl.shape[3], kept.z_gssDl.shape[3]
            d_input = torch.empty_like(kept.input_gssCl) if number or wants_dx else None
            sums_below = dy_bssD.new_empty(2 * channels, dtype=torch.float64) if number else None
            gradient = layer.gradient
            failed = library.alma_conv_backward(
                at(d), _sums_at(sums), at(kept.z_gssDl), at(kept.norm_4D), at(kept.input_gssCl), at(kept.below_4C),
                at(layer.parameters.weight_D33C), at(gradient.weight_D33C), at(gradient.scale_D),
                at(gradient.shift_D), at(d_input), _sums_at(sums_below), b, s, c_long(channels), c_long(width),
            )  # fmt: skip
            _check(failed)
            if number:
                assert d_input is not None and sums_below is not None
                d, sums = d_input, sums_below
        if not wants_dx:
            return None
        dx = dy_bssD.new_empty(self._num_examples, side, side, channels)
        library.alma_unpack(at(d_input), at(dx), b, c_long(side * side), c_long(channels))
        return dx

    def _library(self) -> CDLL:
        library = kernels(SOURCE, TYPES[self._dtype])
        assert library is not None
        return library

    def _at(self, tensor: Tensor | None) -> c_void_p:
        """Where numbers lie, one after the other.

        Raises:
            TypeError: they are not what narrow.c would read.
        """
        if tensor is None:
            return c_void_p(0)
        if tensor.dtype is not self._dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise TypeError(f"narrow.c wants contiguous {self._dtype} on the CPU, not {tensor.dtype}, {tensor.device}")
        return c_void_p(tensor.data_ptr())


def _sums_at(sums: Tensor | None) -> c_void_p:
    """Sums of channels, in double precision whatever the block is computed in."""
    return c_void_p(0 if sums is None else sums.data_ptr())


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("of the rooms in which narrow.c computes a group of images")
