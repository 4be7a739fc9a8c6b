"""Train a stack of networks for one stage. Then restore the parameters of the epoch with the best validation score.

A unit is the part of a stack that has a loss of its own, and for which one best epoch is selected. Usually each network
is a unit. If the networks of a seed are trained as one model (UMix), these networks together are one unit. An order is
a random sequence in which a network reads the examples (see `vision.batches`); the networks of a unit share one.

Shapes: S seeds, N networks per seed, M = S x N networks, U units, R orders, b examples per batch, n examples,
C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from vision.batches import Batches, Rows
from vision.cuda_graphs import GraphedGradient
from vision.networks.stack import Stack
from vision.optimizers import Optimizer
from vision.settings import SelectBy


class Watcher:
    """Base class of objects whose methods are called during the training. The methods of the base class do nothing."""

    def begin_stage(self, index: int, arrival: int, num_epochs: int) -> None:
        """Called before stage `index` is trained, at an arrival, for a number of epochs."""

    def epoch(self, epoch: int, error: Callable[[], Tensor]) -> None:
        """Called after each epoch, from 1. `error` returns the current validation error rate of each unit, [U]."""


class OwnLoss:
    """The training loss if each network is trained separately, so that each network is a unit (U = R = M).

    Args:
        label_smoothing: share of the probability of each label that is spread evenly over all classes.
    """

    def __init__(self, num_seeds: int, networks_per_seed: int, label_smoothing: float = 0.0):
        self.label_smoothing = label_smoothing
        self.num_orders = num_seeds * networks_per_seed
        """Number of orders, R."""
        self.networks_per_unit = 1
        """Number of networks of a unit."""
        self._networks_per_seed = networks_per_seed

    def unit_logits(self, logits_MbC: Tensor) -> Tensor:
        """Return the logits of each unit, [U, b, C], for the logits of each network."""
        return logits_MbC

    def gradient(self, logits_MbC: Tensor, one_hot_RbC: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the logits of all networks, [M, b, C].

        The loss of a unit is its cross entropy, averaged over the examples of the batch.

        `one_hot_RbC` are the classes of the examples of each order, as one-hot vectors.
        """
        return _cross_entropy_gradient(self.unit_logits(logits_MbC), smoothed(one_hot_RbC, self.label_smoothing))

    def unit_labels(self, y_Sn: Tensor) -> Tensor:
        """Return the labels of the examples for each unit, [U, n], for those of each seed."""
        return y_Sn.repeat_interleave(self._networks_per_seed, 0) if self._networks_per_seed > 1 else y_Sn

    def repeat_for_networks(self, values_U: Tensor) -> Tensor:
        """Return one value per network, [M]: the value of the unit to which the network belongs."""
        return values_U


class JointLoss(OwnLoss):
    """The training loss if the N networks of each seed are trained as one model (UMix), so that U = R = S.

    The logits of a unit are the mean of its networks' logits (in the paper) or their sum (in the authors' code).

    Args:
        mean: if True, the networks' logits are averaged. If False, they are summed.
        label_smoothing: share of the probability of each label that is spread evenly over all classes.
    """

    def __init__(self, num_seeds: int, networks_per_seed: int, mean: bool, label_smoothing: float = 0.0):
        super().__init__(num_seeds, networks_per_seed, label_smoothing)
        self.num_orders, self.networks_per_unit = num_seeds, networks_per_seed
        self._scale = 1.0 / networks_per_seed if mean else 1.0

    def unit_logits(self, logits_MbC: Tensor) -> Tensor:
        return logits_MbC.unflatten(0, (-1, self._networks_per_seed)).sum(1).mul_(self._scale)

    def gradient(self, logits_MbC: Tensor, one_hot_RbC: Tensor) -> Tensor:
        return self.repeat_for_networks(super().gradient(logits_MbC, one_hot_RbC).mul_(self._scale))

    def unit_labels(self, y_Sn: Tensor) -> Tensor:
        return y_Sn

    def repeat_for_networks(self, values_U: Tensor) -> Tensor:
        return values_U.repeat_interleave(self._networks_per_seed, 0)


