"""ResNet-20 for small images (He et al., "Deep residual learning for image recognition", 2016, section 4.2)."""

import torch
from torch import Tensor, nn

from vision.networks.architectures import ImageShape, register_backbone


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, whose result is added to the input.

    The block maps [b, num_in, s, s] to [b, num_out, s / stride, s / stride]. If the numbers of channels differ, zeros
    are appended to the input as further channels (option A of the paper), so the addition has no parameters.

    Args:
        stride: step of the first convolution, 1 or 2.
    """

    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.stride, self.num_new = stride, num_out - num_in
        self.conv_1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(num_out)
        self.conv_2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(self.norm_1(self.conv_1(x)).relu()))
        same = nn.functional.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))
        return (y + same).relu()


@register_backbone("resnet20")
def resnet20(image_shape: ImageShape, num_classes: int, width: int) -> nn.Sequential:
    """Return ResNet-20. Its three groups of three blocks have width, 2 x width and 4 x width channels.

    The paper's network has width 16.
    """
    network = nn.Sequential()
    first = nn.Sequential(nn.Conv2d(image_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    network.add_module("stem", first)
    channels = width
    for group in range(3):
        for number in range(3):
            num_out = width << group
            stride = 2 if group and not number else 1
            network.add_module(f"block_{group + 1}_{number + 1}", ResidualBlock(channels, num_out, stride))
            channels = num_out
    network.add_module("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)))
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
    return network
