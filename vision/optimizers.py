"""Optimizers for parameters that are stored in one flat tensor.

The optimizers of torch.optim update each tensor of a list. For many small tensors, this is slower than updating one
flat tensor.
"""

import torch
from torch import Tensor


class AdaDelta:
    """AdaDelta (Zeiler 2012, arXiv 1212.5701), with the update rule of torch.optim.Adadelta.

    Args:
        parameters: all parameters as one flat tensor, which `step` changes in place.
        lr: learning rate, a factor by which each update is multiplied.
        rho: decay rate of the running means of squared gradients and squared updates.
        eps: small number that is added to both running means before their square roots are taken.
    """

    def __init__(self, parameters: Tensor, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6):
        self._parameters, self._lr, self._rho = parameters, lr, rho
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
        self._parameters.sub_(step, alpha=self._lr)


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
        self._parameters, self._lr, self._momentum, self._weight_decay = parameters, lr, momentum, weight_decay
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
        self._parameters.sub_(gradient, alpha=self._lr)
