"""Compute a block of the VGG with few channels on a CPU, by the C code in narrow.c instead of torch operations.

torch's CPU convolutions fill a vector register with numbers of different channels. If a register holds eight numbers
and there are four channels, half of the register is empty. Also, the operations between the convolutions read and write
all activations, which takes as long as the convolutions. narrow.c fills vector registers with numbers of different
examples, and computes normalisation and ReLU within the next convolution.

Shapes: b examples, g groups of l examples (l is how many numbers fit into a vector register), s x s pixels of an image,
C input and D output channels.
"""

from collections.abc import Sequence
from ctypes import CDLL, c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision.compiled import load_or_warn

EPS = 1e-5
"""Small number that is added to variances before the square root is taken, as in torch.nn.BatchNorm2d."""
SOURCE = Path(__file__).with_name("narrow.c")
MAX_CHANNELS = 14
"""Largest number of channels for which the C code narrow.c is faster than torch with one thread. narrow.c always uses
one thread. So if torch uses t threads, the limit is MAX_CHANNELS / t."""
C_TYPES = {torch.float32: "float", torch.float64: "double"}
"""Supported dtypes of the parameters. For each dtype: the C type with which the C code narrow.c is compiled."""


@dataclass(frozen=True)
class NarrowLayer:
    """The tensors of one layer: a 3 x 3 convolution without bias, then batch normalisation."""

    weight_D33C: Tensor
    """Weights of the convolution."""
    scale_D: Tensor
    """Scale of the batch normalisation."""
    shift_D: Tensor
    """Shift of the batch normalisation."""
    mean_D: Tensor
    """Running mean of each channel. A forward pass in training mode updates it in place."""
    variance_D: Tensor
    """Running variance of each channel. A forward pass in training mode updates it in place."""
    momentum: float = 0.1
    """Weight of the current batch in the running statistics, as in torch.nn.BatchNorm2d."""


@dataclass(frozen=True)
class SavedLayer:
    """The tensors of one layer that the forward pass saves for the backward pass."""

    input_gssCl: Tensor
    """Input of the layer. In the first layer, this is the input of the block. In the other layers, it is the output of
    the convolution of the previous layer, before batch normalisation and ReLU."""
    input_norm_4C: Tensor | None
    """Batch normalisation of the previous layer: mean, factor, shift and inverse standard deviation, as in `norm_4D`.
    narrow.c applies this normalisation and ReLU to `input_gssCl` just before the convolution. None in the first layer
    of the block, which has no previous layer: its convolution reads `input_gssCl` without changes."""
    z_gssDl: Tensor
    """Output of the convolution, before batch normalisation."""
    norm_4D: Tensor
    """Batch normalisation of this layer, in four rows: mean, factor (scale divided by standard deviation), shift, and
    inverse standard deviation."""


def can_compute(x_bssC: Tensor, layers: Sequence[NarrowLayer]) -> bool:
    """Return True if the C code narrow.c can compute a block for the input `x_bssC` and is faster than torch."""
    dtype, (_, side, width, channels) = x_bssC.dtype, x_bssC.shape
    widest = max(channels, *(len(layer.scale_D) for layer in layers))
    return (
        x_bssC.device.type == "cpu"
        and widest * torch.get_num_threads() <= MAX_CHANNELS
        and (side == width and side % 2 == 0)
        and dtype in C_TYPES
        and layers[0].weight_D33C.dtype is dtype
        and not torch.is_autocast_enabled("cpu")
        and load_or_warn(SOURCE, C_TYPES[dtype]) is not None
    )


