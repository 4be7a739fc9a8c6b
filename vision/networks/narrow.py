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

import torch
from torch import Tensor

from vision.networks.compiled import load_or_warn
from vision.networks.conv import EPS, MOMENTUM, ConvLayer

SOURCE = Path(__file__).with_name("narrow.c")
MAX_CHANNELS = 16
"""Largest number of channels for which the C code narrow.c is faster than torch with one thread. narrow.c always uses
one thread. So if torch uses t threads, the limit is MAX_CHANNELS / t."""
C_TYPES = {torch.float32: "float", torch.float64: "double"}
"""Supported dtypes of the parameters. For each dtype: the C type with which the C code narrow.c is compiled."""


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


class NarrowBlock:
    """A block of one network, computed by the C code narrow.c: a sequence of convolutions, then max pooling.

    The block maps [b, s, s, C] to [b, s/2, s/2, D].

    Args:
        layers: the convolutional layers, in order.
    """

    def __init__(self, layers: Sequence[ConvLayer]):
        self._layers = list(layers)
        weight = layers[0].parameters.weight_D33C
        self._dtype, self._is_cpu = weight.dtype, weight.device.type == "cpu"
        self._widest = max(max(layer.parameters.weight_D33C.shape[::3]) for layer in layers)
        self._num_examples = 0
        self._saved: list[SavedLayer] = []

    def can_compute(self, x_bssC: Tensor) -> bool:
        """Return True if the C code narrow.c can compute the block for the input `x_bssC` and is faster than torch."""
        return (
            self._is_cpu
            and x_bssC.device.type == "cpu"
            and self._widest * torch.get_num_threads() <= MAX_CHANNELS
            and x_bssC.dtype is self._dtype
            and self._dtype in C_TYPES
            and load_or_warn(SOURCE, C_TYPES[self._dtype]) is not None
        )

    def forward(self, x_bssC: Tensor, training: bool = False) -> Tensor:
        """Return the output of the block, [b, s/2, s/2, D].

        Args:
            x_bssC: images or activations.
            training: if True, normalise with the statistics of the batch, update the running statistics, and save what
                `backward` needs. If False, normalise with the running statistics.

        Raises:
            ValueError: if the images are not square, have an odd side, or have the wrong number of channels.
            MemoryError: if the C code narrow.c cannot allocate its work buffers.
        """
        library, pointer, (num_examples, side, width, channels) = self._library(), self._pointer, x_bssC.shape
        if side != width or side % 2 or channels != self._layers[0].parameters.weight_D33C.shape[3]:
            raise ValueError(
                f"images of shape {list(x_bssC.shape[1:])} do not fit this block: both sides must be equal and even, "
                f"and the number of channels must be {self._layers[0].parameters.weight_D33C.shape[3]}"
            )
        # narrow.c computes a group of `lanes` examples at once, because a vector register holds `lanes` numbers. The
        # last group may be incomplete, so round up.
        lanes = library.alma_lanes()
        groups = -(-num_examples // lanes)
        b, s = c_long(num_examples), c_long(side)
        images = x_bssC.contiguous()
        z = images.new_empty(groups, side, side, channels, lanes)
        library.alma_pack(pointer(images), pointer(z), b, c_long(side * side), c_long(channels))
        norm: Tensor | None = None
        saved = []
        for layer in self._layers:
            parameters, layer_input, input_norm = layer.parameters, z, norm
            num_out = len(parameters.scale_D)
            z, norm = layer_input.new_empty(groups, side, side, num_out, lanes), layer_input.new_empty(4, num_out)
            failed = library.alma_conv_forward(
                pointer(layer_input), pointer(input_norm), pointer(parameters.weight_D33C),
                pointer(parameters.scale_D), pointer(parameters.shift_D), pointer(layer.mean_D),
                pointer(layer.variance_D), pointer(z), pointer(norm), b, s, c_long(layer_input.shape[3]),
                c_long(num_out), c_int(training), c_double(MOMENTUM), c_double(EPS),
            )  # fmt: skip
            _raise_if_failed(failed)
            if training:
                saved.append(SavedLayer(layer_input, input_norm, z, norm))
        out = images.new_empty(num_examples, side // 2, side // 2, num_out)
        library.alma_pool_forward(pointer(z), pointer(norm), pointer(out), b, s, c_long(num_out))
        if training:
            self._num_examples, self._saved = num_examples, saved
        return out

    def free_activations(self) -> None:
        """Free the tensors saved for `backward`."""
        self._saved = []

    def backward(self, dy_bssD: Tensor, wants_dx: bool = True) -> Tensor | None:
        """Write the gradients of the parameters to the field `gradient` of each layer.

        Args:
            dy_bssD: gradient with respect to the output of the last forward pass in training mode, [b, s/2, s/2, D].
            wants_dx: if True, return the gradient with respect to the input, [b, s, s, C]; else return None.

        Raises:
            ValueError: if the gradient does not have the shape of the output.
            MemoryError: if the C code narrow.c cannot allocate its work buffers.
        """
        assert self._saved, "backward needs a forward pass with training=True before it"
        library, pointer, last = self._library(), self._pointer, self._saved[-1]
        side, num_out = last.z_gssDl.shape[1], last.z_gssDl.shape[3]
        output_shape = (self._num_examples, side // 2, side // 2, num_out)
        if dy_bssD.shape != output_shape:
            raise ValueError(f"the gradient has shape {list(dy_bssD.shape)}, but the output has {list(output_shape)}")
        b, s = c_long(self._num_examples), c_long(side)
        # d is the gradient with respect to the output of the batch normalisation of a layer. alma_pool_backward
        # computes d for the last layer. Then each pass of the loop below computes d for the layer before. `sums`
        # contains, for each channel, the sum of d and the sum of d * (z - mean). Here z is the output of the
        # convolution, and `mean` is the mean of z. The backward pass of batch normalisation needs these sums.
        d, sums = torch.empty_like(last.z_gssDl), dy_bssD.new_empty(2 * num_out, dtype=torch.float64)
        dy_bssD = dy_bssD.contiguous()
        library.alma_pool_backward(
            pointer(dy_bssD), pointer(last.z_gssDl), pointer(last.norm_4D), pointer(d), _sums_pointer(sums), b, s,
            c_long(num_out),
        )  # fmt: skip
        for number in range(len(self._layers) - 1, -1, -1):
            layer, saved = self._layers[number], self._saved[number]
            channels, num_out = saved.input_gssCl.shape[3], saved.z_gssDl.shape[3]
            d_input = torch.empty_like(saved.input_gssCl) if number or wants_dx else None
            input_sums = dy_bssD.new_empty(2 * channels, dtype=torch.float64) if number else None
            gradient = layer.gradient
            failed = library.alma_conv_backward(
                pointer(d), _sums_pointer(sums), pointer(saved.z_gssDl), pointer(saved.norm_4D),
                pointer(saved.input_gssCl), pointer(saved.input_norm_4C), pointer(layer.parameters.weight_D33C),
                pointer(gradient.weight_D33C), pointer(gradient.scale_D), pointer(gradient.shift_D), pointer(d_input),
                _sums_pointer(input_sums), b, s, c_long(channels), c_long(num_out),
            )  # fmt: skip
            _raise_if_failed(failed)
            if number:
                assert d_input is not None and input_sums is not None
                d, sums = d_input, input_sums
        if not wants_dx:
            return None
        dx = dy_bssD.new_empty(self._num_examples, side, side, channels)
        library.alma_unpack(pointer(d_input), pointer(dx), b, c_long(side * side), c_long(channels))
        return dx

    def _library(self) -> CDLL:
        """Return the library compiled from the C code narrow.c. Call this only if `can_compute` returned True."""
        library = load_or_warn(SOURCE, C_TYPES[self._dtype])
        assert library is not None
        return library

    def _pointer(self, tensor: Tensor | None) -> c_void_p:
        """Return the address of the data of a tensor, or a null pointer for None.

        Raises:
            TypeError: if the tensor is not contiguous, is not on the CPU, or does not have the dtype of the parameters.
        """
        if tensor is None:
            return c_void_p(0)
        if tensor.dtype is not self._dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise TypeError(
                f"narrow.c needs a contiguous {self._dtype} tensor on the CPU, not {tensor.dtype} on {tensor.device} "
                f"with strides {tensor.stride()}"
            )
        return c_void_p(tensor.data_ptr())


def _sums_pointer(sums: Tensor | None) -> c_void_p:
    """Return the address of the data of `sums`, or a null pointer if `sums` is None.

    `NarrowBlock._pointer` cannot be used for this tensor: it accepts only tensors with the dtype of the parameters, but
    the sums over the pixels of a channel are always float64.
    """
    return c_void_p(0 if sums is None else sums.data_ptr())


def _raise_if_failed(failed: int) -> None:
    """Raise MemoryError if `failed`, the value that a function of the C code narrow.c returned, is not 0."""
    if failed:
        raise MemoryError("there is not enough memory for the work buffers of the C code narrow.c: use smaller batches")
