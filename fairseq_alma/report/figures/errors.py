"""The error matrix of a group of runs: error rate on each mega-batch and on each class, after each arrival."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_alma.core.error_matrix import FILE, read_errors
from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures.style import HEIGHT, WIDTH, add_note, best_by_validation
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, RunGroup

MAX_CLASS_LABELS = 30
"""Maximum number of classes whose names or numbers are written below the panel."""


def error_maps(
    comparison: Comparison, numbers: Sequence[Numbers]
) -> Iterator[tuple[str, Callable[[], Figure]]]:  # fmt: skip
    """Yield (file name without suffix, function that draws the error map) for each group of runs with error matrices.

    If more than MAX_GROUPS groups have them, only the groups with the best validation scores get a map.
    """
    has_matrix = [i for i, group in enumerate(comparison.groups) if (group.counted_runs[0].folder / FILE).exists()]
    for number, i in enumerate(best_by_validation(has_matrix, numbers), start=1):
        group, title = comparison.groups[i], comparison.label_of(comparison.groups[i])
        yield f"errors_{number}", partial(error_map, group, _with_metrics(title, numbers[i]))


def error_map(group: RunGroup, title: str) -> Figure:
    """Draw the error matrix of a group as two heat maps: by mega-batch and by class. The mean over seeds is drawn.

    A row is an arrival, from t = 0 at the top. Error rates that were not measured are grey.

    Raises:
        RunError: if an error matrix is missing or damaged.
    """
    by_mega_batch, by_class, names = _mean_matrices(group)
    figure = Figure(figsize=(2 * WIDTH + 0.8, HEIGHT + 0.8), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True)
    known = [values[np.isfinite(values)] for values in (by_mega_batch, by_class)]
    largest = 100 * max((values.max() for values in known if values.size), default=1.0)
    colours = colormaps["viridis"].with_extremes(bad="#cccccc")
    last = len(by_mega_batch) - 1
    for axes, values, first in ((left, by_mega_batch, 1), (right, by_class, 0)):
        width = max(1, values.shape[1])
        image = axes.imshow(
            100 * values if values.size else np.full((last + 1, 1), np.nan), aspect="auto", cmap=colours,
            interpolation="nearest", vmin=0, vmax=largest, extent=(first - 0.5, first + width - 0.5, last + 0.5, -0.5),
        )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.tick_params(labelsize=8)
    left.set(xlabel="mega-batch (validation data)", ylabel="mega-batches arrived")
    right.set(xlabel="class (test data)")
    if names is not None and len(names) <= MAX_CLASS_LABELS:
        right.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    figure.colorbar(image, ax=[left, right], label="error, %")
    figure.suptitle(title, fontsize=9)
    add_note(figure, "below the diagonal, a column shows how the error on a mega-batch changes after it arrived")
    return figure


def _mean_matrices(group: RunGroup) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """Return the mean over seeds of the error matrices of a group, and the names of the classes.

    Returns:
        Error rates [arrivals + 1, mega-batches] and [arrivals + 1, classes]; NaN if a seed has no value.
    """
    matrices = []
    for run in group.counted_runs:
        errors = read_errors(run.folder, run.stage[: group.last_t + 1].tolist())
        if errors is None:
            raise RunError(f"{run.folder / FILE} is missing, but other seeds of this run have it: restore the file")
        matrices.append(errors)
    # An extended run has more mega-batches than one of another seed that is not extended yet.
    by_mega_batch = [np.array(errors.by_mega_batch) for errors in matrices]
    width = min(values.shape[1] for values in by_mega_batch)
    return (
        np.mean([values[:, :width] for values in by_mega_batch], axis=0),
        np.mean([np.array(errors.by_class) for errors in matrices], axis=0),
        matrices[0].class_names,
    )


def _with_metrics(title: str, numbers: Numbers) -> str:
    """Return the title of a map, with a second line that has forgetting and transfer, if they are known."""
    named = (
        ("forgetting", numbers.forgetting),
        ("backward transfer", numbers.backward_transfer),
        ("forward transfer", numbers.forward_transfer),
    )
    texts = [f"{name} {estimate.text(2, 100)} %" for name, estimate in named if estimate]
    return title + ("\n" + ", ".join(texts) if texts else "")
