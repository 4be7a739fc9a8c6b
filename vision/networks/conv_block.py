"""The building block of the VGG as a torch module: convolutions with batch normalisation and ReLU, then max pooling."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from vision.networks import narrow
from vision.networks.narrow import NarrowBlock, Running


class ConvBlock(nn.Sequential):
    """3 x 3 convolutions with padding 1, each with batch normalisation and ReLU, then 2 x 2 max pooling.

    The block maps [b, C, s, s] to [b, D, s/2, s/2]. It is a torch.nn.Sequential of conv_1, norm_1, relu_1, conv_2, ...,
    pool. With few channels on a CPU, the C code narrow.c computes the same results faster than these modules.

    The convolutions have no bias. Batch normalisation would remove a bias, because it subtracts the mean of each
    channel.

    Args:
        channels: number of channels of the input and of the output of each convolution, C, ..., D.
        is_pooled: if False, there is no pooling, and the block returns [b, D, s, s].
    """

    def __init__(self, channels: Sequence[int], is_pooled: bool = True):
        super().__init__()
        self.is_pooled = is_pooled
        self.only_torch = False
        """If True, narrow.c is never used, for example because torch's counter must see all operations."""
        for number, (num_in, num_out) in enumerate(pairwise(channels), start=1):
            self.add_module(f"conv_{number}", nn.Conv2d(num_in, num_out, 3, padding=1, bias=False))
            self.add_module(f"norm_{number}", nn.BatchNorm2d(num_out))
            self.add_module(f"relu_{number}", nn.ReLU(inplace=True))
        if is_pooled:
            self.add_module("pool", nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [b, D, s/2, s/2].

        Args:
            x: images or activations, [b, C, s, s].
        """
        if self.is_pooled and not self.only_torch and (self.training or not torch.is_grad_enabled()):
            x_bssC, (norms, parameters) = x.permute(0, 2, 3, 1), self._norms_and_parameters()
            if narrow.can_compute(x_bssC, parameters):
                running = [self._running(norm) for norm in norms]
                return NarrowBlock.apply(x_bssC, running, self.training, *parameters).permute(0, 3, 1, 2)
        return super().forward(x)

    def _norms_and_parameters(self) -> tuple[list[nn.BatchNorm2d], list[Tensor]]:
        """Return the batch normalisations, and the parameters of all layers as `NarrowBlock` needs them."""
        norms = [part for part in self if isinstance(part, nn.BatchNorm2d)]
        weights = [part.weight.permute(0, 2, 3, 1).contiguous() for part in self if isinstance(part, nn.Conv2d)]
        of_layers = zip(weights, norms, strict=True)
        return norms, [value for weight, norm in of_layers for value in (weight, norm.weight, norm.bias)]

    def _running(self, norm: nn.BatchNorm2d) -> Running:
        """Return the running statistics of a batch normalisation. In training mode, count the batch."""
        assert norm.num_batches_tracked is not None and norm.running_mean is not None and norm.running_var is not None
        momentum = norm.momentum
        if self.training:
            norm.num_batches_tracked.add_(1)
        if momentum is None:  # as in torch, the mean over all batches
            momentum = 1 / float(norm.num_batches_tracked.clamp_min(1))
        return norm.running_mean, norm.running_var, momentum
