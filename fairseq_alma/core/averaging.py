"""Settings of the predictor: the parameters that were trained last, or an average over the training.

A learner that predicts with an average goes on training the parameters themselves. Only the predictor is averaged. It
is what is evaluated, reported and deployed. Averages at a constant learning rate replace the decay of the rate at the
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
    """Parameters of the predictor: the `last` ones, or an `average` over the training so far. The training itself goes
    on from the last parameters."""
    average_every: Literal["stage", "update"] = "stage"
    """What predict_with=average averages: the parameters after each `stage`, or after each `update`."""
    average_window: Count | None = None
    """predict_with=average average_every=stage: number of last stages that are averaged. By default, all stages since
    the network last changed its shape."""
    average_decay: float | None = None
    """predict_with=average: factor by which the weight of older parameters falls with each stage or update (an
    exponential moving average). By default, all have the same weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {
            "average_every": None if self.average_every == "stage" else self.average_every,
            "average_window": self.average_window,
            "average_decay": self.average_decay,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        if self.predict_with == "last" and given:
            raise SettingError(f"{' '.join(given)} needs predict_with=average, but predict_with={self.predict_with}")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise SettingError(f"average_decay={self.average_decay} must be above 0 and below 1")
        if self.average_window is not None and self.average_decay is not None:
            raise SettingError(
                f"average_window={self.average_window} and average_decay={self.average_decay} exclude each other: give "
                f"one of them"
            )
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

        Args:
            count: number of parameters that were averaged so far, with the newest, at least 1.
        """
        equal = 1 / count
        return equal if self.average_decay is None else max(equal, 1 - self.average_decay)
