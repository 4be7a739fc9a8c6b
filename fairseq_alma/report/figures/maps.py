"""Heat maps of the best runs.

expert_loads            load of each expert, and overflow, over the stream
perplexities_by_period  streams in the order of a date: test perplexity on each period after each arrival
error_maps              error rate on each mega-batch and on each class after each arrival

The load of an expert is the fraction of the validation data that the expert receives. An expert can process only a
limited number of tokens of a batch. The overflow is the fraction of the tokens that were dropped because the expert
chosen for them was full.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fairseq_alma.core.error_matrix import FILE, read_errors
from fairseq_alma.core.errors import RunError
from fairseq_alma.report.figures.style import FEW_ARRIVALS, HEIGHT, WIDTH, add_note, best_by_validation
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.periods import matrix_of
from fairseq_alma.report.runs import Array, Comparison, Run, RunGroup

MAX_WRITTEN = 8
"""Maximum number of periods and of arrivals with which the perplexities are also written into the cells."""
MAX_CLASS_LABELS = 30
"""Maximum number of classes whose names or numbers are written below the panel."""


def _integer_ticks(axes: Axes, number: int, label_size: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(number, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(number, integer=True))
    axes.tick_params(labelsize=label_size)


def _draw_matrix(axes: Axes, values: Array, first: tuple[float, float], **more: Any):
    """Draw a matrix whose first column and first row have the numbers `first`. NaN is grey. Return the image."""
    rows, columns = values.shape
    left, top = first[0] - 0.5, first[1] - 0.5
    image = axes.imshow(
        values, aspect="auto", cmap=colormaps["viridis"].with_extremes(bad="#cccccc"), interpolation="nearest",
        extent=(left, left + columns, top + rows, top), **more,
    )  # fmt: skip
    _integer_ticks(axes, 8, 8)
    return image


# ---- experts
def expert_loads(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the load of each expert in the first and in the last mixture layer, and the overflow, over the stream.

    Each row of panels shows the run with the first seed of one group: of those with the best validation scores, at most
    MAX_GROUPS. The result is None if no group has a mixture layer with two or more experts.
    """
    has_mixture = [
        i
        for i, group in enumerate(comparison.groups)
        if any(len(layer) > 1 for layers in group.counted_runs[0].expert_load.values() for layer in layers)
    ]
    groups = [comparison.groups[i] for i in best_by_validation(has_mixture, numbers)]
    if not groups:
        return None
    runs = [group.counted_runs[0] for group in groups]
    has_overflow = any(np.nanmax(np.nan_to_num(run.overflow)) > 0 for run in runs)
    num_layers = max(max(map(len, run.expert_load.values())) for run in runs)
    num_columns = min(2, num_layers) + has_overflow
    size = (WIDTH * num_columns + 0.8, (HEIGHT - 0.6) * len(runs) + 0.4)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    panels = figure.subplots(len(runs), num_columns, squeeze=False)
    for row, group, run in zip(panels, groups, runs, strict=True):
        label = comparison.label_of(group)
        for axes, layer in zip(row, [0] if num_layers == 1 else [0, -1], strict=False):
            image = _draw_load(axes, run, layer)
            layer_name = "first mixture" if layer == 0 else "last mixture"
            axes.set_title(label if layer == 0 and num_columns == 1 else f"{label}\n{layer_name}", fontsize=8)
            figure.colorbar(image, ax=axes, label="load / even load").ax.tick_params(labelsize=7)
        if has_overflow:
            trained = run.stage > 0
            row[-1].plot(np.flatnonzero(trained), 100 * run.overflow[trained], color="#D55E00", marker=".", linewidth=1)
            row[-1].set(ylim=(0, None))
            row[-1].set_ylabel("overflow, % of tokens", fontsize=8)
        for axes in row:
            axes.set_xlabel("mega-batches arrived", fontsize=8)
            _integer_ticks(axes, 6, 7)
    return figure


def load_map(run: Run, layer: int) -> tuple[list[int], np.ndarray]:
    """Return the load of each expert of a mixture layer, relative to an even load, 1 / (number of experts).

    Returns:
        The arrivals at which the loads were recorded, and an array [experts, arrivals] with the relative loads: NaN at
            arrivals at which an expert did not exist yet.
    """
    times = sorted(run.expert_load)
    loads = [run.expert_load[t][layer] for t in times]
    table = np.full((max(map(len, loads)), len(times)), np.nan)
    for column, load in enumerate(loads):
        table[: len(load), column] = np.array(load) * len(load)
    return times, table


def _draw_load(axes: Axes, run: Run, layer: int):
    """Draw the relative load of each expert: one row per expert, one column per recorded arrival. Return the image."""
    times, table = load_map(run, layer)
    # Each column begins at its arrival and ends where the next one begins. The last one is as wide as the one before.
    edges = np.array([*times, 2 * times[-1] - times[-2] if len(times) > 1 else times[-1] + 1], float)
    if times[-1] <= FEW_ARRIVALS:
        edges -= 0.5  # columns of width 1 are centred on their arrivals
    image = axes.pcolormesh(
        edges, np.arange(len(table) + 1) - 0.5, table, cmap="viridis", vmin=0, vmax=max(2.0, np.nanmax(table))
    )
    axes.set_ylabel("expert", fontsize=8)
    return image


