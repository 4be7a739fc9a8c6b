"""One stage of a stack of networks: epochs of updates, the best epoch by validation kept."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from vision.batches import Batches, Rows
from vision.networks.stack import Stack
from vision.optimizers import SGD, AdaDelta

# S seeds, N networks of a seed, M = S N networks, U units that are selected together, b examples, C classes.

SelectBy = Literal["validation_loss", "validation_accuracy"]


class Watcher:
    """Is told how training goes on. This one does not care."""

    def begin_stage(self, index: int) -> None:
        """Stage k trains from now on."""

    def epoch(self, epoch: int, error: Callable[[], Tensor]) -> None:
        """An epoch is over; `error` computes the validation error of each unit, [U]."""


class OwnLoss:
    """Every network has its own loss and its own best epoch."""

    def __init__(self, num_seeds: int, networks_per_seed: int):
        self.num_orders = num_seeds * networks_per_seed
        self._networks_per_seed = networks_per_seed

    def combined(self, logits_MbC: Tensor) -> Tensor:
        """Of each unit, [U, b, C]."""
        return logits_MbC

    def gradient(self, logits_MbC: Tensor, one_hot_RbC: Tensor) -> Tensor:
        """Of the mean cross entropy of each batch, with respect to the logits."""
        return _cross_entropy_gradient(self.combined(logits_MbC), one_hot_RbC)

    def of_units(self, y_Sn: Tensor) -> Tensor:
        """Labels of each unit, [U, n]."""
        return y_Sn.repeat_interleave(self._networks_per_seed, 0) if self._networks_per_seed > 1 else y_Sn

    def networks(self, units_U: Tensor) -> Tensor:
        """[M], from [U]."""
        return units_U


class JointLoss(OwnLoss):
    """The networks of a seed are trained as one, on one order: their logits are averaged, or summed (UMix).

    Args:
        num_seeds: S.
        networks_per_seed: N.
        mean: the paper's average; else the original code's sum.
    """

    def __init__(self, num_seeds: int, networks_per_seed: int, mean: bool):
        super().__init__(num_seeds, networks_per_seed)
        self.num_orders = num_seeds
        self._scale = 1.0 / networks_per_seed if mean else 1.0

    def combined(self, logits_MbC: Tensor) -> Tensor:
        logits_SbC = logits_MbC.unflatten(0, (-1, self._networks_per_seed)).sum(1)
        return logits_SbC.mul_(self._scale)

    def gradient(self, logits_MbC: Tensor, one_hot_RbC: Tensor) -> Tensor:
        d_SbC = super().gradient(logits_MbC, one_hot_RbC).mul_(self._scale)
        return d_SbC.repeat_interleave(self._networks_per_seed, 0)

    def of_units(self, y_Sn: Tensor) -> Tensor:
        return y_Sn

    def networks(self, units_U: Tensor) -> Tensor:
        return units_U.repeat_interleave(self._networks_per_seed)


@dataclass(frozen=True)
class Trained:
    """What a stage of training came to."""

    num_updates: int
    """Of each order: updates of one network, or of those trained as one."""
    num_examples: int
    """Trained on by each network, epoch after epoch."""
    num_validated: int
    """Validated on by each network."""


def train_stage(
    stack: Stack,
    batches: Batches,
    validation: Rows,
    loss: OwnLoss,
    optimizer: AdaDelta | SGD,
    epochs: int,
    select_by: SelectBy,
    watcher: Watcher | None = None,
) -> Trained:
    """Train a stack in place and leave each unit as it was after its best epoch, the first of equals; as it was
    before the stage, where no epoch has a loss that is a number.

    Args:
        stack: M networks.
        batches: what they are trained on.
        validation: what they are selected by.
        loss: which networks are trained and selected together.
        optimizer: of the stack's parameters.
        epochs: passes over the stage's data.
        select_by: what makes an epoch the best.
        watcher: is told of every epoch.
    """
    x_valid, y_valid_Un = validation.examples, loss.of_units(validation.labels)
    best = [tensors.copy() for tensors in stack.tensors]
    best_U: Tensor | None = None
    num_updates = num_examples = 0
    for epoch in range(1, epochs + 1):
        for x, one_hot in batches.epoch():
            stack.backward(loss.gradient(stack.logits(x, training=True), one_hot))
            optimizer.step(stack.gradient.flat)
            num_updates += 1
            num_examples += x.shape[1]
        logits_UnC = loss.combined(stack.logits_of_many(x_valid))
        badness_U = _nll(logits_UnC, y_valid_Un)
        if select_by == "validation_accuracy":
            # Of logits that are not numbers the argmax is some class, which may even be right.
            badness_U = torch.where(badness_U.isnan(), torch.inf, _error(logits_UnC, y_valid_Un))
        badness_U = badness_U.nan_to_num(nan=torch.inf, posinf=torch.inf)
        if watcher:
            watcher.epoch(epoch, partial(_error, logits_UnC, y_valid_Un))
        if best_U is None:
            best_U = torch.full_like(badness_U, torch.inf)
        better_U = badness_U < best_U
        if bool(better_U.any()):
            best_U = torch.where(better_U, badness_U, best_U)
            networks_M = loss.networks(better_U)
            for kept, now in zip(best, stack.tensors, strict=True):
                kept.take(now, networks_M)
    for kept, now in zip(best, stack.tensors, strict=True):
        now.flat.copy_(kept.flat)
    stack.forget()
    return Trained(num_updates, num_examples, epochs * validation.num_examples)


def _cross_entropy_gradient(logits: Tensor, one_hot: Tensor) -> Tensor:
    return logits.softmax(-1).sub_(one_hot).mul_(_inverse(one_hot.shape[1], logits.device))


@lru_cache
def _inverse(length: int, device: torch.device) -> Tensor:
    """1 / length as a tensor: a Python number would be made into one at every step."""
    return torch.tensor(1.0 / length, device=device)


def _nll(logits_UnC: Tensor, y_Un: Tensor) -> Tensor:
    return logits_UnC.log_softmax(-1).gather(-1, y_Un.unsqueeze(-1)).mean((1, 2)).neg_()


def _error(logits_UnC: Tensor, y_Un: Tensor) -> Tensor:
    return (logits_UnC.argmax(-1) != y_Un).float().mean(1)
