"""The three objectives: what "best" means on the page and in the tables of a report.

all     the average over all arrivals t = 1..B. Arrivals before the first stage count, with the untrained learner
after   the average over the arrivals from the first stage on
final   the result after the last arrival

Error rates are averaged as they are. Perplexities are averaged as logarithms (geometric mean), because the logarithm of
a perplexity is a mean loss per token. With the arithmetic mean, the perplexity of an untrained model, which is about
the size of the vocabulary, would outweigh all others. The paper's arithmetic mean is `Numbers.quality`.

The default is "all" for vision and for language models. Under "after", waiting costs nothing, so that the run that
waits for all data would always be best. An untrained language model has about the loss of a uniform guess, ln(V) for V
symbols, as an untrained classifier has about the error of a guess. So both can be charged.

Each objective has a value on test data, which the report shows, and a score on validation data, by which it chooses.
"""

import math
from typing import Literal

import numpy as np

from fairseq_alma.report.grouping import first_charged_arrival
from fairseq_alma.report.runs import Array, Comparison, Run, RunGroup

Objective = Literal["all", "after", "final"]
OBJECTIVES: tuple[Objective, ...] = ("all", "after", "final")
DEFAULT: Objective = "all"
"""The objective of the tables, and of the page until the user chooses another one."""

Rule = Literal["prequential", "validation"]
"""By which validation data the best group of a comparison is chosen. `rule_of` describes the two rules."""

LAST_PART = 10
"""The final validation error is measured on the validation data of the last B / LAST_PART mega-batches, rounded up."""


def is_vision_run(run: Run) -> bool:
    """Return True for a run of alma-vision, False for a run of alma-lm."""
    return "dataset" in run.settings


def value_on_test(run: Run, objective: Objective) -> float | None:
    """Return the value of a finished run under an objective, on test data: an error rate (a fraction) or a perplexity.

    It is infinite for a run that diverged, and None if the run has no stage, or a perplexity is not a number.
    """
    return _average(run, run.quality, objective, first_charged_arrival(run.settings))


def rule_of(comparison: Comparison, objective: Objective = DEFAULT) -> Rule:
    """Return the rule by which the best group of a comparison is chosen.

    "prequential": the prequential score. It is used if all runs have it that could be chosen by the other rule.
    "validation": the score on the data that also chose the epoch or checkpoint of each stage. In vision, this score is
        too low for small waits.

    In vision, the objective "final" always uses the rule "validation", because no data arrive after the last stage.
    Language models have one validation set, and always use the rule "prequential".
    """
    if not comparison.is_vision:
        return "prequential"
    if objective == "final":
        return "validation"
    return "validation" if groups_without_prequential(comparison, objective) else "prequential"


def groups_without_prequential(comparison: Comparison, objective: Objective = DEFAULT) -> list[RunGroup]:
    """Return the finished groups with a run that has validation values for all arrivals, but no prequential score."""

    def is_without(run: Run) -> bool:
        return (
            validation_score(run, objective, "prequential") is None
            and validation_score(run, objective, "validation", untrained=1.0) is not None
        )

    return [group for group in comparison.finished_groups if any(map(is_without, group.counted_runs))]


def validation_score(run: Run, objective: Objective, rule: Rule, untrained: float = math.nan) -> float | None:
    """Return the score of a finished run under an objective, on validation data. The lowest score is the best.

    It is an error rate (a fraction) or a perplexity; None if the run has no stage, or if a value is missing in its
    ledger.

    Args:
        run: a finished run.
        objective: the objective.
        rule: the validation data that are used (see `rule_of`). Language models have the same score by both rules.
        untrained: error rate of the untrained learner. The rule "validation" uses it for arrivals before the first
            stage, for which a vision ledger has no validation values. Give the same number for all runs of a
            comparison.
    """
    if not is_vision_run(run):
        return _finite(_average(run, run.validation, objective, first=1))
    if objective == "final":
        return _finite(_late_validation(run))
    if rule == "prequential":
        # The row of arrival t scores the predictor from before this arrival. So the first score is in row 2.
        trained = run.stage[1:-1] > 0
        values = run.prequential[2:]
        values = values[trained] if objective == "after" else values
        return _finite(float(values.mean())) if len(values) else None
    values = np.where(np.isnan(run.validation) & (run.stage == 0), untrained, run.validation)
    return _finite(_average(run, values, objective, first=1))


