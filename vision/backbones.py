"""Which networks a learner trains: multilayer perceptrons (MLPs), or the torch modules of an architecture."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vision.datasets import Dataset
from vision.inputs import Images, Inputs, Vectors
from vision.networks import GatedModuleStack, GatedStack, MixtureStack, MLPStack, ModuleStack, Stack, Structure
from vision.settings import VisionSettings


@dataclass(frozen=True)
class Backbone:
    """A network architecture of fixed size. Its methods create untrained networks."""

    structure: Structure | Sequence[int]
    """What the networks consist of. For MLPs, the number of inputs, the width of each hidden layer, and the number of
    classes."""

    def network(self, generators: Sequence[torch.Generator], device: torch.device) -> Stack:
        """Return untrained networks without mixtures of experts, one for each random generator, as one stack."""
        if isinstance(self.structure, Structure):
            return ModuleStack.initialised(self.structure, generators, device)
        return MLPStack.initialised(self.structure, generators, device)

    def mixture(
        self, num_experts: int, hard: bool, generators: Sequence[torch.Generator], device: torch.device
    ) -> GatedStack:
        """Return untrained networks with mixtures of experts, as one stack.

        Args:
            num_experts: number of experts in each mixture.
            hard: if True, a gate chooses one of its branches for each example. If False, it weighs all its branches.
            generators: random generators for the initial parameters, one for each network.
        """
        if isinstance(self.structure, Structure):
            return GatedModuleStack.of_experts(self.structure, num_experts, hard, generators, device)
        return MixtureStack.initialised(self.structure, num_experts, hard, generators, device)


def backbone_for(dataset: Dataset, settings: VisionSettings) -> tuple[Backbone, Inputs]:
    """Return the network architecture for a dataset, and the object that converts its images to network inputs."""
    channels, height, width = dataset.image_shape
    if settings.network == "mlp":
        sizes = (channels * height * width, settings.width, settings.width, dataset.num_classes)
        return Backbone(sizes), Vectors(dataset.pixels)
    border = None if settings.crop_border == "black" else float(settings.crop_border)
    structure = Structure(settings.network, dataset.image_shape, dataset.num_classes, settings.width)
    return Backbone(structure), Images(dataset.pixels, dataset.image_shape, settings.crop_padding, border)
