"""Network architectures: multilayer perceptrons (MLPs) for digits, MNIST and EMNIST; reduced VGG19 for CIFAR."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vision.datasets import Dataset
from vision.inputs import Images, Inputs, Vectors
from vision.networks import GatedStack, MixtureStack, MLPStack, Stack, VGGMixtureStack, VGGStack
from vision.settings import CONVOLUTIONAL, VisionSettings


class Backbone(ABC):
    """A network architecture of fixed size. Its methods create untrained networks."""

    @abstractmethod
    def network(self, generators: Sequence[torch.Generator], device: torch.device) -> Stack:
        """Return untrained networks without mixtures of experts, as one stack.

        A stack is several networks of one shape that are computed together.

        Args:
            generators: random generators for the initial parameters. One network is created for each generator.
            device: device on which the networks are placed.
        """

    @abstractmethod
    def mixture(
        self, num_experts: int, hard: bool, generators: Sequence[torch.Generator], device: torch.device
    ) -> GatedStack:
        """Return untrained networks with mixtures of experts, as one stack.

        A stack is several networks of one shape that are computed together. The gates of a mixture form a tree: each
        gate has several branches, and each branch leads to another gate or to an expert.

        Args:
            num_experts: number of experts in each mixture.
            hard: if True, a gate chooses one of its branches for each example. If False, it weighs all its branches.
            generators: random generators for the initial parameters. One network is created for each generator.
            device: device on which the networks are placed.
        """


class Perceptron(Backbone):
    """The architecture of multilayer perceptrons (MLPs) with two hidden layers.

    Args:
        sizes: four numbers: inputs, units in the first hidden layer, units in the second hidden layer, classes.
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
    """The reduced VGG19: a convolutional network in which all convolutions have the same number of output channels.

    Args:
        num_inputs: number of channels of an image.
        width: number of output channels of each convolution, c.
        num_classes: number of classes, C.
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
    """Return the network architecture for a dataset, and the object that converts its images to network inputs."""
    channels, height, width = dataset.image_shape
    if dataset.name in CONVOLUTIONAL:
        border = None if settings.recipe.crop_border == "black" else float(settings.recipe.crop_border)
        inputs = Images(dataset.pixels, dataset.image_shape, settings.recipe.crop_padding, border)
        return VGG(channels, settings.width, dataset.num_classes), inputs
    sizes = (channels * height * width, settings.width, settings.width, dataset.num_classes)
    return Perceptron(sizes), Vectors(dataset.pixels)