def _average(run: Run, values: Array, objective: Objective, first: int) -> float | None:
    """Return the average of values [T + 1] over the arrivals that an objective counts; None if there are none.

    `first` is the first arrival that the objective "all" counts, 0 or 1.
    """
    if objective == "all":
        counted = values[first:]
    elif objective == "after":
        counted = values[1:][run.stage[1:] > 0]
    else:
        counted = values[-1:]
    if not len(counted) or (not is_vision_run(run) and not (counted > 0).all()):
        return None
    if is_vision_run(run) or len(counted) == 1:
        return float(counted.mean())
    with np.errstate(over="ignore"):
        return float(np.exp(np.log(counted).mean()))


def _late_validation(run: Run) -> float | None:
    """Return the mean validation error on the last mega-batches, each measured after the stage that trained on it.

    A single mega-batch can have very few validation examples: 12 on MNIST with B = 500. An error of 0.00 on them says
    little. So the last B / LAST_PART mega-batches are used. Each run is measured on the data of the same mega-batches,
    however long it waits.
    """
    updates = np.flatnonzero(np.diff(run.stage) > 0) + 1
    if not len(updates):
        return None
    last_t = run.last_t
    mega_batches = np.arange(last_t - math.ceil(last_t / LAST_PART) + 1, last_t + 1)
    stage_ends = np.searchsorted(updates, mega_batches)
    return float(run.validation[updates[np.minimum(stage_ends, len(updates) - 1)]].mean())


def _finite(value: float | None) -> float | None:
    """Return the value, or None if it is not a number. Infinity, the score of a run that diverged, is kept."""
    return None if value is None or math.isnan(value) else value


# ---- names
def objective_name(objective: Objective, is_vision: bool) -> str:
    """Return the name of the value of an objective, such as "average error over all arrivals"."""
    if objective == "final":
        return "final error" if is_vision else "final perplexity"
    kind = "average error" if is_vision else "geometric mean perplexity"
    return f"{kind} {'over all arrivals' if objective == 'all' else 'after the first stage'}"


def value_explanation(objective: Objective, is_vision: bool) -> str:
    """Return a sentence that says what the value of an objective is. It is measured on test data."""
    kind, mean = ("error", "mean") if is_vision else ("perplexity", "geometric mean")
    return {
        "all": f"The {mean} of the test {kind} after each arrival. Before the first stage, it is that of the untrained "
        "network, so waiting costs something.",
        "after": f"The {mean} of the test {kind} after each arrival from the first stage on. Waiting costs nothing.",
        "final": f"The {kind} on the test data after the last arrival.",
    }[objective]


def score_name(comparison: Comparison, objective: Objective = DEFAULT) -> str:
    """Return the name of the score by which the best group of a comparison is chosen under an objective."""
    quality = "error" if comparison.is_vision else "perplexity"
    if objective == "final":
        return f"final validation {quality}"
    kind = "prequential" if rule_of(comparison, objective) == "prequential" else "average validation"
    return f"{kind} {quality}{' after the first stage' if objective == 'after' else ''}"


def score_scale(comparison: Comparison) -> int:
    """Return the factor that multiplies values and scores where they are shown: 100 for error rates, otherwise 1."""
    return 100 if comparison.is_vision else 1


def explanation(comparison: Comparison, objective: Objective = DEFAULT) -> str:
    """Return sentences that say by which score the best group is chosen under an objective, and why."""
    name = score_name(comparison, objective).capitalize()
    which = {"all": "all arrivals, untrained ones included", "after": "the arrivals after the first stage"}
    if objective == "final" and comparison.is_vision:
        number = math.ceil(comparison.num_arrivals / LAST_PART)
        return (
            f"{name}: the error on the validation data of the last {f'{number} ' if number > 1 else ''}mega-batch"
            f"{'es' if number > 1 else ''}, measured after the stage that trained on them. These data also chose the "
            "epoch of the stage, so the error is too low for small waits. No data arrive after the last stage, so it "
            "has no prequential error."
        )
    if objective == "final":
        return f"{name}: on the validation set, after the last arrival."
    if not comparison.is_vision:
        return f"{name}: the geometric mean of the perplexity on the validation set, over {which[objective]}."
    if rule_of(comparison, objective) == "prequential":
        return (
            f"{name}: the mean error on the validation data of each mega-batch, measured when it arrives, before any "
            f"stage uses it; over {which[objective]}."
        )
    # Count groups, because the reader of a report knows a group (one setting, all its seeds) as one run.
    num_without, num_runs = len(groups_without_prequential(comparison, objective)), len(comparison.finished_groups)
    after = ("", "") if objective == "all" else (" after the first stage", ", or their first stage is the last arrival")
    return (
        f"Here the error is averaged over the validation data of the stages, because {num_without} of {num_runs} "
        f"finished runs have no prequential score{after[0]}: their ledgers have no prequential errors, or only one "
        f"mega-batch arrived{after[1]}. The same data chose the epoch of each stage, so this score is too low for "
        "small waits."
    )
