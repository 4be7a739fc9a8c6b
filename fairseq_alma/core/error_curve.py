"""The setting wait=auto: each wait follows from the validation errors that the run has recorded so far.

The rule uses a model of the error. A stage trains on n mega-batches, and all stages so far on N. Its predictor has the
error rate (images) or the perplexity (language models)

    e = a N^-(b - s) n^-s

The error falls as N^-b if n grows in proportion to N. Without replay, a learner forgets, so that the same data in
fewer and larger stages are worth more: this is the exponent s (`stage_exponent`). The exponent b is fitted to the
recorded errors.

Let each stage train on r times as many mega-batches as all stages before it. The paper's metrics charge its error once
for each arrival until the next stage. The sum over a long stream, a geometric series, is proportional to

    r ((1 + r) / r)^s / ((1 + r)^(1 - b) - 1)

(`relative_charge`). wait=auto uses the ratio r that makes this sum smallest. If the error falls fast (large b), an old
predictor is soon outdated, and waits are short. If forgetting costs much compared with that (large s), they are long.
With s = 0, the smallest sum has r = 0: a stage at each arrival, because waiting then only delays.

The decision at arrival t depends only on errors that were recorded up to then, on the mega-batches that have arrived,
and on whether the stream ends. It depends neither on test data nor on how many mega-batches will arrive.
"""

import math
from collections.abc import Sequence

from fairseq_alma.core.ledger import Prequential, Scores
from fairseq_alma.core.replay import LEAST_SHARE

STAGE_EXPONENT = 0.15
"""The exponent s of a learner without replay.

It is between 0.11 and 0.19 for the learners SM on MNIST (B = 500, widths 4 and 64, waits 1 to 50) and on CIFAR-10
(B = 100, 4 and 8 channels, waits 2 and 10), whose ledgers are in results/."""

NUM_STAGES_TO_FIT = 4
"""Number of stages whose errors must be known before the exponent b is fitted."""

MAX_RATIO = 0.75
"""Largest ratio. With a larger one, much depends on whether the stream ends soon after a stage or long after it."""

PRIOR_EXPONENT = 0.5
"""Value of b that is expected before errors are known: that of the error of estimates from N examples."""

PRIOR_WEIGHT = 20.0
"""Weight of PRIOR_EXPONENT, in arrivals whose log N has a standard deviation of 1.

The error rate on a mega-batch's validation images is noisy: on MNIST, it is measured on 12 images, and the logarithm
of an error rate of 15% has a standard deviation of 0.7. With the weight 20, that of b is at most about 0.1."""


class ErrorCurve:
    """The recorded validation errors of a run, by the number of mega-batches that the predictor was trained on."""

    def __init__(self) -> None:
        self._errors: dict[int, list[float]] = {}

    def add(self, num_past: int, error: float | None) -> None:
        """Add an error of a predictor that was trained on `num_past` mega-batches.

        Errors of the untrained predictor, unknown errors (None) and infinite ones are ignored.
        """
        if num_past and error is not None and math.isfinite(error):
            self._errors.setdefault(num_past, []).append(error)

    @property
    def means(self) -> dict[int, tuple[float, int]]:
        """For each number of mega-batches: the mean error, and how many errors it is the mean of. All are above 0."""
        means = {num: (sum(errors) / len(errors), len(errors)) for num, errors in self._errors.items()}
        return {num: (mean, count) for num, (mean, count) in means.items() if mean > 0}

    def exponent(self) -> float | None:
        """Return the exponent b of the power law a N^-b through the means; None if fewer than NUM_STAGES_TO_FIT exist.

        This is a least-squares line through the logarithms, whose slope is drawn towards PRIOR_EXPONENT. Each mean has
        a weight equal to its number of errors: in vision, each error is measured on the images of another mega-batch,
        so means of many errors are more precise.
        """
        means = self.means
        if len(means) < NUM_STAGES_TO_FIT:
            return None
        points = [(math.log(num), math.log(mean), count) for num, (mean, count) in means.items()]
        total = sum(weight for _, _, weight in points)
        x_mean = sum(weight * x for x, _, weight in points) / total
        y_mean = sum(weight * y for _, y, weight in points) / total
        variance = sum(weight * (x - x_mean) ** 2 for x, _, weight in points)
        covariance = sum(weight * (x - x_mean) * (y - y_mean) for x, y, weight in points)
        return (PRIOR_WEIGHT * PRIOR_EXPONENT - covariance) / (PRIOR_WEIGHT + variance)


def known_error(prequential: Sequence[Prequential | None] | None, scores: Sequence[Scores]) -> float | None:
    """Return the error that a learner knows at an arrival, before it trains on the new mega-batch; None if unknown.

    Vision: the prequential error rate at this arrival. Language models: the latest validation perplexity. It is the
    mean over the seeds of a run, which need one common decision. Test scores are not used.
    """
    values = [one.error_rate for one in prequential or () if one is not None and one.error_rate is not None]
    if not values:
        values = [one.validation_perplexity for one in scores if one.validation_perplexity is not None]
    return sum(values) / len(values) if values else None


def stage_exponent(replay: bool | str | float) -> float:
    """Return the exponent s of a learner with this setting `replay` (see STAGE_EXPONENT).

    With "all" and "uniform", each stage trains on all mega-batches alike, so its size does not matter: s is 0. If a
    fraction of each batch comes from earlier mega-batches, s is interpolated.
    """
    if replay in ("all", "uniform"):
        return 0.0
    return STAGE_EXPONENT * (1 - (LEAST_SHARE if replay == "auto" else float(replay)))


def relative_charge(ratio: float, exponent: float, stage_exponent: float) -> float:
    """Return the summed error of a long stream, up to a factor, if each stage has `ratio` (r > 0) times the data
    before.

    `exponent` is b, below 1, and `stage_exponent` is s.
    """
    return ratio * ((1 + ratio) / ratio) ** stage_exponent / ((1 + ratio) ** (1 - exponent) - 1)


def best_ratio(exponent: float, stage_exponent: float) -> float:
    """Return the ratio with the smallest `relative_charge`: a multiple of 0.05 up to MAX_RATIO, or 0 if s is 0.

    An exponent b above 0.9 counts as 0.9: the sum converges too fast for the model.
    """
    if not stage_exponent:
        return 0.0
    # Multiples of 0.05 are exact enough: near its minimum, the charge hardly depends on the ratio.
    ratios = [step / 20 for step in range(1, round(20 * MAX_RATIO) + 1)]
    return min(ratios, key=lambda ratio: relative_charge(ratio, min(exponent, 0.9), stage_exponent))


def auto_ratio(curve: ErrorCurve, replay: bool | str | float, default: float) -> tuple[float, str]:
    """Return the ratio that wait=auto uses now, and the reason as text, given the errors that are known so far.

    The ratio is `default` if the exponent b is not known yet, or if the errors do not fall as the model says.
    """
    size_matters = stage_exponent(replay)
    if not size_matters:
        return 0.0, f"replay={replay}: waiting would only delay"
    exponent = curve.exponent()
    if exponent is None:
        return default, f"ratio {default:g}, because errors of {NUM_STAGES_TO_FIT} stages are not known yet"
    if exponent <= size_matters:
        return default, f"ratio {default:g}, because the error does not fall as a power law (N^{-exponent:.2f})"
    ratio = best_ratio(exponent, size_matters)
    return ratio, f"ratio {ratio:g}, because the error falls as N^{-exponent:.2f}"
