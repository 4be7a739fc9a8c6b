"""Settings of the training of a stage: epochs, optimizer, learning rate, augmentation, selection of the epoch."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, NonNegative, Settings

SelectBy = Literal["validation_loss", "validation_accuracy", "last"]
"""The measure that selects the best epoch of a stage, or "last" for the last epoch."""

OptimizerName = Literal["adadelta", "sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adamax"]
"""Names of optimizers. Each computes every parameter separately, so it can update all networks as one tensor."""


@dataclass(frozen=True)
class RecipeSettings(Settings):
    """Training settings of a stage."""

    epochs: Count = 100
    """Number of epochs in each stage."""
    extra_epochs: NonNegative = 0
    """Further epochs of early stages: the stage at arrival t has `epochs` + `extra_epochs` / t epochs, rounded. A
    network that has seen little data needs more passes over them."""
    batch_size: Count = 128
    """Number of examples in a batch."""
    optimizer: OptimizerName | None = None
    """Optimizer: `sgd`, `adadelta`, or another optimizer of torch.optim. By default `adadelta` for backbone=mlp and
    `sgd` for all other networks, as in the paper. Each stage starts with a new optimizer state."""
    lr: float | None = None
    """Learning rate. By default 1 for adadelta, 0.01 for sgd, and torch's default for other optimizers."""
    momentum: float | None = None
    """Momentum of sgd. By default 0.9."""
    nesterov: bool = False
    """Whether sgd uses Nesterov momentum (the authors' code uses it for gMoE and Firefly on CIFAR)."""
    weight_decay: float | None = None
    """Weight decay. By default 1e-4 for sgd, and torch's default for other optimizers. adadelta has none."""
    label_smoothing: float = 0.0
    """Label smoothing: share of the probability of each training label that is spread evenly over all classes (Szegedy
    et al. 2016), as `label_smoothing` of torch.nn.CrossEntropyLoss. Validation losses are computed without it."""
    schedule: Literal["constant", "cosine", "linear", "step", "onecycle"] = "constant"
    """How the learning rate changes within a stage: `constant`, `cosine` or `linear` decay to 0, `step` (a tenth after
    half of the updates, a hundredth after three quarters), or `onecycle` (up to lr, then down; Smith 2018)."""
    patience: Count | None = None
    """Early stopping: a network's training ends after this number of epochs without an improvement of its validation
    score. By default, all epochs are trained. The authors' code has this setting, too."""
    patience_delta: float = 0.0
    """Early stopping: an epoch counts as an improvement if its validation score is better than the best one so far by
    more than this number."""
    crop_padding: NonNegative = 4
    """Networks for images: width in pixels of the border that is added to training images before they are cropped at
    random. Images are also flipped at random. With 0, images are neither cropped nor flipped."""
    crop_border: float | str = "black"
    """Networks for images: value of the border pixels, either `black` or a number (a pixel value after normalisation).
    The authors' code uses -1.9."""
    select_by: SelectBy = "validation_loss"
    """Measure that selects the best epoch of a stage: lowest `validation_loss` or highest `validation_accuracy`. The
    stage ends with the parameters of the best epoch. With `last`, it ends with those of the last epoch, and the epochs
    before are not validated."""
    from_scratch: bool = False
    """Whether each stage starts from newly initialised parameters."""

    def epochs_at(self, t: int) -> int:
        """Return the number of epochs of the stage that is trained at arrival t, counted from 1."""
        return self.epochs + round(self.extra_epochs / t)

    def for_network(self, network: str) -> "RecipeSettings":
        """Return a copy of these settings, in which values that are None are replaced by the defaults for a network.

        The values of the copy are checked. Settings that remain None have the default value of torch's optimizer.

        Args:
            network: name of the architecture. The perceptron (mlp) and all other networks have different defaults.

        Raises:
            SettingError: if a value is out of range, or if the optimizer does not have one of the given settings.
        """
        optimizer = self.optimizer or ("adadelta" if network == "mlp" else "sgd")
        defaults: dict[str, dict[str, float]] = {
            "adadelta": {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0},
            "sgd": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
        }
        missing = {
            name: value
            for name, value in defaults.get(optimizer, {"momentum": 0.0}).items()
            if getattr(self, name) is None
        }
        recipe = replace(self, optimizer=optimizer, **missing)  # type: ignore[arg-type]
        recipe._check()
        return recipe

    def _check(self) -> None:
        assert self.momentum is not None
        if self.lr is not None and not self.lr > 0:
            raise SettingError(f"lr={self.lr} must be above 0")
        if not 0 <= self.momentum < 1 or (self.weight_decay is not None and self.weight_decay < 0):
            raise SettingError(
                f"momentum={self.momentum} must be at least 0 and below 1, and weight_decay={self.weight_decay} must "
                f"be at least 0"
            )
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise SettingError(
                f"momentum and nesterov can only be used with optimizer=sgd, not with optimizer={self.optimizer}: "
                "remove these settings, or give optimizer=sgd"
            )
        if self.optimizer == "adadelta" and self.weight_decay:
            raise SettingError(
                "weight_decay cannot be used with optimizer=adadelta: remove it, or give another optimizer"
            )
        if not 0 <= self.label_smoothing < 1:
            raise SettingError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.select_by == "last" and self.patience is not None:
            raise SettingError(
                f"patience={self.patience} needs the validation score of each epoch, but select_by=last does not "
                f"measure it: leave one of them out"
            )
        if not self.patience_delta >= 0 or (self.patience_delta and self.patience is None):
            raise SettingError(
                f"patience_delta={self.patience_delta} must be at least 0, and needs patience= (a number of epochs)"
            )
        if self.nesterov and not self.momentum:
            raise SettingError(
                f"nesterov=true needs a momentum above 0, but momentum={self.momentum}: give a larger momentum, or "
                "nesterov=false"
            )
        is_number = isinstance(self.crop_border, int | float) and not isinstance(self.crop_border, bool)
        if self.crop_border != "black" and not (is_number and isfinite(self.crop_border)):  # type: ignore[arg-type]
            raise SettingError(
                f"crop_border={self.crop_border!r} must be 'black' or a finite number (the value of a pixel after "
                "normalisation)"
            )
