"""A 3 x 3 convolution with batch normalisation and ReLU, and max pooling: forward passes and hand-written gradients.

Images have the shape [b, s, s, C] (channels last), because convolutions with few channels are fastest in this format.
All operations except the convolution see the images as a table with one row per pixel and one column per channel. If
there are few channels, the batch normalisation and the pooling of torch are slow on such a table, because torch's inner
loops run over channels and are then short. So this module views the table with longer rows: a row contains several
pixels, up to ROW_LENGTH numbers in all. A value per channel, such as a scale, is repeated for each pixel of a row.

Shapes: b examples, s x s pixels of an image, C input and D output channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vision.networks.linear import relu_backward

EPS = 1e-5
"""Small number that is added to variances before the square root is taken, as in torch.nn.BatchNorm2d."""
MOMENTUM = 0.1
"""Weight of the current batch in the running statistics, as in torch.nn.BatchNorm2d."""
MAX_DENSE_SIZE = 128
"""A convolution of images of at most this size is computed as one matrix product. The size is the number of pixels
times the number of channels. If the numbers of input and output channels differ, the larger number is used."""
ROW_LENGTH = 256
"""This module views images as a table. ROW_LENGTH is the largest number of values in a row of the table. A row contains
several pixels, or a single pixel if the pixel has more channels than ROW_LENGTH."""


@dataclass(frozen=True)
class ConvTensors:
    """The parameters of one layer of one network, or their gradients."""

    weight_D33C: Tensor
    """Weights of the convolution."""
    scale_D: Tensor
    """Scale of the batch normalisation, one number per channel. The normalised channel is multiplied by it."""
    shift_D: Tensor
    """Shift of the batch normalisation, one number per channel. It is added after the multiplication by `scale_D`."""


class ConvLayer:
    """One layer relu(norm(conv(x))) of one network, where norm is batch normalisation.

    The convolution has no bias. The norm would remove a bias, because it subtracts the mean of each channel.

    Args:
        parameters: parameters of the layer.
        gradient: `backward` writes the gradients of the parameters here.
        mean_D: running mean of each channel, used in evaluation. Training updates it in place.
        variance_D: running variance of each channel, used in evaluation. Training updates it in place.
    """

    def __init__(self, parameters: ConvTensors, gradient: ConvTensors, mean_D: Tensor, variance_D: Tensor):
        self.parameters, self.gradient = parameters, gradient
        self.mean_D, self.variance_D = mean_D, variance_D
        self._weight_DC33 = parameters.weight_D33C.permute(0, 3, 1, 2)
        self._d_weight_DC33 = gradient.weight_D33C.permute(0, 3, 1, 2)
        self.compute_dtype = torch.float32
        """Dtype of the convolution, float32 or bfloat16. All other operations use the dtype of the parameters."""
        self._saved: tuple[Tensor, ...] = ()

    def forward(self, x_bssC: Tensor, training: bool = False) -> Tensor:
        """Return the output, [b, s, s, D].

        Args:
            x_bssC: images or activations.
            training: if True, normalise with the statistics of the batch, update the running statistics, and save what
                `backward` needs. If False, normalise with the running statistics.
        """
        if self.compute_dtype is torch.bfloat16:
            x_bssC = x_bssC.bfloat16()
        z_bssD = self._conv(x_bssC)
        rows, repeats = _rows(z_bssD)
        scale_D, shift_D = self.parameters.scale_D, self.parameters.shift_D
        if not training:
            factor_D = scale_D * (self.variance_D + EPS).rsqrt_()
            shift_D = torch.addcmul(shift_D, self.mean_D, factor_D, value=-1)
            return torch.addcmul(_repeat(shift_D, repeats), rows, _repeat(factor_D, repeats)).relu_().view(z_bssD.shape)
        num_pixels = z_bssD.shape[:3].numel()
        mean_D = _channel_sums(rows, repeats).div_(num_pixels)
        rows.sub_(_repeat(mean_D, repeats))
        variance_D = _channel_sums(rows * rows, repeats).div_(num_pixels)
        self.mean_D.lerp_(mean_D, MOMENTUM)
        self.variance_D.lerp_(variance_D * (num_pixels / max(1, num_pixels - 1)), MOMENTUM)
        inverse_D = variance_D.add_(EPS).rsqrt_()
        factor_D = scale_D * inverse_D
        y = torch.addcmul(_repeat(shift_D, repeats), rows, _repeat(factor_D, repeats)).relu_()
        self._saved = (x_bssC, rows, y, inverse_D, factor_D)
        return y.view(z_bssD.shape)

    def free_activations(self) -> None:
        """Free the tensors saved for `backward`."""
        self._saved = ()

    def backward(self, dy_bssD: Tensor, wants_dx: bool = True) -> Tensor | None:
        """Write the gradients of the parameters to the field `gradient`.

        Args:
            dy_bssD: gradient with respect to the output of the last forward pass in training mode.
            wants_dx: if True, return the gradient with respect to the input, [b, s, s, C]; else return None.
        """
        x_bssC, centred, y, inverse_D, factor_D = self._saved
        repeats = centred.shape[1] // len(factor_D)
        dy = relu_backward(dy_bssD.reshape(y.shape), y)
        d_shift_D, d_factor_D = _channel_sums(dy, repeats), _channel_sums(dy * centred, repeats)
        torch.mul(d_factor_D, inverse_D, out=self.gradient.scale_D)
        self.gradient.shift_D.copy_(d_shift_D)
        # The gradient with respect to the output of the convolution is
        # (dy - mean of dy - projection of dy on `centred`) * factor, with factor = scale / standard deviation.
        # `centred` is the output of the convolution minus the mean of each channel. The projection is `centred` times
        # one number per channel. So the gradient is dy * factor + centred * slope + constant, with one slope and one
        # constant per channel. Compute it in this form, because it needs only two operations on large tensors.
        num_pixels = y.numel() // len(factor_D)
        slope_D = (d_factor_D * inverse_D.square()).mul_(factor_D).div_(-num_pixels)
        constant_D = d_shift_D.mul_(factor_D).div_(-num_pixels)
        dz = torch.addcmul(_repeat(constant_D, repeats), centred, _repeat(slope_D, repeats))
        dz.addcmul_(dy, _repeat(factor_D, repeats))
        return self._conv_backward(dz.view(dy_bssD.shape), x_bssC, wants_dx)

    def _conv(self, x_bssC: Tensor) -> Tensor:
        """Return the output of the convolution, [b, s, s, D], in the dtype of the parameters.

        For small images (see MAX_DENSE_SIZE), the convolution is computed as a product with the matrix that
        `_dense_weight` returns.
        """
        side, num_out, num_in = x_bssC.shape[1], *self._weight_DC33.shape[:2]
        if side * side * max(num_in, num_out) <= MAX_DENSE_SIZE:
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
        """Write the gradient of the weights to `gradient`, and return the gradient with respect to the input.

        Args:
            dz_bssD: gradient with respect to the output of the convolution.
            x_bssC: input of the convolution.
            wants_dx: if False, return None.
        """
        dtype, own_dtype = x_bssC.dtype, dz_bssD.dtype
        side, num_out, num_in = x_bssC.shape[1], *self._weight_DC33.shape[:2]
        if side * side * max(num_in, num_out) <= MAX_DENSE_SIZE:
            dz, x = dz_bssD.to(dtype).view(len(dz_bssD), -1), x_bssC.reshape(len(x_bssC), -1)
            padded = torch.cat([torch.mm(dz.t(), x).to(own_dtype).view(-1), dz.new_zeros(1, dtype=own_dtype)])
            entries = padded.index_select(0, _entries_of_weights(side, num_out, num_in, x.device))
            self.gradient.weight_D33C.copy_(entries.view(-1, side * side).sum(1).view(num_out, 3, 3, num_in))
            if not wants_dx:
                return None
            dense = _dense_weight(self.parameters.weight_D33C.to(dtype), side)
            return torch.mm(dz, dense).to(own_dtype).view(x_bssC.shape)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dz_bssD.to(dtype).permute(0, 3, 1, 2), x_bssC.permute(0, 3, 1, 2), self._weight_DC33.to(dtype), None,
            [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [wants_dx, True, False],
        )  # fmt: skip
        self._d_weight_DC33.copy_(dw)
        return dx.permute(0, 2, 3, 1).to(own_dtype) if wants_dx else None


class MaxPool:
    """2 x 2 max pooling of images with even sides: the maximum of each square of two rows and two columns.

    The rows are compared first, then the columns. If two compared pixels are equal, the gradient goes to the upper one
    (rows) or to the left one (columns). torch.nn.MaxPool2d compares the pixels in a different order. So if the maximum
    occurs at two diagonal neighbours, torch may send the gradient to one of the two pixels, and this class to the other
    pixel. Both gradients are valid subgradients.
    """

    def __init__(self) -> None:
        self._saved: tuple[Tensor, Tensor] | None = None

    def forward(self, x_bssC: Tensor, training: bool = False) -> Tensor:
        """Return the pooled images, [b, s/2, s/2, C].

        Args:
            x_bssC: images or activations.
            training: if True, save what `backward` needs.
        """
        num_examples, side, _, channels = x_bssC.shape
        half = side // 2
        # Take the maximum of each pair of rows first, then the maximum of each pair of columns. The step for rows is
        # fast, because a row is a long contiguous block of numbers. The step for columns is slow, because its
        # contiguous blocks are single pixels with few channels. After the step for rows, only half of the numbers are
        # left for the slow step.
        row_pairs = x_bssC.view(num_examples * half, 2, side * channels)
        upper, lower = row_pairs[:, 0], row_pairs[:, 1]
        larger_row = torch.maximum(upper, lower)
        pixel_pairs = larger_row.view(-1, 2, channels)
        left, right = pixel_pairs[:, 0], pixel_pairs[:, 1]
        if training:
            # Store the results of the comparisons as floats (1 or 0), because products with bools are much slower.
            is_upper = torch.ge(upper, lower, out=torch.empty_like(larger_row))
            self._saved = (is_upper, torch.ge(left, right, out=torch.empty_like(left)))
        return torch.maximum(left, right).view(num_examples, half, half, channels)

    def free_activations(self) -> None:
        """Free the tensors saved for `backward`."""
        self._saved = None

    def backward(self, dy_bssC: Tensor) -> Tensor:
        """Return the gradient with respect to the input, [b, s, s, C].

        Args:
            dy_bssC: gradient with respect to the output of the last forward pass in training mode, [b, s/2, s/2, C].
        """
        assert self._saved is not None
        is_upper, is_left = self._saved
        num_examples, half, _, channels = dy_bssC.shape
        dy = dy_bssC.reshape(is_left.shape)
        d_pixel_pairs = dy.new_empty(len(dy), 2, channels)
        d_left = dy * is_left
        d_pixel_pairs[:, 0] = d_left
        torch.sub(dy, d_left, out=d_pixel_pairs[:, 1])
        d_larger_row = d_pixel_pairs.view(is_upper.shape)
        d_row_pairs = dy.new_empty(len(d_larger_row), 2, d_larger_row.shape[1])
        torch.mul(d_larger_row, is_upper, out=d_row_pairs[:, 0])
        torch.sub(d_larger_row, d_row_pairs[:, 0], out=d_row_pairs[:, 1])
        return d_row_pairs.view(num_examples, 2 * half, 2 * half, channels)


def draw_conv(num_out: int, num_in: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Return weights [M, out, 3, 3, in] for M networks, with the random initialisation of torch.nn.Conv2d.

    The weights are uniform between -1/sqrt(9 in) and 1/sqrt(9 in).

    Args:
        num_out: number of output channels.
        num_in: number of input channels.
        generators: random generators, one per network.
    """
    bound = (9 * num_in) ** -0.5
    weight = torch.stack([torch.rand(num_out, 3, 3, num_in, generator=generator) for generator in generators])
    return weight.mul_(2 * bound).sub_(bound)