# ---- periods
def perplexities_by_period(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the matrix of the runs with the best validation scores, one panel each, on one scale of colours.

    A row is an arrival, a column a period. Below the diagonal are periods of the past, above it those of the future.
    Untrained learners are grey. The result is None if no run has been scored by period.
    """
    matrices = {i: matrix for i, group in enumerate(comparison.groups) if (matrix := matrix_of(group)) is not None}
    for i, matrix in matrices.items():
        matrix[comparison.groups[i].mean_column("stage")[1:] < 1] = np.nan
    shown = best_by_validation([i for i, matrix in matrices.items() if np.isfinite(matrix).any()], numbers)
    if not shown:
        return None
    known = np.concatenate([np.exp(matrices[i][np.isfinite(matrices[i])]) for i in shown])
    norm = LogNorm(known.min(), max(known.max(), known.min() * 1.01))
    figure = Figure(figsize=(WIDTH * len(shown) + 0.8, HEIGHT + 0.8), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0].tolist()
    for axes, i in zip(panels, shown, strict=True):
        image = _draw_periods(axes, np.exp(matrices[i]), norm)
        axes.set_title(comparison.label_of(comparison.groups[i]), fontsize=9)
    panels[0].set_ylabel("mega-batches arrived")
    bar = figure.colorbar(image, ax=panels, label="test perplexity")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    add_note(figure, "white line: above it, periods that have not arrived yet; grey: untrained")
    return figure


def _draw_periods(axes: Axes, perplexities: Array, norm: LogNorm):
    """Draw a matrix [arrivals, periods], with the step line between past and future. Return the image."""
    num_arrivals, num_periods = perplexities.shape
    image = _draw_matrix(axes, perplexities, first=(1, 1), norm=norm)
    steps = np.arange(num_arrivals + 1) + 0.5
    axes.step(steps, steps, where="post", color="white", linewidth=1.2)
    axes.set(xlim=(0.5, num_periods + 0.5), ylim=(num_arrivals + 0.5, 0.5), xlabel="period (test text)")
    if max(num_arrivals, num_periods) <= MAX_WRITTEN:
        for (t, j), value in np.ndenumerate(perplexities):
            if np.isfinite(value):
                colour = "black" if norm(value) > 0.6 else "white"
                axes.text(j + 1, t + 1, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)
    return image


# ---- error matrices
def error_maps(comparison: Comparison, numbers: Sequence[Numbers]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield (file name without suffix, function that draws the error map) for each group of runs with error matrices.

    Of more than MAX_GROUPS groups, only those with the best validation scores get a map.
    """
    has_matrix = [i for i, group in enumerate(comparison.groups) if (group.counted_runs[0].folder / FILE).exists()]
    for number, i in enumerate(best_by_validation(has_matrix, numbers), start=1):
        metrics = ", ".join(f"{name} {one.text(2, 100)} %" for name, one in numbers[i].transfer.items())
        title = comparison.label_of(comparison.groups[i]) + (f"\n{metrics}" if metrics else "")
        yield f"errors_{number}", partial(error_map, comparison.groups[i], title)


def error_map(group: RunGroup, title: str) -> Figure:
    """Draw the error matrix of a group as two heat maps: by mega-batch and by class. The mean over seeds is drawn.

    A row is an arrival, from t = 0 at the top. Error rates that were not measured are grey. Raise RunError if an error
    matrix is missing or damaged.
    """
    by_mega_batch, by_class, names = _mean_matrices(group)
    figure = Figure(figsize=(2 * WIDTH + 0.8, HEIGHT + 0.8), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True)
    known = [values[np.isfinite(values)] for values in (by_mega_batch, by_class)]
    largest = 100 * max((values.max() for values in known if values.size), default=1.0)
    for axes, values, first in ((left, by_mega_batch, 1), (right, by_class, 0)):
        drawn = 100 * values if values.size else np.full((len(by_mega_batch), 1), np.nan)
        image = _draw_matrix(axes, drawn, first=(first, 0), vmin=0, vmax=largest)
    left.set(xlabel="mega-batch (validation data)", ylabel="mega-batches arrived")
    right.set(xlabel="class (test data)")
    if names is not None and len(names) <= MAX_CLASS_LABELS:
        right.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    figure.colorbar(image, ax=[left, right], label="error, %")
    figure.suptitle(title, fontsize=9)
    add_note(figure, "below the diagonal, a column shows how the error on a mega-batch changes after it arrived")
    return figure


def _mean_matrices(group: RunGroup) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """Return the mean over seeds of the two error matrices of a group (see `ErrorMatrix`), and the class names."""
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
