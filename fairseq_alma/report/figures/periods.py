"""The matrix of perplexities by period of the best runs, for streams in the order of a date."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fairseq_alma.report.figures.style import HEIGHT, WIDTH, add_note, best_by_validation
from fairseq_alma.report.numbers import Numbers
from fairseq_alma.report.periods import matrix_of
from fairseq_alma.report.runs import Array, Comparison

MAX_WRITTEN = 8
"""Maximum number of periods and of arrivals with which the perplexities are also written into the cells."""


def perplexities_by_period(comparison: Comparison, numbers: Sequence[Numbers]) -> Figure | None:
    """Draw the matrix of the runs with the best validation scores, one panel each, on one scale of colours.

    A row is an arrival, a column a period. Below the diagonal are periods of the past, above it those of the future.
    Untrained learners, whose perplexity is about the size of the vocabulary, are grey.

    Returns:
        The figure; None if no run has been scored by period.
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
        image = _draw(axes, np.exp(matrices[i]), norm)
        axes.set_title(comparison.label_of(comparison.groups[i]), fontsize=9)
    panels[0].set_ylabel("mega-batches arrived")
    bar = figure.colorbar(image, ax=panels, label="test perplexity")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    add_note(figure, "white line: above it, periods that have not arrived yet; grey: untrained")
    return figure


def _draw(axes: Axes, perplexities: Array, norm: LogNorm):
    """Draw a matrix [arrivals, periods], with the step line between past and future. Return the image."""
    num_arrivals, num_periods = perplexities.shape
    image = axes.imshow(
        perplexities, norm=norm, aspect="auto", cmap=colormaps["viridis"].with_extremes(bad="#cccccc"),
        interpolation="nearest", extent=(0.5, num_periods + 0.5, num_arrivals + 0.5, 0.5),
    )  # fmt: skip
    steps = np.arange(num_arrivals + 1) + 0.5
    axes.step(steps, steps, where="post", color="white", linewidth=1.2)
    axes.set(xlim=(0.5, num_periods + 0.5), ylim=(num_arrivals + 0.5, 0.5), xlabel="period (test text)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.tick_params(labelsize=8)
    if max(num_arrivals, num_periods) <= MAX_WRITTEN:
        for (t, j), value in np.ndenumerate(perplexities):
            if np.isfinite(value):
                colour = "black" if norm(value) > 0.6 else "white"
                axes.text(j + 1, t + 1, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)
    return image