@lru_cache(maxsize=1000)
def _weights_of_entries(side: int, num_out: int, num_in: int, device: torch.device) -> Tensor:
    """Return, for each entry of the matrix of a convolution, the index of the weight to which the entry is equal.

    The product of this matrix with a flattened image is the output of the convolution. `_dense_weight` returns the
    matrix. The matrix and the weights [D, 3, 3, C] are flattened. So the result contains one index per entry,
    [s*s*D*s*s*C], and an index refers to the flattened weights.

    Each row of the matrix belongs to one output pixel and channel, each column to one input pixel and channel. If the
    input pixel is outside the 3 x 3 pixels that the output pixel depends on, the entry must be 0. In this case
    the result contains the index 9*D*C, which is one more than the largest index of a weight. `_dense_weight` appends a
    0 to the flattened weights, so this index points to the 0.
    """
    positions = torch.arange(side)
    # offset[i, j] is the index of the kernel row that connects output row i to input row j. The kernel has the rows 0,
    # 1 and 2. If offset[i, j] is not 0, 1 or 2, output row i does not depend on input row j. The offsets of columns are
    # equal to the offsets of rows.
    offset = positions - positions[:, None] + 1
    row, column = offset[:, None, None, :, None, None], offset[None, :, None, None, :, None]
    out = torch.arange(num_out)[None, None, :, None, None, None]
    inside = (row >= 0) & (row < 3) & (column >= 0) & (column < 3)
    index = ((out * 3 + row) * 3 + column) * num_in + torch.arange(num_in)
    return torch.where(inside, index, 9 * num_out * num_in).reshape(-1).to(device)


