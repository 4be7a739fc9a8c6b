"""The reduced VGG19: 16 convolutions (3 x 3, c channels each) with batch normalisation and ReLU, and a linear head.

Max pooling follows convolutions 2, 4, 8, 12 and 16, so that an image of 32 x 32 pixels is reduced to one pixel of c
channels. A larger image is reduced to several pixels, and the head reads their mean. For images with 3 channels and 10
classes, the network has 27c + 135c^2 + 32c + 10c + 10 parameters: the first convolution, the other convolutions, batch
normalisation, weights of the head, biases of the head.

As in the code of the Firefly authors, the convolutions have no bias. In the original ALMA code the convolutions have a
bias, but the batch normalisation removes the bias, so the output of the network is the same.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fairseq_alma.core.errors import SettingError
from vision.networks import narrow
from vision.networks.architectures import GROWN, ImageShape, register_backbone
from vision.networks.narrow import NarrowBlock, Running
from vision.networks.parameters import draw_linear

BLOCKS = (2, 2, 4, 4, 4)
"""Number of convolutions in each block. Max pooling follows every block."""


def draw_layers_of(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of all convolutions without bias and of all linear layers, in the order of the module.

    They have the distribution of torch's own initialisation: uniform between -1/sqrt(n) and 1/sqrt(n) for n inputs.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                num_out, num_in, height, width = layer.weight.shape
                bound = (height * width * num_in) ** -0.5
                # Draw the weights with channels last, as they are stored.
                drawn = torch.rand(num_out, height, width, num_in, generator=generator).mul_(2 * bound).sub_(bound)
                layer.weight.copy_(drawn.permute(0, 3, 1, 2))
            elif isinstance(layer, nn.Linear):
                weight, bias = draw_linear(layer.out_features, layer.in_features, [generator])
                layer.weight.copy_(weight[0])
                layer.bias.copy_(bias[0])


class ConvBlock(nn.Sequential):
    """3 x 3 convolutions with padding 1, each with batch normalisation and ReLU, then 2 x 2 max pooling.

    The block maps [b, C, s, s] to [b, D, s/2, s/2]. It is a torch.nn.Sequential of conv_1, norm_1, relu_1, conv_2, ...,
    pool. With few channels on a CPU, the C code narrow.c computes the same results faster than these modules.

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
        """Return the output, [b, D, s/2, s/2], for images or activations, [b, C, s, s]."""
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


@register_backbone("vgg", draw=draw_layers_of)
def vgg(image_shape: ImageShape, num_classes: int, width: int) -> nn.Sequential:
    """Return the reduced VGG19.

    Args:
        image_shape: channels, height and width of an image. Height and width must be at least 32.
        width: number of output channels of each convolution, c.

    Raises:
        SettingError: if the images are smaller than 32 x 32 pixels.
    """
    if min(image_shape[1:]) < 2 ** len(BLOCKS):
        raise SettingError(
            f"backbone=vgg needs images of at least 32 x 32 pixels, because it halves them five times, but these have "
            f"{image_shape[1]} x {image_shape[2]}: give backbone=resnet20, or image_size=32"
        )
    layers = [(width, number == count) for count in BLOCKS for number in range(1, count + 1)]
    return conv_network(image_shape, num_classes, layers)


@register_backbone(GROWN, draw=draw_layers_of)
def conv_network(image_shape: ImageShape, num_classes: int, layers: Sequence[tuple[int, bool]]) -> nn.Sequential:
    """Return a sequence of convolutions with batch normalisation and ReLU, and a linear head.

    Args:
        layers: for each convolution, the number of its output channels, and whether 2 x 2 max pooling follows it. Each
            pooling ends a block.
    """
    network, channels = nn.Sequential(), [image_shape[0]]
    for number, (num_out, is_pooled) in enumerate(layers, start=1):
        channels.append(num_out)
        if is_pooled or number == len(layers):
            network.add_module(f"block_{len(network) + 1}", ConvBlock(channels, is_pooled))
            channels = [num_out]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[0], num_classes))
    network.add_module("head", head)
    return network
