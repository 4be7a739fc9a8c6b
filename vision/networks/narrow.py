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


Running = tuple[Tensor, Tensor, float]
"""Running mean [D] and running variance [D] of a batch normalisation, which a forward pass in training mode updates in
place, and the weight of the current batch in them, as `momentum` in torch.nn.BatchNorm2d."""


def can_compute(x_bssC: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return True if narrow.c can compute a block and is faster than torch. See `NarrowBlock` for the arguments."""
    dtype, (_, side, width, channels) = x_bssC.dtype, x_bssC.shape
    widest = max(channels, *map(len, parameters))
    return (
        x_bssC.device.type == "cpu"
        and widest * torch.get_num_threads() <= MAX_CHANNELS
        and (side == width and side % 2 == 0)
        and dtype in C_TYPES
        and parameters[0].dtype is dtype
        and not torch.is_autocast_enabled("cpu")
        and load_or_warn(SOURCE, C_TYPES[dtype]) is not None
    )


class NarrowBlock(torch.autograd.Function):
    """A block of one network, computed by the C code narrow.c: convolutions with normalisation and ReLU, then pooling.

    The block maps [b, s, s, C] to [b, s/2, s/2, D]. Call `NarrowBlock.apply(x_bssC, running, training, *parameters)`,
    where `running` has the running statistics of each layer, and `parameters` are the weights of the convolution
    [D, 3, 3, C], scale [D] and shift [D] of each layer in turn. If `training` is True, the block normalises with the
    statistics of the batch and updates the running statistics. Otherwise, it normalises with the running statistics,
    and has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x_bssC: Tensor, running: Sequence[Running], training: bool, *parameters: Tensor) -> Tensor:
        """Return the output of the block, [b, s/2, s/2, D].

        Raises:
            ValueError: if the images are not square, have an odd side, or have the wrong number of channels.
            MemoryError: if the C code narrow.c cannot allocate its work buffers.
        """
        dtype, (num_examples, side, width, channels) = x_bssC.dtype, x_bssC.shape
        library = _library(dtype)
        if side != width or side % 2 or channels != parameters[0].shape[3]:
            raise ValueError(
                f"images of shape {list(x_bssC.shape[1:])} do not fit this block: both sides must be equal and even, "
                f"and the number of channels must be {parameters[0].shape[3]}"
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
        for number, (mean_D, variance_D, momentum) in enumerate(running):
            weight_D33C, scale_D, shift_D = parameters[3 * number : 3 * number + 3]
            layer_input, input_norm, num_out = z, norm, len(scale_D)
            z, norm = layer_input.new_empty(groups, side, side, num_out, lanes), layer_input.new_empty(4, num_out)
            tensors = (layer_input, input_norm, weight_D33C, scale_D, shift_D, mean_D, variance_D, z, norm)
            failed = library.alma_conv_forward(
                *(_pointer(tensor, dtype) for tensor in tensors), b, s, c_long(layer_input.shape[3]),
                c_long(num_out), c_int(training), c_double(momentum), c_double(EPS),
            )  # fmt: skip
            _raise_if_failed(failed)
            saved.append((layer_input, input_norm, z, norm))
        out = images.new_empty(num_examples, side // 2, side // 2, num_out)
        pointers = (_pointer(tensor, dtype) for tensor in (z, norm, out))
        library.alma_pool_forward(*pointers, b, s, c_long(num_out))
        if training:
            # For each layer: the input of the convolution and the norm that is applied to it first (None in the first
            # layer, whose input is that of the block), the output of the convolution and the norm that follows it. A
            # norm is a table of four rows: mean, factor (scale divided by standard deviation), shift, and inverse
            # standard deviation. These are neither inputs nor outputs of this function, so they can be stored directly.
            ctx.saved, ctx.parameters = saved, parameters
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the arguments of `forward`.

        Raises:
            ValueError: if the gradient does not have the shape of the output.
            MemoryError: if the C code narrow.c cannot allocate its work buffers.
        """
        (dy_bssD,), saved, dtype = grad_outputs, ctx.saved, grad_outputs[0].dtype
        library, (_, _, last_z, last_norm), num_examples = _library(dtype), saved[-1], len(dy_bssD)
        side, num_out = last_z.shape[1], last_z.shape[3]
        b, s = c_long(num_examples), c_long(side)
        # d is the gradient with respect to the output of the batch normalisation of a layer. alma_pool_backward
        # computes d for the last layer. Then each pass of the loop below computes d for the layer before. `sums`
        # contains, for each channel, the sum of d and the sum of d * (z - mean). Here z is the output of the
        # convolution, and `mean` is the mean of z. The backward pass of batch normalisation needs these sums.
        d, sums = torch.empty_like(last_z), dy_bssD.new_empty(2 * num_out, dtype=torch.float64)
        dy_bssD = dy_bssD.contiguous()
        pointers = (_pointer(tensor, dtype) for tensor in (dy_bssD, last_z, last_norm, d))
        library.alma_pool_backward(*pointers, _pointer(sums, torch.float64), b, s, c_long(num_out))
        gradients: list[Tensor] = []
        d_input: Tensor | None = None
        for number in range(len(saved) - 1, -1, -1):
            layer_input, input_norm, z, norm = saved[number]
            weight_D33C, *_ = parameters = ctx.parameters[3 * number : 3 * number + 3]
            channels, num_out = layer_input.shape[3], z.shape[3]
            d_input = torch.empty_like(layer_input) if number or ctx.needs_input_grad[0] else None
            input_sums = dy_bssD.new_empty(2 * channels, dtype=torch.float64) if number else None
            of_parameters = [torch.empty_like(parameter) for parameter in parameters]
            tensors = (z, norm, layer_input, input_norm, weight_D33C, *of_parameters, d_input)
            failed = library.alma_conv_backward(
                _pointer(d, dtype), _pointer(sums, torch.float64), *(_pointer(tensor, dtype) for tensor in tensors),
                _pointer(input_sums, torch.float64), b, s, c_long(channels), c_long(num_out),
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


def _raise_if_failed(failed: int) -> None:
    """Raise MemoryError if `failed`, the value that a function of the C code narrow.c returned, is not 0."""
    if failed:
        raise MemoryError("there is not enough memory for the work buffers of the C code narrow.c: use smaller batches")
