"""Policies: functions that decide at each arrival whether a stage is trained now, from what is known by then.

A policy of your own is a function from a `History` to True (train now) or False (wait for more mega-batches).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_alma.core.error_curve import PRIOR_EXPONENT, ErrorCurve, auto_ratio
from fairseq_alma.core.replay import Replay
from fairseq_alma.core.waiting import Wait, group_is_complete, ratio_of


@dataclass(frozen=True)
class History:
    """What is known when a mega-batch has arrived and before a stage is trained. It contains no test score."""

    t: int
    """Number of the arrival, from 1."""
    stages: tuple[int, ...]
    """The arrivals at which stages were trained so far."""
    errors: tuple[float, ...]
    """For each arrival 1..t, the error before a stage was trained at it. Images: the error rate on the validation data
    of the mega-batch that had just arrived. Language models: the validation perplexity. NaN if it is unknown."""
    tflop: tuple[float, ...]
    """Training cost of each stage so far, in TFLOP."""
    next_tflop: float
    """Training cost of a stage if it is trained now, in TFLOP. It follows from the data that have arrived."""
    price: float
    """What one TFLOP costs, in the unit of the summed error. 0: only the error counts."""

    @property
    def last(self) -> int:
        """The arrival at which the last stage was trained; 0 if there is none."""
        return self.stages[-1] if self.stages else 0

    @property
    def trained_at(self) -> list[int]:
        """For each arrival 1..t, the arrival of the last stage before it; 0 if there is none."""
        stages, found = {*self.stages}, [0]
        for t in range(1, self.t):
            found.append(t if t in stages else found[-1])
        return found


Policy = Callable[[History], bool]


def waiting(wait: Wait, replay: Replay = False) -> Policy:
    """Return the policy of the setting `wait`. With wait="auto", it also depends on the setting `replay`."""

    def policy(history: History) -> bool:
        ratio = None
        if wait == "auto":
            curve = ErrorCurve()
            for trained_at, error in zip(history.trained_at, history.errors, strict=True):
                curve.add(trained_at, error)
            ratio, _ = auto_ratio(curve, replay, ratio_of(wait))
        return group_is_complete(history.t - history.last, history.last, wait, ratio)

    return policy


def cara_threshold(threshold: float) -> Policy:
    """Return a policy that trains if the error on the new data reaches a threshold.

    It is the variant "threshold" of CARA (Mahadevan and Mathioudakis 2024, arXiv 2310.04216). There, the staleness cost
    of a model is its loss on the stored data that are similar to the queries. Here, queries are like the data of the
    newest mega-batch, and their staleness cost is `History.errors`. As there, the cost of training acts only through
    the threshold, which is chosen on other streams.
    """
    return lambda history: history.errors[-1] >= threshold


def cara_cumulative(threshold: float) -> Policy:
    """Return a policy that trains if the errors since the last stage add up to a threshold.

    It is the variant "cumulative threshold" of CARA, with the simplification of `cara_threshold`. The third variant,
    "periodic", is a fixed wait that is chosen on other streams.
    """
    return lambda history: sum(history.errors[history.last :]) >= threshold


UPF_NOISE = 0.3
"""Standard deviation of the logarithm of a known error around its forecast."""

UPF_PRIOR = ((0.0, 10.0), (-PRIOR_EXPONENT, 0.25), (0.0, 0.1))
"""Mean and standard deviation of the coefficients of UPF before errors are known: of the constant, of the logarithm of
the arrival at which the model was trained, and of its age in arrivals."""

UPF_LOWEST = 1e-3
"""Errors below this count as it, because the logarithm of 0 is infinite."""


def upf(caution: float) -> Policy:
    """Return a policy that trains if the forecast of what a stage saves is above the cost of the stage.

    It follows UPF (Regol et al., "When to retrain a machine learning model", ICML 2025): the errors of the present
    model and of one that is trained now are forecast with their uncertainty, and a quantile of the forecast is compared
    with the cost. It is simplified. UPF learns mean and variance of a bounded metric from features of models that were
    trained and measured at all pairs of arrivals of an earlier period. Here, there is one Bayesian linear regression of
    the logarithm of the error, with a fixed noise and a fixed prior, on the known errors of this run alone. Its
    features are the arrival at which the model was trained (as logarithm) and its age. The future that counts is as
    long as the stream so far. The first stage is always trained at once, because nothing is known before.

    Args:
        caution: number of standard deviations by which the logarithm of the new model's error is forecast higher.
    """

    def policy(history: History) -> bool:
        if not history.stages:
            return True
        t, last = history.t, history.last
        features, targets = [], []
        for j, (trained_at, error) in enumerate(zip(history.trained_at, history.errors, strict=True), start=1):
            if trained_at and math.isfinite(error):
                features.append((1.0, math.log(trained_at), j - trained_at))
                targets.append(math.log(max(error, UPF_LOWEST)))
        x, y = np.array(features).reshape(-1, 3), np.array(targets)
        prior, spread = np.array(UPF_PRIOR).T
        covariance = np.linalg.inv(np.diag(spread**-2) + x.T @ x / UPF_NOISE**2)
        coefficients = covariance @ (prior / spread**2 + x.T @ y / UPF_NOISE**2)
        future = np.array([(1.0, math.log(last), j - last) for j in range(t, 2 * t)])
        # A new model differs from the present one by the same features at each later arrival.
        change = np.array([0.0, math.log(t / last), last - t])
        ratio = math.exp(change @ coefficients + caution * math.sqrt(change @ covariance @ change))
        saved = float(np.exp(future @ coefficients).sum()) * (1 - ratio)
        return saved > history.price * history.next_tflop

    return policy


@dataclass(frozen=True)
class Family:
    """Policies that differ in one number."""

    text: str
    """How tables name the family."""
    make: Callable[[float], Policy]
    """Function that returns the policy with this number."""
    grid: Callable[[Sequence[float], int], Sequence[float]]
    """Function that returns the numbers to choose from, given known errors of other streams and their largest number of
    arrivals."""


def _levels(errors: Sequence[float]) -> list[float]:
    """Return 11 levels of the known errors, from the lowest to the highest."""
    return np.quantile(errors, np.linspace(0, 1, 11)).tolist() if len(errors) else []


WAITS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500)
"""Fixed waits that are compared, as far as they are below the number of arrivals, besides waiting for all."""


def fixed_waits(num_arrivals: int) -> list[int]:
    """Return the fixed waits that are compared on a stream."""
    return [*(wait for wait in WAITS if wait < num_arrivals), num_arrivals]


FAMILIES: Mapping[str, Family] = {
    "cara-threshold": Family("CARA, threshold", cara_threshold, lambda errors, _: _levels(errors)),
    "cara-cumulative": Family(
        "CARA, cumulative",
        cara_cumulative,
        lambda errors, _: [k * level for k in (1, 2, 4) for level in _levels(errors)],
    ),
    "cara-periodic": Family(
        "fixed wait (CARA, periodic)", lambda wait: waiting(round(wait)), lambda _, longest: fixed_waits(longest)
    ),
    "upf": Family("UPF", upf, lambda _, longest: (-2, -1, -0.5, 0, 0.5, 1, 2)),
}
"""The families of policies whose number is chosen on other streams."""
