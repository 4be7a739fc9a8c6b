"""The matrix of losses by period, for streams in the order of a date, and TiC-LM's regret (Li et al. 2025).

Row t of the matrix belongs to the predictor after arrival t, and column j to the test text of period j. The regret is
the matrix minus the losses of a model that was trained once, on all periods, at the last arrival.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_alma.core.metrics import averages_by_part
from fairseq_alma.report.runs import Array, Comparison, Run, RunGroup

PARTS = {"backward": "backward", "in_distribution": "in-distribution", "forward": "forward"}
"""Parts of the matrix (see `fairseq_alma.core.metrics.period_averages`) -> how tables and figures name them."""


@dataclass(frozen=True)
class Reference:
    """The model with which the regret compares: trained once, on all periods, at the last arrival."""

    index: int
    """Index of its group in `Comparison.groups`."""
    losses: Array
    """Loss on each period, in nats per token, averaged over the seeds: [periods]."""


def matrix_of(group: RunGroup) -> Array | None:
    """Return the matrix of a group, averaged over the seeds: losses in nats per token, [arrivals, periods].

    A value is NaN if a seed has no loss of this period at this arrival, as in rows from before the stream was extended.
    The result is None if a seed has no losses at all.
    """
    runs = group.counted_runs
    if not all(run.period_losses for run in runs):
        return None
    width = max(len(row) for run in runs for row in run.period_losses.values())
    return np.mean([_rows(run, group.last_t, width) for run in runs], axis=0)


def _rows(run: Run, last_t: int, width: int) -> Array:
    matrix = np.full((last_t, width), np.nan)
    for t, row in run.period_losses.items():
        if t <= last_t:
            matrix[t - 1, : len(row)] = row
    return matrix


def common_periods(groups: Sequence[RunGroup]) -> dict[int, int]:
    """Return for each arrival the number of periods for which all runs that have a row have losses.

    A stream can be extended by new periods. A run from before that has fewer periods in its first rows than a run that
    began afterwards.
    """
    widths: dict[int, int] = {}
    for group in groups:
        for run in group.counted_runs:
            for t, row in run.period_losses.items():
                widths[t] = min(len(row), widths.get(t, len(row)))
    return widths


def has_left_out(groups: Sequence[RunGroup], widths: Mapping[int, int]) -> bool:
    """Return True if a run has losses that do not count (see `common_periods`)."""
    return any(
        len(row) > widths[t] for group in groups for run in group.counted_runs for t, row in run.period_losses.items()
    )


def period_averages_of(run: Run, widths: Mapping[int, int]) -> dict[str, float]:
    """Return the geometric mean of the perplexities in each part of a run's matrix; {} without a matrix.

    `widths` has, for each arrival, the number of periods that count (see `common_periods`).
    """
    counted = {t: row[: widths[t]] for t, row in run.period_losses.items()}
    return {part: float(np.exp(loss)) for part, loss in averages_by_part(counted).items()}


def reference_of(comparison: Comparison) -> Reference | None:
    """Return the reference of a comparison; None if it has no finished run that was trained once, on everything.

    Of several, the one with the lowest validation perplexity is chosen.
    """
    found: list[tuple[float, Reference]] = []
    for index, group in enumerate(comparison.groups):
        matrix = matrix_of(group) if group.is_finished and _is_trained_once(group) else None
        if matrix is not None and np.isfinite(matrix[-1]).all():
            validation = float(group.mean_column("validation")[-1])
            found.append((validation, Reference(index, matrix[-1])))
    return min(found, key=lambda one: one[0])[1] if found else None


def _is_trained_once(group: RunGroup) -> bool:
    """Return True if the only stage of the runs has trained on everything, and the stream has several mega-batches."""
    return group.last_t > 1 and all(
        run.stage[run.last_t - 1] == 0 < run.stage[run.last_t] and not any(row.is_skipped for row in run.rows)
        for run in group.counted_runs
    )


def regret_of(group: RunGroup, reference: Reference, widths: Mapping[int, int]) -> dict[str, float]:
    """Return the mean regret of a group over each part of its matrix, in nats per token; {} without a matrix.

    Values that are missing, and periods that the group or the reference does not have, are left out. `widths` has, for
    each arrival, the number of periods that count (see `common_periods`).
    """
    matrix = matrix_of(group)
    if matrix is None:
        return {}
    width = min(matrix.shape[1], len(reference.losses))
    differences = matrix[:, :width] - reference.losses[:width]
    counted = {t: row[: widths.get(t, width)] for t, row in enumerate(differences.tolist(), start=1)}
    return averages_by_part(counted)