@lru_cache(maxsize=1000)
def _entries_of_weights(side: int, num_out: int, num_in: int, device: torch.device) -> Tensor:
    """Return, for each weight of a convolution, the indices of the entries of a matrix that contain the weight.

    The product of this matrix with a flattened image is the output of the convolution. `_dense_weight` returns the
    matrix. It has P = s*s*D*s*s*C entries, and an index refers to the flattened matrix.

    A weight occurs in at most s*s entries. So the result contains s*s indices for each weight, [9*D*C*s*s]. If a weight
    occurs in fewer entries, its list of indices is filled up with P. No entry has the index P. `_conv_backward` appends
    a 0 to the flattened gradient of the matrix, so the index P points to this 0.

    The gradient of a weight is the sum of the gradients of the entries in which the weight occurs. With the indices,
    `_conv_backward` adds these gradients in a fixed order, so the result is reproducible. A scatter-add on a GPU would
    add them in a random order.
    """
    weights = _weights_of_entries(side, num_out, num_in, torch.device("cpu"))
    num_weights, max_entries = 9 * num_out * num_in, side * side
    order = weights.argsort(stable=True)
    counts = weights.bincount(minlength=num_weights + 1)[:num_weights]
    firsts = counts.cumsum(0) - counts
    number = torch.arange(max_entries)
    entry = order[(firsts[:, None] + number).clamp_max(len(order) - 1)]
    return torch.where(number < counts[:, None], entry, len(weights)).reshape(-1).to(device)


