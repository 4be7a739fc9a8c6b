"""The anytime curve: what a run scores after each arrival."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.ledger import Ledger, mean_and_standard_error

FEW = 2
"""Lines up to which each point is labelled with its number."""
FEW_ARRIVALS = 12
"""Up to so many each arrival has a mark."""

Runs = Mapping[str, Path | Sequence[Path]]
"""Label to run folder, or to those of its seeds."""


def plot_perplexity(runs: Runs, picture: Path) -> Path:
    """Draw test perplexity after each arrival, one line a run, and return the path of the picture.

    Runs of several seeds are one line, of their means, with standard errors.

    An untrained learner has a perplexity near the size of its vocabulary: it is left out, as the
    paper's tables print * for it.

    Raises:
        RunError: a run has no finished stage.
    """
    return _plot(runs, picture, "perplexity", "test perplexity per token (log scale)")


def plot_error_rate(runs: Runs, picture: Path) -> Path:
    """As plot_perplexity, of the test error rate in percent."""
    return _plot(runs, picture, "error_rate", "test error rate in % (log scale)", scale=100.0)


def _plot(runs: Runs, picture: Path, quantity: str, label_of_axis: str, scale: float = 1.0) -> Path:
    import matplotlib

    matplotlib.use("Agg")  # no window: this runs on servers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    last_t = 0
    for number, (label, folders) in enumerate(runs.items()):
        seeds = [
            Ledger(folder / "ledger.jsonl").rows() for folder in ([folders] if isinstance(folders, Path) else folders)
        ]
        trained = [rows for rows in zip(*seeds, strict=True) if rows[0].stage > 0]
        if not trained:
            raise RunError(f"{folders} has no finished stage to draw: run it first")
        last_t = max(last_t, trained[-1][0].t)
        moments = [
            mean_and_standard_error([{quantity: scale * getattr(row.scores, quantity)} for row in rows])
            for rows in trained
        ]
        times, means = [rows[0].t for rows in trained], [moment["mean"][quantity] for moment in moments]
        has_marks = len(times) <= FEW_ARRIVALS
        axes.errorbar(
            times,
            means,
            yerr=[moment["stderr"][quantity] or 0.0 for moment in moments] if len(seeds) > 1 else None,
            errorevery=1 if has_marks else max(1, len(times) // FEW_ARRIVALS),
            label=label,
            color=f"C{number}",
            marker="os^Dv"[number % 5] if has_marks else None,
            linestyle=["-", "--", ":", "-."][number % 4],
            capsize=2,
        )
        if len(runs) <= FEW and has_marks:  # many numbers would hide each other
            for at in zip(times, means, strict=True):
                axes.annotate(f"{at[1]:.3g}", at, textcoords="offset points", xytext=(6, 5), fontsize="small")
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    if last_t <= FEW_ARRIVALS:
        axes.set_xticks(range(1, last_t + 1))
        axes.set_xlim(0.8, last_t + 0.3)
    axes.set_xlabel("mega-batches arrived")
    axes.set_ylabel(label_of_axis)
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="small")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    return picture
