"""Checks of the torch modules that functions of users return."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_alma.app.plugins import call_own_function
from fairseq_alma.core.errors import SettingError


@dataclass(frozen=True)
class ModuleCheck:
    """Checks that a module maps images to logits."""

    where: str
    """The origin of the module, for messages, for example "backbone=vgg"."""
    image_shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    num_classes: int
    """Number of classes."""

    def evaluation(self, module: Any) -> None:
        """Check a module in evaluation mode. This also creates the parameters of lazy modules, such as LazyLinear.

        Raises:
            SettingError: if the object is not a module, or does not map images to logits.
        """
        if not isinstance(module, nn.Module):
            raise SettingError(f"{self.where} returned a {type(module).__name__}, but must return a torch.nn.Module")
        is_training = module.training
        self._output(module.eval(), torch.zeros(2, *self.image_shape), "")
        module.train(is_training)

    def training(self, module: nn.Module) -> bool:
        """Check a module in training mode, and return whether it can compute images with channels last.

        Args:
            module: a module that has passed the check in evaluation mode.

        Raises:
            SettingError: if the module cannot compute the images in training mode, or has no parameters to train.
        """
        x = torch.zeros(2, *self.image_shape)
        copy = call_own_function(f"{self.where}: copying the network", deepcopy, module)
        is_channels_last = True
        try:
            # Channels last are faster, but some modules need another layout, for example those that call Tensor.view.
            fast = deepcopy(copy).train().to(memory_format=torch.channels_last)
            self._output(fast, x.to(memory_format=torch.channels_last), " in training mode")
        except (SettingError, RuntimeError):
            self._output(copy.train(), x, " in training mode")
            is_channels_last = False
        if not any(value.requires_grad for value in module.parameters()):
            raise SettingError(f"{self.where} has no parameters that can be trained")
        return is_channels_last

    def _output(self, module: nn.Module, x: Tensor, when: str) -> None:
        """Raise SettingError if a module does not return logits for 2 images."""
        try:
            with torch.no_grad():
                logits = module(x)
        except Exception as error:
            # Catch every error, because the code of the module may raise any.
            raise SettingError(
                f"{self.where} cannot compute images of the shape (channels, height, width) = {self.image_shape}"
                f"{when}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        expected = (2, self.num_classes)
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if found != expected:
            raise SettingError(
                f"{self.where} returned {found} for a batch of 2 images of shape {self.image_shape}{when}, but must "
                f"return logits of the shape {expected}, one for each of the {self.num_classes} classes"
            )
