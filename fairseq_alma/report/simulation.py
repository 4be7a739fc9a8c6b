"""What a policy would have cost on a stream, from the ledgers of runs that have trained at other arrivals.

A path is the arrivals at which stages were trained. Row t of a ledger belongs to the part of its path up to t, so runs
with many paths are a matrix: the error of a model that was trained at some arrivals, after each arrival, and what its
stages cost. A path that was run has the rows of its ledger. Of another path, each part that a ledger has is exact; the
others are estimated by the most similar part (see `nearest`) and counted.

If each stage trains new networks on all mega-batches so far (from_scratch=true replay=all), a model depends on nothing
but the arrival of its last stage and on random numbers. Then every path through arrivals of stages counts as exact.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fairseq_alma.core.error_curve import known_error
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.ledger import LedgerRow, Prequential, Spent
from fairseq_alma.core.metrics import cumulative_error_rate, cumulative_flops
from fairseq_alma.report.policies import History, Policy

Path = tuple[int, ...]
"""The arrivals at which stages were trained, in order."""


@dataclass(frozen=True)
class Outcome:
    """The path that a policy has taken through a stream, and what it cost."""

    path: Path
    error: float
    """Images: CER. Language models: the perplexities after the arrivals t = 1..B, added up."""
    tflop: float
    """Training FLOPs, in 1e12."""
    known: float = math.nan
    """The errors that the policy knew (`History.errors`), added up from t = 2 on."""
    errors: tuple[float, ...] = ()
    """These errors, for each arrival."""
    num_estimated: int = 0
    """Number of arrivals at which the model, or the error that the policy knew, is estimated."""

    def cost(self, price: float) -> float:
        """Return the error plus the price of the training FLOPs."""
        return self.error + price * self.tflop


def path_of(rows: Sequence[LedgerRow]) -> Path:
    """Return the path of a ledger."""
    return tuple(row.t for row in rows if row.updated)


def nearest(path: Path, others: Collection[Path]) -> Path:
    """Return the path itself if it is one of `others`, otherwise the most similar one. All have the same last arrival.

    It is the one that agrees with the path for the most stages before the last arrival, then the one whose last stage
    has the most similar number of mega-batches, then the one that differs in the fewest arrivals.
    """
    if path in others:
        return path

    def similarity(other: Path) -> tuple[int, int, int, Path]:
        pairs = list(zip(reversed(path), reversed(other), strict=False))
        agreeing = next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return agreeing, -abs(_last(path[:-1]) - _last(other[:-1])), -len({*path} ^ {*other}), other

    return max(others, key=similarity)


def _last(path: Path) -> int:
    """Return the arrival of the last stage; 0 if there is none."""
    return path[-1] if path else 0


@dataclass
class Matrix:
    """The ledgers of one learner with one seed on one stream, each with another path."""

    ledgers: Mapping[Path, Sequence[LedgerRow]]
    """The rows of each path, all with the same number of arrivals."""
    forgets_path: bool = False
    """Whether a model depends on its last arrival only: each stage trains new networks on all mega-batches so far."""
    first: int = 1
    """First arrival that CER includes, 0 or 1."""
    _models: dict[int, dict[Path, LedgerRow]] = field(default_factory=dict)
    """By arrival of the last stage (0: none) and path: a row with the scores of the model and the cost of the stage."""
    _ahead: dict[int, dict[int, dict[Path, Prequential]]] = field(default_factory=dict)
    """By arrival of the last stage, arrival at which the model was scored, and path: its prequential score."""

    def __post_init__(self) -> None:
        for rows in self.ledgers.values():
            part: Path = ()
            for row in rows:
                if row.prequential is not None:
                    by_path = self._ahead.setdefault(_last(part), {}).setdefault(row.t, {})
                    by_path.setdefault(part, row.prequential)
                if row.updated:
                    part = (*part, row.t)
                models = self._models.setdefault(_last(part), {})
                if part not in models or models[part].scores.scored_tokens:  # a sample, if the model is untrained
                    models[part] = row

    @property
    def num_arrivals(self) -> int:
        return next(iter(self.ledgers.values()))[-1].t

    @property
    def trains_last(self) -> bool:
        """True if all runs have trained a stage at the last arrival, as with last_group=train. Then policies must."""
        return all(path[-1:] == (self.num_arrivals,) for path in self.ledgers)

    def model(self, path: Path) -> tuple[LedgerRow, bool]:
        """Return a row with the scores of the model of a path and the cost of its last stage, and whether it is exact.

        Raise RunError if no run has trained a stage at this arrival.
        """
        if (models := self._models.get(_last(path))) is None:
            raise RunError(f"no run has trained a stage at arrival {path[-1]}: add one, with wait=[{path[-1]}]")
        found = nearest(path, models)
        return models[found], found == path or self.forgets_path

    def error_before(self, path: Path, t: int) -> tuple[float, bool]:
        """Return the error that is known at arrival t about the model of a path, and whether it is exact.

        If the model, or the most similar one, was not scored at t, the arrival nearest to t counts. The error is NaN if
        none was scored.
        """
        row, is_exact = self.model(path)
        if row.scores.error_rate is None:
            found = known_error(None, [row.scores])
            return (math.nan if found is None else found), is_exact
        if not (scored := self._ahead.get(_last(path))):
            return math.nan, False
        arrival = t if t in scored else min(scored, key=lambda arrival: (abs(arrival - t), arrival))
        other = nearest(path, scored[arrival])
        error = known_error([scored[arrival][other]], [])
        assert error is not None  # the predictors of images have an error rate
        return error, arrival == t and (other == path or self.forgets_path)

    @property
    def known_errors(self) -> list[float]:
        """All errors that a policy can know (see `History.errors`)."""
        models = (row.scores for by_path in self._models.values() for row in by_path.values())
        ahead = (one for scored in self._ahead.values() for by_path in scored.values() for one in by_path.values())
        found = [*(known_error(None, [one]) for one in models), *(known_error([one], []) for one in ahead)]
        return [error for error in found if error is not None]

    def rows(self, path: Path) -> list[LedgerRow]:
        """Return the rows of the ledger that a run with this path has, or would have."""
        if path in self.ledgers:
            return list(self.ledgers[path])
        rows = []
        for t in range(self.num_arrivals + 1):
            part = tuple(one for one in path if one <= t)
            row, is_new = self.model(part)[0], t in path
            rows.append(LedgerRow(t, len(part), is_new, row.scores, row.spent if is_new else Spent()))
        return rows

    def outcome(self, path: Path) -> Outcome:
        """Return what a path costs. The other fields of `Outcome` keep their defaults."""
        rows = self.rows(path)
        if rows[-1].scores.error_rate is not None:
            error = cumulative_error_rate(rows, self.first)
        else:
            error = sum(_charged(row) for row in rows if row.t >= 1)
        return Outcome(path, error, cumulative_flops(rows) / 1e12)

    def simulate(self, policy: Policy, price: float = 0.0) -> Outcome:
        """Return the outcome of a policy. It is asked at each arrival, and sees what is known then.

        Raise RunError if it trains at an arrival at which no run has trained.
        """
        path: Path = ()
        errors: list[float] = []
        tflop: list[float] = []
        num_estimated = 0
        for t in range(1, self.num_arrivals + 1):
            error, is_exact = self.error_before(path, t)
            errors.append(error)
            try:
                next_tflop = self.model((*path, t))[0].spent.train_flops / 1e12
            except RunError:
                next_tflop = math.nan
            history = History(t, path, tuple(errors), tuple(tflop), next_tflop, price)
            if policy(history) or (self.trains_last and t == self.num_arrivals):
                path = (*path, t)
                tflop.append(next_tflop)
            row, is_measured = self.model(path)
            # If all runs train at the first arrival, the untrained language model was scored on a sample only.
            num_estimated += not (is_measured and is_exact) or bool(row.scores.scored_tokens)
        found = self.outcome(path)
        return Outcome(path, found.error, found.tflop, sum(errors[1:]), tuple(errors), num_estimated)

    def best(self, price: float = 0.0) -> Outcome:
        """Return the outcome of the path with the lowest cost, in hindsight, of all paths whose models are exact."""
        if not self.forgets_path:
            return min(map(self.outcome, self.ledgers), key=lambda outcome: outcome.cost(price))
        costs: dict[Path, float] = {(): 0.0}
        """The cost so far of the best path to each last stage."""
        for t in range(1, self.num_arrivals + 1):
            if t in self._models:
                before = min(costs, key=lambda path: costs[path])
                new = (*before, t), costs[before] + price * self.model((t,))[0].spent.train_flops / 1e12
                costs = dict([new] if self.trains_last and t == self.num_arrivals else [*costs.items(), new])
            for path in costs:
                costs[path] += _charged(self.model(path)[0])
        return self.outcome(min(costs, key=lambda path: costs[path]))

    def estimation_errors(self) -> list[tuple[float, float]]:
        """Leave each ledger out, estimate it from the others, and return how far the estimate is from it.

        Each entry has the differences of the error and of the training cost, as fractions of those of the ledger.
        Ledgers with a stage at an arrival at which no other run has trained are left out.
        """
        found = []
        for path in self.ledgers:
            others = {other: rows for other, rows in self.ledgers.items() if other != path}
            try:
                estimate = Matrix(others, self.forgets_path, self.first).outcome(path) if others else None
            except RunError:
                continue
            if estimate is not None:
                true = self.outcome(path)
                cost = abs(estimate.tflop - true.tflop) / (true.tflop or 1)  # a run without a stage costs nothing
                found.append((abs(estimate.error - true.error) / (true.error or 1), cost))
        return found


def _charged(row: LedgerRow) -> float:
    """Return the test error rate or perplexity of a row."""
    value = row.scores.perplexity if row.scores.error_rate is None else row.scores.error_rate
    assert value is not None  # `Scores` has one of them
    return value