def _dense_weight(weight_D33C: Tensor, side: int) -> Tensor:
    """Return the matrix of a convolution: it maps a flattened image to the flattened output of the convolution.

    The shape of the matrix is [s*s*D, s*s*C]. An image has s*s*C values and the output has s*s*D values.

    Args:
        weight_D33C: weights of the convolution.
        side: side of the image in pixels, s.
    """
    num_out, _, _, num_in = weight_D33C.shape
    weights = _weights_of_entries(side, num_out, num_in, weight_D33C.device)
    padded = torch.cat([weight_D33C.reshape(-1), weight_D33C.new_zeros(1)])
    return padded.index_select(0, weights).view(side * side * num_out, side * side * num_in)


def _rows(table_bssD: Tensor) -> tuple[Tensor, int]:
    """Return (matrix, p): the values of the images as a matrix in which each row holds p neighbouring pixels, and p.

    A matrix with one pixel in each row would have short rows, which are slower to process. The matrix is a view of
    `table_bssD` with the shape [b * s * s / p, p * D].
    """
    num_pixels, num_channels = table_bssD.shape[:3].numel(), table_bssD.shape[3]
    repeats = 1
    while 2 * repeats * num_channels <= ROW_LENGTH and num_pixels % (2 * repeats) == 0:
        repeats *= 2
    return table_bssD.view(-1, repeats * num_channels), repeats


def _repeat(value_D: Tensor, repeats: int) -> Tensor:
    """Return `repeats` copies of `value_D`, one after the other, [repeats * D]. `value_D` has one value per channel."""
    return value_D.expand(repeats, -1).reshape(-1)


def _channel_sums(rows: Tensor, repeats: int) -> Tensor:
    """Return the sum of each channel over all pixels, [D]. `rows` and `repeats` are the results of `_rows`."""
    return rows.sum(0).view(repeats, -1).sum(0)
