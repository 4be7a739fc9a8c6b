"""Optimizers for parameters that are stored in one flat tensor, and the schedule of their learning rate.

AdaDelta and SGD are written out here, because the networks of the paper are so small that the bookkeeping of
torch.optim would take longer than the update.
"""

from math import cos, pi
from typing import Protocol

import torch
from torch import Tensor

from vision.settings import VisionSettings


class Optimizer(Protocol):
    """Interface of an optimizer of one flat tensor."""

    lr: float
    """Learning rate of the next update."""

    def step(self, gradient: Tensor) -> None:
        """Update the parameters once, in place. `gradient` is the gradient of the loss, in the same shape."""


class AdaDelta(Optimizer):
    """AdaDelta (Zeiler 2012, arXiv 1212.5701), with the update rule of torch.optim.Adadelta.

    Args:
        parameters: all parameters as one flat tensor, which `step` changes in place.
        lr: learning rate, a factor by which each update is multiplied.
        rho: decay rate of the running means of squared gradients and squared updates.
        eps: small number that is added to both running means before their square roots are taken.
    """

    def __init__(self, parameters: Tensor, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6):
        self._parameters, self.lr, self._rho = parameters, lr, rho
        # torch's update rule has a running mean of gradient^2 and one of update^2, and adds eps to both at every step.
        # To save this addition, `_square` and `_change` contain these running means plus eps. So they start at eps, and
        # `step` averages gradient^2 + eps and update^2 + eps instead of gradient^2 and update^2.
        self._eps = torch.tensor(eps, device=parameters.device)
        self._square, self._change = torch.full_like(parameters, eps), torch.full_like(parameters, eps)
        self._step, self._new = torch.empty_like(parameters), torch.empty_like(parameters)

    def step(self, gradient: Tensor) -> None:
        step, new, share = self._step, self._new, 1 - self._rho
        torch.addcmul(self._eps, gradient, gradient, out=new)
        self._square.lerp_(new, share)
        torch.div(self._change, self._square, out=step).sqrt_().mul_(gradient)
        torch.addcmul(self._eps, step, step, out=new)
        self._change.lerp_(new, share)
        self._parameters.sub_(step, alpha=self.lr)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum and weight decay, with the update rule of torch.optim.SGD.

    Args:
        parameters: all parameters as one flat tensor, which `step` changes in place.
        momentum: momentum factor; 0 turns momentum off.
        weight_decay: this factor times the parameters is added to the gradient.
        nesterov: if True, use Nesterov momentum.
    """

    def __init__(
        self, parameters: Tensor, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
    ):
        self._parameters, self.lr, self._momentum, self._weight_decay = parameters, lr, momentum, weight_decay
        self._nesterov = nesterov
        self._velocity: Tensor | None = None

    def step(self, gradient: Tensor) -> None:
        if self._weight_decay:
            gradient = gradient.add(self._parameters, alpha=self._weight_decay)
        if self._momentum:
            if self._velocity is None:
                self._velocity = gradient.clone()
            else:
                self._velocity.mul_(self._momentum).add_(gradient)
            gradient = gradient.add(self._velocity, alpha=self._momentum) if self._nesterov else self._velocity
        self._parameters.sub_(gradient, alpha=self.lr)


class TorchOptimizer(Optimizer):
    """An optimizer of torch.optim for one flat tensor.

    Args:
        parameters: all parameters as one flat tensor, which `step` changes in place.
    """

    def __init__(self, parameters: Tensor, kind: type[torch.optim.Adam], lr: float, weight_decay: float):
        self._flat, self.lr = torch.nn.Parameter(parameters), lr
        self._optimizer = kind([self._flat], lr=lr, weight_decay=weight_decay)

    def step(self, gradient: Tensor) -> None:
        self._flat.grad, self._optimizer.param_groups[0]["lr"] = gradient, self.lr
        self._optimizer.step()


def new_optimizer(parameters: Tensor, settings: VisionSettings) -> Optimizer:
    """Return the optimizer that the settings name, for all parameters as one flat tensor."""
    lr, weight_decay = settings.lr, settings.weight_decay
    assert lr is not None and weight_decay is not None
    if settings.optimizer == "adadelta":
        return AdaDelta(parameters, lr)
    if settings.optimizer in ("sgd", "nesterov"):
        return SGD(parameters, lr, 0.9, weight_decay, settings.optimizer == "nesterov")
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return TorchOptimizer(parameters, kind, lr, weight_decay)


def cosine_rates(lr: float, num_updates: int) -> list[float]:
    """Return the learning rate of each update of a stage, for a decay from `lr` to 0 along a half cosine wave."""
    return [lr * (1 + cos(pi * update / num_updates)) / 2 for update in range(num_updates)]
