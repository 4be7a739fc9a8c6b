"""Optimizers for parameters that are stored in one flat tensor, and schedules of their learning rate.

The optimizers of torch.optim update each tensor of a list. For many small tensors, this is slower than updating one
flat tensor. AdaDelta and SGD are written out here, because the networks of the paper are so small that the bookkeeping
of torch.optim would take longer than the update.
"""

from typing import Protocol

import torch
from torch import Tensor

from vision.recipe import RecipeSettings


class Optimizer(Protocol):
    """Interface of an optimizer of one flat tensor."""

    lr: float
    """Learning rate of the next update."""

    def step(self, gradient: Tensor) -> None:
        """Update the parameters once.

        Args:
            gradient: gradient of the loss, with the same shape as the parameters.
        """


class AdaDelta:
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
        """Update the parameters once.

        Args:
            gradient: gradient of the loss, with the same shape as the parameters.
        """
        step, new, share = self._step, self._new, 1 - self._rho
        torch.addcmul(self._eps, gradient, gradient, out=new)
        self._square.lerp_(new, share)
        torch.div(self._change, self._square, out=step).sqrt_().mul_(gradient)
        torch.addcmul(self._eps, step, step, out=new)
        self._change.lerp_(new, share)
        self._parameters.sub_(step, alpha=self.lr)


class SGD:
    """Stochastic gradient descent with momentum and weight decay, with the update rule of torch.optim.SGD.

    Args:
        parameters: all parameters as one flat tensor, which `step` changes in place.
        lr: learning rate.
        momentum: momentum factor; 0 turns momentum off.
        weight_decay: this factor times the parameters is added to the gradient.
        nesterov: if True, use Nesterov momentum.
    """

    def __init__(
        self,
        parameters: Tensor,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        self._parameters, self.lr, self._momentum, self._weight_decay = parameters, lr, momentum, weight_decay
        self._nesterov = nesterov
        self._velocity: Tensor | None = None

    def step(self, gradient: Tensor) -> None:
        """Update the parameters once.

        Args:
            gradient: gradient of the loss, with the same shape as the parameters.
        """
        if self._weight_decay:
            gradient = gradient.add(self._parameters, alpha=self._weight_decay)
        if self._momentum:
            if self._velocity is None:
                self._velocity = gradient.clone()
            else:
                self._velocity.mul_(self._momentum).add_(gradient)
            gradient = gradient.add(self._velocity, alpha=self._momentum) if self._nesterov else self._velocity
        self._parameters.sub_(gradient, alpha=self.lr)


class TorchOptimizer:
    """An optimizer of torch.optim for one flat tensor.

    Args:
        parameters: all parameters as one flat tensor, which `step` changes in place.
        name: name of the optimizer's class in torch.optim, in lower case.
        options: arguments of the class, for example lr.
    """

    def __init__(self, parameters: Tensor, name: str, options: dict[str, float]):
        self._flat = torch.nn.Parameter(parameters)
        kind = next(kind for key, kind in vars(torch.optim).items() if key.lower() == name)
        self._optimizer = kind([self._flat], **options)
        self.lr: float = self._optimizer.param_groups[0]["lr"]

    def step(self, gradient: Tensor) -> None:
        """Update the parameters once.

        Args:
            gradient: gradient of the loss, with the same shape as the parameters.
        """
        self._flat.grad, self._optimizer.param_groups[0]["lr"] = gradient, self.lr
        self._optimizer.step()


def new_optimizer(parameters: Tensor, recipe: RecipeSettings) -> Optimizer:
    """Return an optimizer for the parameters, as the recipe says.

    Args:
        parameters: all parameters as one flat tensor, which the optimizer changes in place.
        recipe: training settings, as `RecipeSettings.for_network` returns them.
    """
    if recipe.optimizer in ("adadelta", "sgd"):
        assert recipe.lr is not None and recipe.momentum is not None and recipe.weight_decay is not None
        if recipe.optimizer == "adadelta":
            return AdaDelta(parameters, recipe.lr)
        return SGD(parameters, recipe.lr, recipe.momentum, recipe.weight_decay, recipe.nesterov)
    assert recipe.optimizer is not None
    given = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    return TorchOptimizer(
        parameters, recipe.optimizer, {key: value for key, value in given.items() if value is not None}
    )


def learning_rates(recipe: RecipeSettings, lr: float, num_updates: int) -> list[float] | None:
    """Return the learning rate of each update of a stage, or None if it is constant.

    The rates are those of torch's own schedulers: CosineAnnealingLR, LinearLR, MultiStepLR and OneCycleLR.

    Args:
        recipe: training settings.
        lr: the optimizer's learning rate.
        num_updates: number of updates in the stage.
    """
    if recipe.schedule == "constant":
        return None
    schedulers = torch.optim.lr_scheduler
    # The scheduler needs an optimizer, but only its learning rate is used.
    carrier = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if recipe.schedule == "cosine":
        scheduler = schedulers.CosineAnnealingLR(carrier, T_max=num_updates)
    elif recipe.schedule == "linear":
        scheduler = schedulers.LinearLR(carrier, start_factor=1.0, end_factor=0.0, total_iters=num_updates)
    elif recipe.schedule == "step":
        milestones = [max(1, num_updates // 2), max(1, num_updates * 3 // 4)]
        scheduler = schedulers.MultiStepLR(carrier, milestones)
    else:
        # One more step than updates, because the last step of the cycle would have a learning rate of almost 0.
        scheduler = schedulers.OneCycleLR(carrier, max_lr=lr, total_steps=num_updates + 1, cycle_momentum=False)
    rates = []
    for _ in range(num_updates):
        rates.append(float(carrier.param_groups[0]["lr"]))
        carrier.step()
        scheduler.step()
    return rates
