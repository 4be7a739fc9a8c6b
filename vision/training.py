"""Training of a stack of networks in one stage: epochs of updates, of which the best by validation is kept.

A unit is what is selected together: one network, or the networks of a seed that are trained as one (UMix).

Shapes: S seeds, N networks per seed, M = S N networks, U units, R orders of the examples (see `Batches`), b examples
of a batch, n examples, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from vision.batches import Batches, Rows
from vision.networks.stack import Stack
from vision.optimizers import SGD, AdaDelta
from vision.settings import SelectBy


class Watcher:
    """A callback whose methods are called while a stage trains. This base class does nothing."""

    def begin_stage(self, index: int) -> None:
        """Called before stage `index` is trained."""

    def epoch(self, epoch: int, error: Callable[[], Tensor]) -> None:
        """Called after each epoch.

        Args:
            epoch: its number in the stage, from 1.
            error: computes the validation error rate of each unit, [U].
        """


class OwnLoss:
    """A loss by which every network is trained and selected on its own: U = M units.

    Args:
        num_seeds: S.
        networks_per_seed: N.
    """

    def __init__(self, num_seeds: int, networks_per_seed: int):
        self.num_orders = num_seeds * networks_per_seed
        """R, the number of orders in which the examples are read: one per network."""
        self._networks_per_seed = networks_per_seed

    def unit_logits(self, logits_MbC: Tensor) -> Tensor:
        """Return the logits of each unit, [U, b, C]."""
        return logits_MbC

    def gradient(self, logits_MbC: Tensor, one_hot_RbC: Tensor) -> Tensor:
        """Return the gradient of each unit's mean cross entropy with respect to the logits of all networks, [M, b, C].

        Args:
            logits_MbC: logits of all networks.
            one_hot_RbC: classes of the batch of each order, one-hot.
        """
        return _cross_entropy_gradient(self.unit_logits(logits_MbC), one_hot_RbC)

    def unit_labels(self, y_Sn: Tensor) -> Tensor:
        """Return the labels of each unit, [U, n]."""
        return y_Sn.repeat_interleave(self._networks_per_seed, 0) if self._networks_per_seed > 1 else y_Sn

    def repeat_for_networks(self, values_U: Tensor) -> Tensor:
        """Return for each network the value of its unit, [M]."""
        return values_U


class JointLoss(OwnLoss):
    """A loss by which the networks of a seed are trained and selected as one (UMix): U = S units.

    The networks of a seed read the same batches. Their logits are averaged (the paper) or summed (the original code).

    Args:
        num_seeds: S.
        networks_per_seed: N.
        mean: True averages the logits, False sums them.
    """

    def __init__(self, num_seeds: int, networks_per_seed: int, mean: bool):
        super().__init__(num_seeds, networks_per_seed)
        self.num_orders = num_seeds
        self._scale = 1.0 / networks_per_seed if mean else 1.0

    def unit_logits(self, logits_MbC: Tensor) -> Tensor:
        logits_SbC = logits_MbC.unflatten(0, (-1, self._networks_per_seed)).sum(1)
        return logits_SbC.mul_(self._scale)

    def gradient(self, logits_MbC: Tensor, one_hot_RbC: Tensor) -> Tensor:
        d_SbC = super().gradient(logits_MbC, one_hot_RbC).mul_(self._scale)
        return d_SbC.repeat_interleave(self._networks_per_seed, 0)

    def unit_labels(self, y_Sn: Tensor) -> Tensor:
        return y_Sn

    def repeat_for_networks(self, values_U: Tensor) -> Tensor:
        return values_U.repeat_interleave(self._networks_per_seed)


@dataclass(frozen=True)
class TrainingCounts:
    """Numbers of updates and examples of a stage."""

    num_updates: int
    """Number of updates of each network. Networks that are trained as one are updated together."""
    num_examples: int
    """Number of examples that each network was trained on, over all epochs."""
    num_validated: int
    """Number of examples that each network was validated on, over all epochs."""


def train_stage(
    stack: Stack,
    batches: Batches,
    validation: Rows,
    loss: OwnLoss,
    optimizer: AdaDelta | SGD,
    epochs: int,
    select_by: SelectBy,
    watcher: Watcher | None = None,
) -> TrainingCounts:
    """Train a stack in place, and leave each unit with its parameters after its best epoch, the first among equals.

    A unit whose validation loss is never a finite number is left with its parameters from before the stage.

    Args:
        stack: M networks.
        batches: training data.
        validation: validation data, by which the best epoch is selected.
        loss: which networks are trained and selected together.
        optimizer: updates the stack's parameters.
        epochs: number of passes over the training data.
        select_by: the measure that the best epoch minimises (of the accuracy: the error rate).
        watcher: its methods are called during training.
    """
    x_valid, y_valid_Un = validation.examples, loss.unit_labels(validation.labels)
    best = [tensors.copy() for tensors in stack.tensors]
    best_U: Tensor | None = None
    num_updates = num_examples = 0
    for epoch in range(1, epochs + 1):
        for x, one_hot in batches.epoch():
            stack.backward(loss.gradient(stack.logits(x, training=True), one_hot))
            optimizer.step(stack.gradient.flat)
            num_updates += 1
            num_examples += x.shape[1]
        logits_UnC = loss.unit_logits(stack.logits_of_many(x_valid))
        score_U = _cross_entropy(logits_UnC, y_valid_Un)  # lower is better
        if select_by == "validation_accuracy":
            # The argmax of logits that are not numbers is some class, which may even be right. Such an epoch must lose.
            score_U = torch.where(score_U.isnan(), torch.inf, _error_rate(logits_UnC, y_valid_Un))
        score_U = score_U.nan_to_num(nan=torch.inf, posinf=torch.inf)
        if watcher:
            watcher.epoch(epoch, partial(_error_rate, logits_UnC, y_valid_Un))
        if best_U is None:
            best_U = torch.full_like(score_U, torch.inf)
        is_better_U = score_U < best_U
        if bool(is_better_U.any()):
            best_U = torch.where(is_better_U, score_U, best_U)
            is_better_M = loss.repeat_for_networks(is_better_U)
            for kept, now in zip(best, stack.tensors, strict=True):
                kept.copy_networks(now, is_better_M)
    for kept, now in zip(best, stack.tensors, strict=True):
        now.flat.copy_(kept.flat)
    stack.free_activations()
    return TrainingCounts(num_updates, num_examples, epochs * validation.num_examples)


def _cross_entropy_gradient(logits: Tensor, one_hot: Tensor) -> Tensor:
    return logits.softmax(-1).sub_(one_hot).mul_(_reciprocal(one_hot.shape[1], logits.device))


@lru_cache
def _reciprocal(length: int, device: torch.device) -> Tensor:
    """Return 1 / length as a tensor. With a Python number, torch would make a new tensor at every step."""
    return torch.tensor(1.0 / length, device=device)


def _cross_entropy(logits_UnC: Tensor, y_Un: Tensor) -> Tensor:
    return logits_UnC.log_softmax(-1).gather(-1, y_Un.unsqueeze(-1)).mean((1, 2)).neg_()


def _error_rate(logits_UnC: Tensor, y_Un: Tensor) -> Tensor:
    return (logits_UnC.argmax(-1) != y_Un).float().mean(1)
