"""The error matrix of a run: error rates on each mega-batch after each arrival. Forgetting and transfer use it.

RUN/errors.jsonl has one line for the untrained learner (stage 0) and one line for each stage:

stage            index of the stage
by_mega_batch    error rate on the validation data of each mega-batch of the run, in order of arrival
by_class         error rate on the test examples of each class; null for a class without test examples
class_names      only in the line of stage 0, and only if the names are known

Between stages the predictor does not change. So the file has no line for an arrival without a stage: `read_errors`
repeats the line of the last stage.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fairseq_alma.core.json_lines import JsonLines
from fairseq_alma.core.json_types import Fraction
from fairseq_alma.core.settings import NonNegative

logger = logging.getLogger(__name__)

FILE = "errors.jsonl"
TRANSFER_METRICS = ("forgetting", "backward_transfer", "forward_transfer")
"""Names of the metrics that `transfer_metrics` computes."""
DIGITS = 6
"""Number of decimals of the error rates in the file."""


@dataclass(frozen=True)
class ErrorMatrix:
    """Error rates after each arrival. Row t belongs to arrival t; row 0 to the untrained learner."""

    by_mega_batch: list[list[float]]
    """[arrivals + 1][mega-batches], where entry j - 1 of a row is the error rate on mega-batch j.

    NaN where the error rate was not measured: for mega-batches that were added to the run after the stage of the row,
    and for all mega-batches of a stage whose line is damaged."""
    by_class: list[list[float]]
    """[arrivals + 1][classes], on the test set; NaN for a class without test examples."""
    class_names: list[str] | None
    """Name of each class; None if the names are not known."""
    trained_at: list[int]
    """For each mega-batch that was trained on, the arrival at which its stage was trained."""


class ErrorFile:
    """Writes errors.jsonl in a run folder."""

    def __init__(self, folder: Path):
        self._lines = JsonLines(folder / FILE, durable=False)
        self._is_checked = False
        """Whether lines that a killed process wrote for unfinished stages have been removed from the file."""

    def add(
        self,
        stage: int,
        by_mega_batch: Sequence[float],
        by_class: Sequence[float | None],
        class_names: Sequence[str] | None = None,
    ) -> None:
        """Append the line of a stage.

        The first call removes lines that a killed process may have written for this stage and later ones.
        """
        names = {"class_names": list(class_names)} if class_names and stage == 0 else {}
        line = {
            "stage": stage,
            "by_mega_batch": [round(rate, DIGITS) for rate in by_mega_batch],
            "by_class": [None if rate is None else round(rate, DIGITS) for rate in by_class],
            **names,
        }
        if not self._is_checked:
            existed = self._lines.path.exists()
            kept = self._lines.keep_if(lambda before: before["stage"] < stage, _Line)
            if existed and stage and (not kept or kept[-1]["stage"] < stage - 1):
                logger.warning(
                    "%s has no line for stage %d: the file is damaged. The error rates there count as not measured",
                    self._lines.path,
                    stage - 1,
                )
            self._is_checked = True
        self._lines.append(line)


def read_errors(folder: Path, stages: Sequence[int]) -> ErrorMatrix | None:
    """Return the error matrix of a run, or None if the run has none. Raise RunError if errors.jsonl is damaged.

    `stages` has, for each row of the ledger, the index of the last finished stage (`LedgerRow.stage`).
    """
    path = folder / FILE
    if not path.exists():
        return None
    lines = {line["stage"]: line for line in JsonLines(path).values(_Line)}
    by_mega_batch = [_row(lines.get(stage), "by_mega_batch") for stage in stages]
    by_class = [_row(lines.get(stage), "by_class") for stage in stages]
    trained_at: list[int] = []
    for t, stage in enumerate(stages):
        if t and stage != stages[t - 1]:
            trained_at += [t] * (t - len(trained_at))
    return ErrorMatrix(
        # Mega-batches that arrived while the run had no error matrix are in no line.
        by_mega_batch=_padded(by_mega_batch, len(trained_at)),
        by_class=_padded(by_class),
        class_names=lines.get(0, {}).get("class_names"),
        trained_at=trained_at,
    )


class _Line(TypedDict):
    """A line of the file."""

    stage: NonNegative
    by_mega_batch: list[Fraction]
    by_class: list[Fraction | None]
    class_names: NotRequired[list[str]]


def _row(line: dict[str, Any] | None, key: str) -> list[float]:
    """Return the error rates in a line, with NaN for null. Return an empty list if there is no line."""
    return [math.nan if value is None else float(value) for value in (line or {}).get(key, [])]


def _padded(rows: list[list[float]], at_least: int = 0) -> list[list[float]]:
    """Return the rows with NaN at the end of the shorter ones: all are equally long, and at least `at_least`."""
    length = max(at_least, *map(len, rows)) if rows else 0
    return [row + [math.nan] * (length - len(row)) for row in rows]


def transfer_metrics(matrix: ErrorMatrix) -> dict[str, float]:
    """Return forgetting, backward transfer and forward transfer, computed from the validation data of the mega-batches.

    Let a(t, j) be the accuracy on mega-batch j after arrival t, s(j) the arrival at which the stage with mega-batch j
    was trained, and T the last arrival. With wait 1, s(j) = j. The metrics are means over mega-batches j:

    forgetting          max over s(j) <= t < T of a(t, j), minus a(T, j); mega-batches of all stages but the last
                        (Chaudhry et al. 2018)
    backward_transfer   a(T, j) - a(s(j), j); mega-batches of all stages but the last (Lopez-Paz and Ranzato 2017)
    forward_transfer    a(s(j) - 1, j) - a(0, j); mega-batches of all stages but the first (Lopez-Paz and Ranzato 2017)

    A mega-batch is left out of a metric if one of its values was not measured (see `ErrorMatrix`). A metric without any
    mega-batch is left out of the result. This is the case if the run has only one stage.

    `forgetting` has the maximum, as defined by Chaudhry et al. Avalanche uses a(s(j), j) instead of the maximum. Its
    forgetting is therefore the backward transfer with the opposite sign.
    """
    accuracy = [[1 - rate for rate in row] for row in matrix.by_mega_batch]
    last = len(accuracy) - 1
    differences: dict[str, list[float]] = {name: [] for name in TRANSFER_METRICS}
    for j, s in enumerate(matrix.trained_at):
        if s < matrix.trained_at[-1]:
            before = [accuracy[t][j] for t in range(s, last)]
            best = math.nan if any(map(math.isnan, before)) else max(before)
            differences["forgetting"].append(best - accuracy[last][j])
            differences["backward_transfer"].append(accuracy[last][j] - accuracy[s][j])
        if s > matrix.trained_at[0]:
            differences["forward_transfer"].append(accuracy[s - 1][j] - accuracy[0][j])
    known = {name: [value for value in values if not math.isnan(value)] for name, values in differences.items()}
    return {name: sum(values) / len(values) for name, values in known.items() if values}
