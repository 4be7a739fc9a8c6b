"""Settings of the predictor: the parameters that were trained last, or an average over the training.

Only the predictor is an average: it is evaluated, reported and deployed. The training continues from the parameters
themselves, not from the average. Averages at a constant learning rate replace the decay of the rate at the
end of a training (Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization").
"""

from dataclasses import dataclass
from typing import Literal

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.settings import Count, Settings


@dataclass(frozen=True)
class AverageSettings(Settings):
    """Which parameters a learner predicts with."""

    predict_with: Literal["last", "average"] = "last"
    """Parameters of the predictor: the `last` ones, or an `average` over the training so far. The training continues
    from the last parameters."""
    average_every: Literal["stage", "update"] = "stage"
    """What predict_with=average averages: the parameters after each `stage`, or after each `update`."""
    average_window: Count | None = None
    """predict_with=average average_every=stage: number of last stages that are averaged. By default, all stages since
    the network last changed its shape."""
    average_decay: float | None = None
    """predict_with=average: factor by which the weight of older parameters falls with each stage or update (an
    exponential moving average). By default, all have the same weight."""
    average_power: float = 0.0
    """predict_with=average: exponent p, so that the parameters after stage or update k have a weight proportional to
    about k to the power p. In contrast to `average_decay`, the average is over a constant part of the training so far,
    however long it is: about the last 1 / (p + 1) of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {
            "average_every": None if self.average_every == "stage" else self.average_every,
            "average_window": self.average_window,
            "average_decay": self.average_decay,
            "average_power": self.average_power or None,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        if self.predict_with == "last" and given:
            raise SettingError(f"{' '.join(given)} needs predict_with=average, but predict_with={self.predict_with}")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise SettingError(f"average_decay={self.average_decay} must be above 0 and below 1")
        weights = [
            f"{name}={options[name]}" for name in options if name != "average_every" and options[name] is not None
        ]
        if len(weights) > 1:
            raise SettingError(f"{' and '.join(weights)} exclude each other: give one of them")
        if not 0 <= self.average_power < 1000:
            raise SettingError(f"average_power={self.average_power} must be at least 0 and below 1000")
        if self.average_window is not None and self.average_every == "update":
            raise SettingError(
                f"average_window={self.average_window} counts stages, but average_every={self.average_every}: give "
                f"average_decay= instead"
            )

    @property
    def averages(self) -> bool:
        """Whether the predictor is an average."""
        return self.predict_with == "average"

    def weight_of_newest(self, count: int) -> float:
        """Return the weight of the newest parameters in the average, between 0 and 1. The rest is the old average.

        With a decay d, the first parameters would dominate the average for about 1 / (1 - d) steps. So at first, all
        parameters have the same weight.

        With a power p, the newest of n parameters has the weight (p + 1) / (n + p): polynomial-decay averaging (Shamir
        and Zhang 2013, "Stochastic gradient descent for non-smooth optimization").

        Args:
            count: number of parameters that were averaged so far, with the newest, at least 1.
        """
        if self.average_decay is not None:
            return max(1 / count, 1 - self.average_decay)
        return (self.average_power + 1) / (count + self.average_power)
