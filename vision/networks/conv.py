"""A 3 x 3 convolution with batch normalisation and ReLU, and max pooling: forward, and their gradients written out.

Images are [b, side, side, channels], channels last: convolutions of few channels are fastest so, and all the rest is
then a table of pixels, whose columns are channels. torch's own batch normalisation and pooling are slow on it when
channels are few (their loops run over them), so here tables are read in rows of a few hundred numbers, whatever the
number of channels: the factor of each channel is repeated to the length of such a row.

Shapes: b examples, s side of an image, C input and D output channels, n = b s s pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vision.networks.linear import through_relu

EPS = 1e-5
"""Added to variances, as torch.nn.BatchNorm2d does."""
MOMENTUM = 0.1
"""Share of a batch in the running statistics."""
DENSE = 128
"""Numbers of an image up to which its convolution is computed as one matrix product."""
ROW = 256
"""Numbers that are read at a time; more channels than that are a row of their own."""


@dataclass(frozen=True)
class ConvTensors:
    """Of one layer of one network: its parameters, or their gradients."""

    weight_D33C: Tensor
    scale_D: Tensor
    shift_D: Tensor


class ConvLayer:
    """relu(norm(conv(x))) of one network. The convolution has no bias: the norm would take it away.

    Args:
        parameters: of the layer.
        gradient: takes their gradients.
        mean_D: running mean, for testing.
        variance_D: running variance.
    """

    def __init__(self, parameters: ConvTensors, gradient: ConvTensors, mean_D: Tensor, variance_D: Tensor):
        self.parameters, self.gradient = parameters, gradient
        self.mean_D, self.variance_D = mean_D, variance_D
        self._weight_DC33 = parameters.weight_D33C.permute(0, 3, 1, 2)
        self._d_weight_DC33 = gradient.weight_D33C.permute(0, 3, 1, 2)
        self.compute_in = torch.float32
        """What products are computed in; everything else is in single precision (or the parameters' own)."""
        self._kept: tuple[Tensor, ...] = ()

    def forward(self, x_bssC: Tensor, training: bool = False) -> Tensor:
        """[b, s, s, D]. In training by the statistics of the batch, which the running ones follow."""
        if self.compute_in is torch.bfloat16:
            x_bssC = x_bssC.bfloat16()
        z_bssD = self._conv(x_bssC)
        rows, repeats = _rows(z_bssD)
        scale_D, shift_D = self.parameters.scale_D, self.parameters.shift_D
        if not training:
            factor_D = scale_D * (self.variance_D + EPS).rsqrt_()
            shift_D = torch.addcmul(shift_D, self.mean_D, factor_D, value=-1)
            return (
                torch.addcmul(_repeated(shift_D, repeats), rows, _repeated(factor_D, repeats))
                .relu_()
                .view(z_bssD.shape)
            )
        num_pixels = z_bssD.shape[:3].numel()
        mean_D = _sums(rows, repeats).div_(num_pixels)
        rows.sub_(_repeated(mean_D, repeats))
        variance_D = _sums(rows * rows, repeats).div_(num_pixels)
        self.mean_D.lerp_(mean_D, MOMENTUM)
        self.variance_D.lerp_(variance_D * (num_pixels / max(1, num_pixels - 1)), MOMENTUM)
        inverse_D = variance_D.add_(EPS).rsqrt_()
        factor_D = scale_D * inverse_D
        y = torch.addcmul(_repeated(shift_D, repeats), rows, _repeated(factor_D, repeats)).relu_()
        self._kept = (x_bssC, rows, y, inverse_D, factor_D)
        return y.view(z_bssD.shape)

    def forget(self) -> None:
        """Let go of what `backward` needed."""
        self._kept = ()

    def backward(self, dy_bssD: Tensor, wants_dx: bool = True) -> Tensor | None:
        """Fill the gradient of the parameters from that of the last training output; give that of the input."""
        x_bssC, centred, y, inverse_D, factor_D = self._kept
        repeats = centred.shape[1] // len(factor_D)
        dy = through_relu(dy_bssD.reshape(y.shape), y)
        d_shift_D, d_factor_D = _sums(dy, repeats), _sums(dy * centred, repeats)
        torch.mul(d_factor_D, inverse_D, out=self.gradient.scale_D)
        self.gradient.shift_D.copy_(d_shift_D)
        # Of what the convolution gave: dy less its mean and less its part along the centred values, times the factor.
        num_pixels = y.numel() // len(factor_D)
        of_centred_D = (d_factor_D * inverse_D.square()).mul_(factor_D).div_(-num_pixels)
        constant_D = d_shift_D.mul_(factor_D).div_(-num_pixels)
        dz = torch.addcmul(_repeated(constant_D, repeats), centred, _repeated(of_centred_D, repeats))
        dz.addcmul_(dy, _repeated(factor_D, repeats))
        return self._conv_backward(dz.view(dy_bssD.shape), x_bssC, wants_dx)

    def _conv(self, x_bssC: Tensor) -> Tensor:
        side, num_out, num_in = x_bssC.shape[1], *self._weight_DC33.shape[:2]
        if side * side * max(num_in, num_out) <= DENSE:
            dense = _dense_weight(self.parameters.weight_D33C.to(x_bssC.dtype), side)
            return (
                torch.mm(x_bssC.reshape(len(x_bssC), -1), dense.t())
                .to(self._weight_DC33.dtype)
                .view(len(x_bssC), side, side, num_out)
            )
        weight_DC33 = self._weight_DC33.to(x_bssC.dtype)
        z_bDss = torch.conv2d(x_bssC.permute(0, 3, 1, 2), weight_DC33, padding=1)
        return z_bDss.permute(0, 2, 3, 1).to(self._weight_DC33.dtype).contiguous()

    def _conv_backward(self, dz_bssD: Tensor, x_bssC: Tensor, wants_dx: bool) -> Tensor | None:
        dtype, own = x_bssC.dtype, dz_bssD.dtype
        side, num_out, num_in = x_bssC.shape[1], *self._weight_DC33.shape[:2]
        if side * side * max(num_in, num_out) <= DENSE:
            dz, x = dz_bssD.to(dtype).view(len(dz_bssD), -1), x_bssC.reshape(len(x_bssC), -1)
            padded = torch.cat([torch.mm(dz.t(), x).to(own).view(-1), dz.new_zeros(1, dtype=own)])
            entries = padded.index_select(0, _entries(side, num_out, num_in, x.device)).view(-1, side * side)
            self.gradient.weight_D33C.copy_(entries.sum(1).view(num_out, 3, 3, num_in))
            if not wants_dx:
                return None
            dense = _dense_weight(self.parameters.weight_D33C.to(dtype), side)
            return torch.mm(dz, dense).to(own).view(x_bssC.shape)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dz_bssD.to(dtype).permute(0, 3, 1, 2), x_bssC.permute(0, 3, 1, 2), self._weight_DC33.to(dtype), None,
            [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [wants_dx, True, False],
        )  # fmt: skip
        self._d_weight_DC33.copy_(dw)
        return dx.permute(0, 2, 3, 1).to(own) if wants_dx else None


class MaxPool:
    """The largest of 2 x 2 pixels: of each column's two, then of the two columns. Sides are even.

    Of equals the upper one takes the gradient, then the left one: where only two are equal that lie across from each
    other, torch.nn.MaxPool2d, which goes row by row, takes the other. Both are subgradients.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x_bssC: Tensor, training: bool = False) -> Tensor:
        """[b, s/2, s/2, C]."""
        num_examples, side, _, channels = x_bssC.shape
        half = side // 2
        # Columns first: rows of pixels are long, and on what is left the short ones cost half.
        twos = x_bssC.view(num_examples * half, 2, side * channels)
        upper, lower = twos[:, 0], twos[:, 1]
        tall = torch.maximum(upper, lower)
        pairs = tall.view(-1, 2, channels)
        left, right = pairs[:, 0], pairs[:, 1]
        if training:
            # As numbers, not as truth values: products with those are slower by far.
            is_upper = torch.ge(upper, lower, out=torch.empty_like(tall))
            self._kept = (is_upper, torch.ge(left, right, out=torch.empty_like(left)))
        return torch.maximum(left, right).view(num_examples, half, half, channels)

    def forget(self) -> None:
        """Let go of what `backward` needed."""
        self._kept = None

    def backward(self, dy_bssC: Tensor) -> Tensor:
        """The gradient of the input, [b, s, s, C]."""
        assert self._kept is not None
        is_upper, is_left = self._kept
        num_examples, half, _, channels = dy_bssC.shape
        dy = dy_bssC.reshape(is_left.shape)
        d_pairs = dy.new_empty(len(dy), 2, channels)
        d_left = dy * is_left
        d_pairs[:, 0] = d_left
        torch.sub(dy, d_left, out=d_pairs[:, 1])
        d_tall = d_pairs.view(is_upper.shape)
        d_twos = dy.new_empty(len(d_tall), 2, d_tall.shape[1])
        torch.mul(d_tall, is_upper, out=d_twos[:, 0])
        torch.sub(d_tall, d_twos[:, 0], out=d_twos[:, 1])
        return d_twos.view(num_examples, 2 * half, 2 * half, channels)


def draw_conv(num_out: int, num_in: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Weights [M, out, 3, 3, in] as torch.nn.Conv2d draws them: uniform in +-1/sqrt(9 in).

    Args:
        num_out: output channels.
        num_in: input channels.
        generators: one a network.
    """
    bound = (9 * num_in) ** -0.5
    weight = torch.stack([torch.rand(num_out, 3, 3, num_in, generator=generator) for generator in generators])
    return weight.mul_(2 * bound).sub_(bound)


@lru_cache(maxsize=1000)
def _places(side: int, num_out: int, num_in: int, device: torch.device) -> Tensor:
    """Of a convolution as a matrix [s s D, s s C]: which of its weights [D, 3, 3, C] each entry is; one past the
    last, where a pixel is not read.
    """
    at = torch.arange(side)
    offset = at - at[:, None] + 1  # of the pixel that is read, in the kernel: 0, 1, 2, or outside
    row, column = offset[:, None, None, :, None, None], offset[None, :, None, None, :, None]
    out = torch.arange(num_out)[None, None, :, None, None, None]
    inside = (row >= 0) & (row < 3) & (column >= 0) & (column < 3)
    index = ((out * 3 + row) * 3 + column) * num_in + torch.arange(num_in)
    return torch.where(inside, index, 9 * num_out * num_in).reshape(-1).to(device)


@lru_cache(maxsize=1000)
def _entries(side: int, num_out: int, num_in: int, device: torch.device) -> Tensor:
    """The other way: for each weight the entries that are it, s s of them or as many fewer as one past the last fill.
    A sum over them is the same on every machine, which adding up at places is not on a GPU.
    """
    places = _places(side, num_out, num_in, torch.device("cpu"))
    num_weights, num_places = 9 * num_out * num_in, side * side
    order = places.argsort(stable=True)
    counts = places.bincount(minlength=num_weights + 1)[:num_weights]
    firsts = counts.cumsum(0) - counts
    number = torch.arange(num_places)
    entry = order[(firsts[:, None] + number).clamp_max(len(order) - 1)]
    return torch.where(number < counts[:, None], entry, len(places)).reshape(-1).to(device)


def _dense_weight(weight_D33C: Tensor, side: int) -> Tensor:
    """The matrix [s s D, s s C] of a convolution."""
    num_out, _, _, num_in = weight_D33C.shape
    places = _places(side, num_out, num_in, weight_D33C.device)
    padded = torch.cat([weight_D33C.reshape(-1), weight_D33C.new_zeros(1)])
    return padded.index_select(0, places).view(side * side * num_out, side * side * num_in)


def _rows(table_bssD: Tensor) -> tuple[Tensor, int]:
    """The same numbers in rows of some pixels each, and how many pixels that is."""
    num_pixels, num_channels = table_bssD.shape[:3].numel(), table_bssD.shape[3]
    repeats = 1
    while 2 * repeats * num_channels <= ROW and num_pixels % (2 * repeats) == 0:
        repeats *= 2
    return table_bssD.view(-1, repeats * num_channels), repeats


def _repeated(value_D: Tensor, repeats: int) -> Tensor:
    """For each number of a row that of its channel."""
    return value_D.expand(repeats, -1).reshape(-1)


def _sums(rows: Tensor, repeats: int) -> Tensor:
    """Of each channel over all pixels."""
    return rows.sum(0).view(repeats, -1).sum(0)
