"""Which networks a dataset's learners are made of: perceptrons for digits, mnist and emnist, the VGG for cifar."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vision.datasets import Dataset
from vision.inputs import Images, Inputs, Vectors
from vision.networks import GatedStack, MixtureStack, MLPStack, Stack, VGGMixtureStack, VGGStack
from vision.settings import CONVOLUTIONAL, VisionSettings


class Backbone(ABC):
    """Draws untrained networks of one kind and shape, one a generator."""

    @abstractmethod
    def network(self, generators: Sequence[torch.Generator], device: torch.device) -> Stack:
        """Without mixtures."""

    @abstractmethod
    def mixture(
        self, num_experts: int, hard: bool, generators: Sequence[torch.Generator], device: torch.device
    ) -> GatedStack:
        """With mixtures of `num_experts` each."""


class Perceptron(Backbone):
    """Two hidden layers of width h.

    Args:
        sizes: inputs, hidden widths, classes.
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes = tuple(sizes)

    def network(self, generators: Sequence[torch.Generator], device: torch.device) -> MLPStack:
        return MLPStack.initialised(self.sizes, generators, device)

    def mixture(
        self, num_experts: int, hard: bool, generators: Sequence[torch.Generator], device: torch.device
    ) -> MixtureStack:
        return MixtureStack.initialised(self.sizes, num_experts, hard, generators, device)


class VGG(Backbone):
    """The reduced VGG19 of constant width.

    Args:
        num_inputs: channels of an image.
        width: c, of all convolutions.
        num_classes: C.
    """

    def __init__(self, num_inputs: int, width: int, num_classes: int):
        self.num_inputs, self.width, self.num_classes = num_inputs, width, num_classes

    def network(self, generators: Sequence[torch.Generator], device: torch.device) -> VGGStack:
        return VGGStack.initialised(self.num_inputs, [self.width] * 16, self.num_classes, generators, device)

    def mixture(
        self, num_experts: int, hard: bool, generators: Sequence[torch.Generator], device: torch.device
    ) -> VGGMixtureStack:
        return VGGMixtureStack.initialised(
            self.num_inputs, self.width, self.num_classes, num_experts, hard, generators, device
        )


def backbone_for(dataset: Dataset, settings: VisionSettings) -> tuple[Backbone, Inputs]:
    """The networks for a dataset, and how its images are read."""
    channels, height, width = dataset.image_shape
    if dataset.name in CONVOLUTIONAL:
        border = None if settings.crop_border == "black" else float(settings.crop_border)
        inputs = Images(dataset.pixels, channels, height, settings.crop_padding, border)
        return VGG(channels, settings.width, dataset.num_classes), inputs
    sizes = (channels * height * width, settings.width, settings.width, dataset.num_classes)
    return Perceptron(sizes), Vectors(dataset.pixels)
