"""Expert loads and overflow over the stream.

The load of an expert is the fraction of the validation data that the expert receives. An expert can process only a
limited number of tokens of a batch. The overflow is the fraction of the tokens that were dropped because the expert
chosen for them was full.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_alma.report.figures.style import FEW_ARRIVALS, HEIGHT, WIDTH, best_by_validation
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.runs import Comparison, Run


def expert_loads(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the load of each expert in the first and in the last mixture layer, and the overflow, over the stream.

    Each row of panels shows one group of runs: its run with the first seed. Only groups with mixture layers can be
    shown. If more than MAX_GROUPS groups have mixture layers, the groups with the best validation scores are shown.

    Returns:
        The figure, or None if no group has a mixture layer with two or more experts.
    """
    has_mixture = [
        i
        for i, group in enumerate(comparison.groups)
        if any(len(layer) > 1 for layers in group.counted_runs[0].expert_load.values() for layer in layers)
    ]
    shown = best_by_validation(has_mixture, numbers)
    if not shown:
        return None
    groups = [comparison.groups[i] for i in shown]
    runs = [group.counted_runs[0] for group in groups]
    has_overflow = any(np.nanmax(np.nan_to_num(run.overflow)) > 0 for run in runs)
    num_layers = max(max(map(len, run.expert_load.values())) for run in runs)
    num_columns = min(2, num_layers) + has_overflow
    figure = Figure(
        figsize=(WIDTH * num_columns + 0.8, (HEIGHT - 0.6) * len(runs) + 0.4), layout="constrained", dpi=150
    )
    panels = figure.subplots(len(runs), num_columns, squeeze=False)
    for row, group, run in zip(panels, groups, runs, strict=True):
        label = comparison.label_of(group)
        for axes, layer in zip(row, [0] if num_layers == 1 else [0, -1], strict=False):
            image = _draw_load(axes, run, layer)
            layer_name = "first mixture" if layer == 0 else "last mixture"
            axes.set_title(label if layer == 0 and num_columns == 1 else f"{label}\n{layer_name}", fontsize=8)
            figure.colorbar(image, ax=axes, label="load / even load").ax.tick_params(labelsize=7)
        if has_overflow:
            _draw_overflow(row[-1], run)
    return figure


def load_map(run: Run, layer: int) -> tuple[list[int], np.ndarray]:
    """Return the load of each expert of a mixture layer, relative to an even load.

    The load is divided by 1 / (number of experts), the load that each expert would have if all loads were equal.

    Returns:
        The arrivals at which the loads were recorded, and an array [experts, arrivals] with the relative loads. The
        array contains NaN at arrivals at which an expert did not exist yet.
    """
    times = sorted(run.expert_load)
    loads = [run.expert_load[t][layer] for t in times]
    table = np.full((max(map(len, loads)), len(times)), np.nan)
    for column, load in enumerate(loads):
        table[: len(load), column] = np.array(load) * len(load)
    return times, table


def _draw_load(axes: Axes, run: Run, layer: int) -> QuadMesh:
    """Draw the relative load of each expert as a coloured map: one row per expert, one column per recorded arrival."""
    times, table = load_map(run, layer)
    # Compute the borders of the columns. Each column begins at its arrival and ends where the next column begins. The
    # last column gets the width of the column before it, because there is no next column.
    edges = np.array([*times, 2 * times[-1] - times[-2] if len(times) > 1 else times[-1] + 1], float)
    if times[-1] <= FEW_ARRIVALS:
        # Shift the columns by 0.5. A column of width 1 is then centred on its arrival, so the number of the arrival on
        # the x axis is below the middle of the column.
        edges -= 0.5
    image = axes.pcolormesh(
        edges, np.arange(len(table) + 1) - 0.5, table, cmap="viridis", vmin=0, vmax=max(2.0, np.nanmax(table))
    )
    axes.set_ylabel("expert", fontsize=8)
    axes.set_xlabel("mega-batches arrived", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return image


def _draw_overflow(axes: Axes, run: Run) -> None:
    """Draw the overflow, the percentage of tokens that found their expert full, from the first stage on."""
    trained = run.stage > 0
    axes.plot(np.flatnonzero(trained), 100 * run.overflow[trained], color="#D55E00", marker=".", linewidth=1)
    axes.set(ylim=(0, None))
    axes.set_ylabel("overflow, % of tokens", fontsize=8)
    axes.set_xlabel("mega-batches arrived", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
