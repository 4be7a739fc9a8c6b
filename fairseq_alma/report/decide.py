"""Compare policies that decide when to train, on the paths that finished runs have measured: `alma-report decide`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fairseq_alma.core.catalogue import Program
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.replay import Replay
from fairseq_alma.core.waiting import Wait, check_wait
from fairseq_alma.report.grouping import first_charged_arrival
from fairseq_alma.report.numbers import Estimate
from fairseq_alma.report.policies import FAMILIES, Family, Policy, fixed_waits, waiting
from fairseq_alma.report.runs import ReportData, RunGroup, group_label, hashable
from fairseq_alma.report.simulation import Matrix, Outcome, path_of
from fairseq_alma.report.tables import Table, table_of_rows

MAX_SHOWN = 20
"""Maximum number of stages of a path that a table lists."""


@dataclass(frozen=True)
class Subject:
    """One learner on one stream: the measured paths of each seed."""

    program: Program
    stream: str
    learner: str
    slug: str
    replay: Replay
    matrices: Mapping[int | None, Matrix]

    @property
    def num_arrivals(self) -> int:
        return next(iter(self.matrices.values())).num_arrivals


def subjects_of(data: ReportData) -> list[Subject]:
    """Return each learner on each stream that has a finished run, for runs that differ only in when they train.

    Runs that were forked and runs with skipped mega-batches are left out, with a note in `data.notes`.
    """
    found: list[Subject] = []
    for comparison in data.comparisons:
        alike: dict[object, list[RunGroup]] = {}
        for group in comparison.finished_groups:
            rest = {name: value for name, value in group.settings.items() if name not in ("wait", "last_group")}
            alike.setdefault(hashable(rest), []).append(group)
        names = [name for name in comparison.varied_settings if name not in ("wait", "last_group")]
        for number, groups in enumerate(alike.values(), start=1):
            ledgers: dict[int | None, dict] = {}
            for run in (run for group in groups for run in group.counted_runs):
                if any(row.is_skipped or row.changed_settings for row in run.rows):
                    data.notes.append(f"{run.folder} is left out: it was forked, or has skipped mega-batches")
                else:
                    ledgers.setdefault(run.seed, {}).setdefault(path_of(run.rows), run.rows)
            if ledgers:
                first, settings = first_charged_arrival(groups[0].runs[0].settings), groups[0].settings
                sizes = {
                    row.scores.num_params for paths in ledgers.values() for rows in paths.values() for row in rows[1:]
                    if row.stage
                }  # fmt: skip
                # The size of a model that grows depends on the number of stages before.
                forgets = _forgets_path(settings) and len(sizes) == 1
                slug = f"{comparison.slug}_{number}" if len(alike) > 1 else comparison.slug
                while slug in {one.slug for one in found}:  # another comparison may have this name
                    slug += "_"
                found.append(
                    Subject(
                        comparison.program, comparison.name, group_label(groups[0], names),
                        slug, groups[0].replay,
                        {seed: Matrix(paths, forgets, first) for seed, paths in sorted(ledgers.items(), key=str)},
                    )
                )  # fmt: skip
    return found


def _forgets_path(settings: Mapping[str, object]) -> bool:
    """Return whether each stage trains new networks on all mega-batches so far, with updates that follow from these."""
    is_new = bool(settings.get("from_scratch")) and settings.get("replay") == "all"
    return is_new and not settings.get("updates_per_mega_batch")


def policy_named(name: str, replay: Replay = False) -> Policy:
    """Return the policy that `--policy` names: a value of `wait`, FAMILY:NUMBER, or a function as MODULE:FUNCTION.

    Raise SettingError if there is no such policy.
    """
    kind, _, number = name.partition(":")
    if kind in FAMILIES:
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (kind == "cara-periodic" and (value < 1 or value != round(value))):
            raise SettingError(f"--policy {name}: expected {kind}:NUMBER, for example {kind}:1")
        return FAMILIES[kind].make(value)
    if kind.isdigit() or kind in ("geometric", "auto") or name.startswith("["):
        wait: Wait = int(name) if name.isdigit() else name
        if name.startswith("["):
            with suppress(ValueError):
                wait = json.loads(name)
        check_wait(wait)
        return waiting(wait, replay)
    # Imported here, because it imports Hydra, which alma-report does not need.
    from fairseq_alma.app.plugins import call_own_function, load_function

    function = load_function("--policy", name)
    return lambda history: bool(call_own_function(f"--policy {name}", function, history))


def compare(data: ReportData, price: float = 0.0, names: Sequence[str] = ()) -> list["PolicyOutcomes"]:
    """Simulate all policies for each learner on each stream.

    Args:
        data: the runs that were read.
        price: what one TFLOP of training costs, in the unit of the summed error.
        names: further policies (see `policy_named`).

    Raise RunError if no run is finished.
    """
    subjects = subjects_of(data)
    if not subjects:
        raise RunError("no run is finished, so there is no path to compare policies on: continue the runs")
    known_costs: dict[tuple[int, str, float], float] = {}
    return [PolicyOutcomes(subject, subjects, price, names, known_costs) for subject in subjects]


def tables(compared: Sequence["PolicyOutcomes"]) -> dict[str, Table]:
    """Return slug -> table of the policies for each learner on each stream."""
    return {one.subject.slug: one.table() for one in compared}


class PolicyOutcomes:
    """The outcomes of all policies for one learner on one stream."""

    def __init__(
        self,
        subject: Subject,
        subjects: Sequence[Subject],
        price: float,
        names: Sequence[str],
        known_costs: dict[tuple[int, str, float], float],
    ):
        self.subject, self.price, self._known_costs = subject, price, known_costs
        self._others = [one for one in subjects if one.stream != subject.stream and one.program == subject.program]
        self.best = {seed: matrix.best(price) for seed, matrix in subject.matrices.items()}
        self.outcomes: dict[str, dict[int | None, Outcome]] = {}
        """Policy -> seed -> outcome."""
        self.chosen: dict[str, list[float]] = {}
        """Family -> the numbers that were chosen, one for each seed."""
        self.unknown: dict[str, str] = {}
        """Policy -> why it has no outcome."""
        for text, policy in self._fixed(names):
            self._add(text, dict.fromkeys(subject.matrices, policy))
        for family in FAMILIES.values():
            numbers = {seed: self._choose(family, seed) for seed in subject.matrices}
            if None not in numbers.values():
                self.chosen[family.text] = [number for number in numbers.values() if number is not None]
                self._add(family.text, {seed: family.make(n) for seed, n in numbers.items() if n is not None})

    def _fixed(self, names: Sequence[str]) -> Iterator[tuple[str, Policy]]:
        """Yield the policies without a choice, by the text that names them."""
        longest, replay = self.subject.num_arrivals, self.subject.replay
        for wait in fixed_waits(longest):
            yield f"wait {wait}", waiting(wait)
        for rule in ("geometric", "auto"):
            yield f"wait {rule}", waiting(rule, replay)
        for name in names:
            yield name, policy_named(name, replay)

    def _add(self, text: str, policies: Mapping[int | None, Policy]) -> None:
        """Simulate a policy for each seed. If a path cannot be known, keep the reason instead."""
        try:
            self.outcomes[text] = {
                seed: self.subject.matrices[seed].simulate(policy, self.price) for seed, policy in policies.items()
            }
        except RunError as error:
            self.unknown[text] = str(error)

    def _choose(self, family: Family, seed: int | None) -> float | None:
        """Return the number of a family with the lowest cost elsewhere; None if there is nowhere else.

        Elsewhere is on all other streams, or, if there is only one stream, on its other seeds. The errors that count
        are those that the policies know, so no test score is used.
        """
        elsewhere = [matrix for other in self._others for matrix in other.matrices.values()]
        elsewhere = elsewhere or [matrix for key, matrix in self.subject.matrices.items() if key != seed]
        if not elsewhere:
            return None
        known = [error for matrix in elsewhere for error in matrix.known_errors]
        costs = {}
        for number in family.grid(known, max(matrix.num_arrivals for matrix in elsewhere)):
            costs[number] = sum(self._known_cost(matrix, family, number) for matrix in elsewhere)
        finite = {number: cost for number, cost in costs.items() if math.isfinite(cost)}
        return min(finite, key=lambda number: finite[number]) if finite else None

    def _known_cost(self, matrix: Matrix, family: Family, number: float) -> float:
        """Return what a policy costs, with the errors that it knew instead of test errors; NaN if its path is unknown.

        The results are kept, because the same are needed for each seed and each stream.
        """
        key = id(matrix), family.text, number
        if key not in self._known_costs:
            try:
                outcome = matrix.simulate(family.make(number), self.price)
                self._known_costs[key] = outcome.known + self.price * outcome.tflop
            except RunError:
                self._known_costs[key] = math.nan
        return self._known_costs[key]

    def regret(self, text: str) -> dict[int | None, float]:
        """Return, for each seed, what a policy costs more than the best path in hindsight."""
        found = self.outcomes[text]
        return {seed: one.cost(self.price) - self.best[seed].cost(self.price) for seed, one in found.items()}

    def table(self) -> Table:
        """Return the table of the policies, the best one first."""
        order = sorted(self.outcomes, key=lambda text: sum(self.regret(text).values()))
        rows = [self._row("best path in hindsight", self.best, {})]
        rows += [self._row(text, self.outcomes[text], self.regret(text)) for text in order]
        return table_of_rows(
            "decide", f"{self.subject.stream}: when to train {self.subject.learner}", rows, self._note()
        )

    def _row(
        self, text: str, outcomes: Mapping[int | None, Outcome], regret: Mapping[int | None, float]
    ) -> dict[str, str]:
        of_seeds = list(outcomes.values())
        paths = dict.fromkeys(", ".join(map(str, one.path)) for one in of_seeds)
        longest = max(len(one.path) for one in of_seeds)
        numbers = dict.fromkeys(f"{number:.3g}" for number in self.chosen.get(text, []))
        return {
            "policy": text,
            "chosen": " or ".join(numbers),
            "seeds": str(len(of_seeds)),
            "CER" if self._is_vision else "summed perplexity": self._text([one.error for one in of_seeds]),
            "training TFLOP": f"{sum(one.tflop for one in of_seeds) / len(of_seeds):.3g}",
            "cost": self._text([one.cost(self.price) for one in of_seeds]) if self.price else "",
            "regret": self._text(list(regret.values())),
            "stages at": " or ".join(paths)
            if len(paths) <= 3 and longest <= MAX_SHOWN
            else f"{len(paths)} path{'s' * (len(paths) > 1)}",
            "estimated": f"{sum(one.num_estimated for one in of_seeds)}" if regret else "",
        }

    @property
    def _is_vision(self) -> bool:
        return self.subject.program == "vision"

    def _text(self, values: Sequence[float]) -> str:
        estimate = Estimate.of(values)
        return estimate.text(digits=3 if self._is_vision else 1) if estimate else ""

    def _note(self) -> str:
        matrices = list(self.subject.matrices.values())
        num_paths, num_arrivals = max(len(one.ledgers) for one in matrices), self.subject.num_arrivals
        notes = [
            f"Regret: the cost above that of the best path whose models were all measured ({num_paths} paths were "
            "run). That path is found by test data, for each seed."
        ]
        if self.price:
            notes.append(f"Cost: the error plus {self.price:g} for each TFLOP.")
        if self.chosen:
            where = "all other streams" if self._others else "the other seeds"
            notes.append(f"Chosen: the number of the policy with the lowest known error plus cost on {where}.")
        differences = [one for matrix in matrices for one in matrix.estimation_errors()]
        total = f"Estimated: of {num_arrivals * len(matrices)} arrivals, those with an estimated model or known error"
        if differences:
            errors, costs = (sum(column) / len(column) for column in zip(*differences, strict=True))
            worst = max(error for error, _ in differences)
            quality = "CER" if self._is_vision else "summed perplexity"
            notes.append(
                f"{total}. If each of {len(differences)} ledgers is left out and estimated from the others, its "
                f"{quality} is off by {100 * errors:.2g}% on average and {100 * worst:.2g}% at most, and its training "
                f"FLOPs by {100 * costs:.2g}%."
            )
        else:
            notes.append(f"{total}; no ledger can be left out to test the estimate.")
        notes += [f"Not simulated: {text} ({reason})." for text, reason in self.unknown.items()]
        return " ".join(notes)


def over_streams(compared: Sequence[PolicyOutcomes]) -> Table:
    """Return the table of the regret of each policy, over all learners and streams and on each, the best one first.

    The regret of a seed is in % of the cost of its best path. Policies that were not simulated everywhere are left out.
    """
    percents: dict[str, list[Estimate]] = {}
    for one in compared:
        for text in one.outcomes:
            regret = one.regret(text)
            estimate = Estimate.of([100 * regret[seed] / best.cost(one.price) for seed, best in one.best.items()])
            assert estimate is not None  # there is at least one seed
            percents.setdefault(text, []).append(estimate)
    names = [f"{one.subject.stream}: {one.subject.learner}" for one in compared]
    if len({one.subject.learner for one in compared}) == 1:
        names = [one.subject.stream for one in compared]
    rows = []
    for text, on_each in percents.items():
        if len(on_each) == len(compared):
            over_all = Estimate.of([one.mean for one in on_each])
            assert over_all is not None
            by_stream = {name: one.text(digits=1) for name, one in zip(names, on_each, strict=True)}
            rows.append((over_all.mean, {"policy": text, "regret, %": over_all.text(digits=1), **by_stream}))
    note = (
        "Regret in % of the cost of the best path of the seed. First column: mean and standard error over learners and "
        "streams, each the mean over its seeds. The others: mean and standard error over the seeds."
    )
    ordered = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return table_of_rows("decide", f"{len(compared)} streams: regret of policies", ordered, note)