class NarrowBlock(torch.autograd.Function):
    """A block of one network, computed by the C code narrow.c: convolutions with normalisation and ReLU, then pooling.

    The block maps [b, s, s, C] to [b, s/2, s/2, D]. Call `NarrowBlock.apply(x_bssC, layers, training, *parameters)`,
    where `parameters` are the weight_D33C, scale_D and shift_D of each layer in `layers`, in this order, so that
    autograd sees them. If `training` is True, the block normalises with the statistics of the batch and updates the
    running statistics. Otherwise, it normalises with the running statistics, and has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x_bssC: Tensor, layers: Sequence[NarrowLayer], training: bool, *parameters: Tensor) -> Tensor:
        """Return the output of the block, [b, s/2, s/2, D].

        Raises:
            ValueError: if the images are not square, have an odd side, or have the wrong number of channels.
            MemoryError: if the C code narrow.c cannot allocate its work buffers.
        """
        dtype, (num_examples, side, width, channels) = x_bssC.dtype, x_bssC.shape
        library = _library(dtype)
        if side != width or side % 2 or channels != layers[0].weight_D33C.shape[3]:
            raise ValueError(
                f"images of shape {list(x_bssC.shape[1:])} do not fit this block: both sides must be equal and even, "
                f"and the number of channels must be {layers[0].weight_D33C.shape[3]}"
            )
        # narrow.c computes a group of `lanes` examples at once, because a vector register holds `lanes` numbers. The
        # last group may be incomplete, so round up.
        lanes = library.alma_lanes()
        groups = -(-num_examples // lanes)
        b, s = c_long(num_examples), c_long(side)
        images = x_bssC.contiguous()
        z = images.new_empty(groups, side, side, channels, lanes)
        library.alma_pack(_pointer(images, dtype), _pointer(z, dtype), b, c_long(side * side), c_long(channels))
        norm: Tensor | None = None
        saved = []
        for layer in layers:
            layer_input, input_norm = z, norm
            num_out = len(layer.scale_D)
            z, norm = layer_input.new_empty(groups, side, side, num_out, lanes), layer_input.new_empty(4, num_out)
            tensors = (layer_input, input_norm, layer.weight_D33C, layer.scale_D, layer.shift_D, layer.mean_D,
                       layer.variance_D, z, norm)  # fmt: skip
            failed = library.alma_conv_forward(
                *(_pointer(tensor, dtype) for tensor in tensors), b, s, c_long(layer_input.shape[3]),
                c_long(num_out), c_int(training), c_double(layer.momentum), c_double(EPS),
            )  # fmt: skip
            _raise_if_failed(failed)
            saved.append(SavedLayer(layer_input, input_norm, z, norm))
        out = images.new_empty(num_examples, side // 2, side // 2, num_out)
        pointers = (_pointer(tensor, dtype) for tensor in (z, norm, out))
        library.alma_pool_forward(*pointers, b, s, c_long(num_out))
        if training:
            # The saved tensors are neither inputs nor outputs of this function, so they can be stored directly.
            ctx.saved, ctx.layers = saved, layers
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the arguments of `forward`.

        Raises:
            ValueError: if the gradient does not have the shape of the output.
            MemoryError: if the C code narrow.c cannot allocate its work buffers.
        """
        (dy_bssD,), saved, layers, dtype = grad_outputs, ctx.saved, ctx.layers, grad_outputs[0].dtype
        library, last, num_examples = _library(dtype), saved[-1], len(dy_bssD)
        side, num_out = last.z_gssDl.shape[1], last.z_gssDl.shape[3]
        b, s = c_long(num_examples), c_long(side)
        # d is the gradient with respect to the output of the batch normalisation of a layer. alma_pool_backward
        # computes d for the last layer. Then each pass of the loop below computes d for the layer before. `sums`
        # contains, for each channel, the sum of d and the sum of d * (z - mean). Here z is the output of the
        # convolution, and `mean` is the mean of z. The backward pass of batch normalisation needs these sums.
        d, sums = torch.empty_like(last.z_gssDl), dy_bssD.new_empty(2 * num_out, dtype=torch.float64)
        dy_bssD = dy_bssD.contiguous()
        pointers = (_pointer(tensor, dtype) for tensor in (dy_bssD, last.z_gssDl, last.norm_4D, d))
        library.alma_pool_backward(*pointers, _sums_pointer(sums), b, s, c_long(num_out))
        gradients: list[Tensor] = []
        d_input: Tensor | None = None
        for number in range(len(layers) - 1, -1, -1):
            layer, of_layer = layers[number], saved[number]
            channels, num_out = of_layer.input_gssCl.shape[3], of_layer.z_gssDl.shape[3]
            d_input = torch.empty_like(of_layer.input_gssCl) if number or ctx.needs_input_grad[0] else None
            input_sums = dy_bssD.new_empty(2 * channels, dtype=torch.float64) if number else None
            of_parameters = [torch.empty_like(p) for p in (layer.weight_D33C, layer.scale_D, layer.shift_D)]
            inputs = (of_layer.z_gssDl, of_layer.norm_4D, of_layer.input_gssCl, of_layer.input_norm_4C,
                      layer.weight_D33C, *of_parameters, d_input)  # fmt: skip
            failed = library.alma_conv_backward(
                _pointer(d, dtype), _sums_pointer(sums), *(_pointer(tensor, dtype) for tensor in inputs),
                _sums_pointer(input_sums), b, s, c_long(channels), c_long(num_out),
            )  # fmt: skip
            _raise_if_failed(failed)
            gradients = [*of_parameters, *gradients]
            if number:
                assert d_input is not None and input_sums is not None
                d, sums = d_input, input_sums
        dx: Tensor | None = None
        if d_input is not None:
            dx = dy_bssD.new_empty(num_examples, side, side, channels)
            library.alma_unpack(_pointer(d_input, dtype), _pointer(dx, dtype), b, c_long(side * side), c_long(channels))
        return dx, None, None, *gradients


def _library(dtype: torch.dtype) -> CDLL:
    """Return the library compiled from the C code narrow.c. Call this only if `can_compute` returned True."""
    library = load_or_warn(SOURCE, C_TYPES[dtype])
    assert library is not None
    return library


def _pointer(tensor: Tensor | None, dtype: torch.dtype) -> c_void_p:
    """Return the address of the data of a tensor, or a null pointer for None."""
    if tensor is None:
        return c_void_p(0)
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise TypeError(
            f"narrow.c needs a contiguous {dtype} tensor on the CPU, not {tensor.dtype} on {tensor.device} "
            f"with strides {tensor.stride()}"
        )
    return c_void_p(tensor.data_ptr())


def _sums_pointer(sums: Tensor | None) -> c_void_p:
    """Return the address of the data of `sums`, or a null pointer if `sums` is None."""
    return c_void_p(0 if sums is None else sums.data_ptr())


def _raise_if_failed(failed: int) -> None:
    """Raise MemoryError if `failed`, the value that a function of the C code narrow.c returned, is not 0."""
    if failed:
        raise MemoryError("there is not enough memory for the work buffers of the C code narrow.c: use smaller batches")
