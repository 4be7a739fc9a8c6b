"""The setting `average`: the predictor has an average of the parameters instead of those that were trained last.

Only the predictor is an average: it is evaluated, reported and deployed. The training continues from the parameters
themselves, not from the average. Averages at a constant learning rate replace the decay of the rate at the
end of a training (Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization").
"""

from dataclasses import dataclass

from fairseq_alma.core.errors import SettingError


@dataclass(frozen=True)
class AverageWeights:
    """The weights with which parameters are averaged, after each stage (alma-vision) or each update (alma-lm)."""

    power: float = 0.0
    """Exponent p. The k-th parameters have a weight proportional to about k to the power p. So the average is over a
    constant part of the training so far, however long it is: about the last 1 / (p + 1) of it."""
    decay: float | None = None
    """If given, the average is an exponential moving average instead: with each stage or update, the weight of older
    parameters falls by this factor."""

    @classmethod
    def parse(cls, text: str) -> "AverageWeights":
        """Return the weights for a value of the setting `average`: power:P or decay:D. Raise SettingError otherwise."""
        kind, _, number = text.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if kind == "power" and 0 <= value < 1000:
            return cls(power=value)
        if kind == "decay" and 0 < value < 1:
            return cls(decay=value)
        raise SettingError(
            f"average={text} must be power:P with a number P of at least 0 and below 1000, or decay:D with a number D "
            f"above 0 and below 1, for example average=power:8"
        )

    def weight_of_newest(self, count: int) -> float:
        """Return the weight of the newest parameters in the average of `count` parameters. The rest is the old average.

        With a power p, it is (p + 1) / (count + p): polynomial-decay averaging (Shamir and Zhang 2013, "Stochastic
        gradient descent for non-smooth optimization"). With a decay d, the first parameters would dominate the average
        for about 1 / (1 - d) steps. So at first, all parameters have the same weight.
        """
        if self.decay is not None:
            return max(1 / count, 1 - self.decay)
        return (self.power + 1) / (count + self.power)