@dataclass(frozen=True)
class TrainingCounts:
    """How much was trained in a stage."""

    epochs_U: list[int]
    """Number of epochs that each unit was trained. It differs between units only with early stopping."""
    updates_per_epoch: int
    """Number of optimizer updates in an epoch."""
    examples_per_epoch: int
    """Number of training examples that each network processes in an epoch."""
    validated_per_epoch: int
    """Number of validation examples that each network processes after an epoch that is validated."""
    num_diverged: int = 0
    """Number of units without any epoch whose validation loss was a finite number. They keep their old parameters."""
    only_last_is_validated: bool = False
    """Whether only the last epoch is validated, not each epoch."""


def train_stage(
    stack: Stack,
    batches: Batches,
    validation: Rows,
    loss: OwnLoss,
    optimizer: Optimizer,
    epochs: int,
    select_by: SelectBy,
    watcher: Watcher | None = None,
    patience: int | None = None,
    rates: Sequence[float] | None = None,
    cuda_graphs: bool = False,
) -> TrainingCounts:
    """Train a stack of networks in place. At the end, restore the parameters that were best on the validation data.

    The best epoch is selected separately for each unit. If several epochs are equally good, the first of them is
    selected. If the validation loss of a unit is infinite or NaN after every epoch, the parameters from before the
    stage are restored.

    Args:
        validation: validation data, used to select the best epoch.
        loss: the training loss. It also defines the units.
        epochs: number of passes over the training data.
        select_by: the best epoch has the lowest "validation_loss" or the highest "validation_accuracy". With "last",
            the last epoch counts as the best, and only this epoch is validated.
        watcher: object whose method `epoch` is called after each epoch, for example to show the progress.
        patience: early stopping: number of epochs without an improvement after which the training of a unit ends. Its
            networks are computed further as long as other units of the stack are trained, but their parameters of the
            best epoch do not change any more, and the further epochs are not counted. If None, no unit ends early.
        rates: learning rate of each update. If None, the optimizer's learning rate does not change.
        cuda_graphs: whether to record the computation of the gradients as CUDA graphs (see `GraphedGradient`).
    """
    compute_gradient = GraphedGradient(stack) if cuda_graphs else stack.compute_gradient
    y_valid_Un = loss.unit_labels(validation.labels)
    # Convert the validation examples only once, and not after each epoch.
    x_valid = None if validation.is_large else validation.examples
    best = _BestEpoch(stack, loss, len(y_valid_Un), patience)
    num_updates = num_examples = 0
    for epoch in range(1, epochs + 1):
        num_examples = 0
        for x, one_hot in batches.epoch():
            if rates is not None:
                optimizer.lr = rates[num_updates]
            compute_gradient(x, one_hot, loss.gradient, loss.networks_per_unit)
            optimizer.step(stack.gradient.flat)
            num_updates += 1
            num_examples += x.shape[1]
        if select_by == "last" and epoch < epochs:
            best.epochs_U += 1
            continue
        if x_valid is None:
            logits_MnC = stack.logits_of_parts(validation.parts(stack.examples_at_once))
        else:
            logits_MnC = stack.logits_of_many(x_valid)
        logits_UnC = loss.unit_logits(logits_MnC)
        if watcher:
            watcher.epoch(epoch, partial(_error_rate, logits_UnC, y_valid_Un))
        best.after_epoch(_score(logits_UnC, y_valid_Un, select_by))
        if best.all_have_stopped:
            break
    best.restore()
    sizes = (batches.updates_per_epoch, num_examples, validation.num_examples)
    return TrainingCounts(best.epochs_U.tolist(), *sizes, best.num_diverged, select_by == "last")


