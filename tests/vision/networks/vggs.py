"""Small VGGs for tests, as stacks of torch modules."""

from itertools import accumulate

import torch

from vision.networks import GatedModuleStack, ModuleStack, Structure
from vision.seeds import generator

CPU = torch.device("cpu")
SMALL = (1, 2, 1, 1, 1)
"""Number of convolutions before each pooling."""


def structure(widths, blocks=SMALL):
    """Return the structure of a VGG with the given number of channels in each convolution."""
    last_layers_of_blocks = set(accumulate(blocks))
    layers = tuple((width, number in last_layers_of_blocks) for number, width in enumerate(widths, start=1))
    return Structure("vgg", (3, 32, 32), 10, max(widths), layers)


def generators(count, purpose="initialisation"):
    return [generator(number, purpose) for number in range(count)]


def vgg(num_networks=2, widths=(3, 5, 4, 6, 3, 4), blocks=SMALL, draw=None):
    return ModuleStack.initialised(structure(widths, blocks), draw or generators(num_networks), CPU)


def mixture(num_networks=2, num_experts=1, hard=False, width=4):
    return GatedModuleStack.of_experts(structure([width] * 6), num_experts, hard, generators(num_networks), CPU)
