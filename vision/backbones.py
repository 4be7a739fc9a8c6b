"""Which networks a learner trains: multilayer perceptrons (MLPs), or the torch modules of an architecture."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vision.datasets import Dataset
from vision.inputs import Images, Inputs, Vectors
from vision.networks import GatedModuleStack, GatedStack, MixtureStack, MLPStack, ModuleStack, Stack, Structure
from vision.settings import VisionSettings


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


class ModuleBackbone(Backbone):
    """An architecture of torch modules, such as the reduced VGG19 or a network of the user's.

    Args:
        structure: what the networks consist of.
    """

    def __init__(self, structure: Structure):
        self.structure = structure

    def network(self, generators: Sequence[torch.Generator], device: torch.device) -> ModuleStack:
        return ModuleStack.initialised(self.structure, generators, device)

    def mixture(
        self, num_experts: int, hard: bool, generators: Sequence[torch.Generator], device: torch.device
    ) -> GatedModuleStack:
        return GatedModuleStack.of_experts(self.structure, num_experts, hard, generators, device)


def backbone_for(dataset: Dataset, settings: VisionSettings) -> tuple[Backbone, Inputs]:
    """Return the network architecture for a dataset, and the object that converts its images to network inputs."""
    channels, height, width = dataset.image_shape
    if settings.network != "mlp":
        border = None if settings.crop_border == "black" else float(settings.crop_border)
        inputs = Images(dataset.pixels, dataset.image_shape, settings.crop_padding, border)
        structure = Structure(settings.network, dataset.image_shape, dataset.num_classes, settings.width)
        return ModuleBackbone(structure), inputs
    sizes = (channels * height * width, settings.width, settings.width, dataset.num_classes)
    return Perceptron(sizes), Vectors(dataset.pixels)