def _score(logits_UnC: Tensor, y_Un: Tensor, select_by: SelectBy) -> Tensor:
    """Return the score of each unit, [U]. The epoch with the lowest score is selected, so it is no accuracy."""
    score_U = _cross_entropy(logits_UnC, y_Un)
    if select_by == "validation_accuracy":
        # Give an epoch with NaN logits the score infinity, so that it is never selected. Without this, it could be
        # selected, because the argmax of NaN logits is still some class, which may be correct by chance.
        score_U = torch.where(score_U.isnan(), torch.inf, _error_rate(logits_UnC, y_Un))
    return score_U.nan_to_num(nan=torch.inf, posinf=torch.inf)


class _BestEpoch:
    """Keeps the parameters of the best epoch of each unit, and decides which units are still trained.

    For the arguments, see `train_stage`; `num_units` is the number of units, U.
    """

    def __init__(self, stack: Stack, loss: OwnLoss, num_units: int, patience: int | None):
        self._stack, self._loss, self._patience = stack, loss, patience
        self._kept = [tensors.copy() for tensors in stack.tensors]
        self._best_U = torch.full((num_units,), torch.inf, device=stack.parameters.device)
        self._waited_U = torch.zeros_like(self._best_U, dtype=torch.long)
        """Number of epochs since the best one."""
        self.epochs_U = self._waited_U.clone()
        """Number of epochs that each unit was trained."""
        self._is_running_U = torch.ones_like(self._waited_U, dtype=torch.bool)

    @property
    def all_have_stopped(self) -> bool:
        """Whether the training of all units has ended early."""
        return self._patience is not None and not bool(self._is_running_U.any())

    @property
    def num_diverged(self) -> int:
        """Number of units for which no epoch had a finite score."""
        return int(self._best_U.isinf().sum())

    def after_epoch(self, score_U: Tensor) -> None:
        """Take note of the scores after an epoch. The lowest score is the best."""
        is_better_U = score_U < self._best_U
        self.epochs_U += self._is_running_U
        if self._patience is not None:
            is_better_U &= self._is_running_U
            self._waited_U = torch.where(is_better_U, 0, self._waited_U + 1)
            self._is_running_U &= self._waited_U < self._patience
        if bool(is_better_U.any()):
            self._best_U = torch.where(is_better_U, score_U, self._best_U)
            is_better_M = self._loss.repeat_for_networks(is_better_U)
            for kept, now in zip(self._kept, self._stack.tensors, strict=True):
                kept.copy_networks(now, is_better_M)

    def restore(self) -> None:
        """Give each unit the parameters of its best epoch; if there is none, those from before the stage."""
        for kept, now in zip(self._kept, self._stack.tensors, strict=True):
            now.flat.copy_(kept.flat)


def smoothed(one_hot: Tensor, label_smoothing: float) -> Tensor:
    """Return one-hot vectors [..., C] with label smoothing (Szegedy et al. 2016, arXiv 1512.00567, section 7).

    `label_smoothing` is the share of the probability that is spread evenly over all classes.
    """
    if not label_smoothing:
        return one_hot
    return one_hot.mul(1 - label_smoothing).add_(label_smoothing / one_hot.shape[-1])


def _cross_entropy_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient, with respect to the logits, of the cross entropy averaged over the examples of the batch."""
    return logits.softmax(-1).sub_(labels).mul_(_reciprocal(labels.shape[1], logits.device))


@lru_cache
def _reciprocal(length: int, device: torch.device) -> Tensor:
    """Return 1 / length as a tensor on the device."""
    return torch.tensor(1.0 / length, device=device)


def _cross_entropy(logits_UnC: Tensor, y_Un: Tensor) -> Tensor:
    """Return the cross entropy of each unit, averaged over the examples, [U]."""
    return logits_UnC.log_softmax(-1).gather(-1, y_Un.unsqueeze(-1)).mean((1, 2)).neg_()


def _error_rate(logits_UnC: Tensor, y_Un: Tensor) -> Tensor:
    """Return the error rate of each unit, [U]."""
    return (logits_UnC.argmax(-1) != y_Un).float().mean(1)
