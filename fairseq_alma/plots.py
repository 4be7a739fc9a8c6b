"""The picture of a run: perplexity after each arrival."""

from collections.abc import Mapping
from pathlib import Path

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.ledger import Ledger


def plot_perplexity(runs: Mapping[str, Path], picture: Path) -> Path:
    """Draw test perplexity after each arrival, one line a run, and return the path of the picture.

    An untrained learner has a perplexity near the size of its vocabulary: it is left out, as the
    paper's tables print * for it.

    Args:
        runs: label to run folder.

    Raises:
        RunError: a run has no finished stage.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window: this runs on servers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    last_t = 0
    for number, (label, run) in enumerate(runs.items()):
        rows = Ledger(run / "ledger.jsonl").rows()
        trained = [row for row in rows if row.stage > 0]
        if not trained:
            raise RunError(f"{run} has no finished stage to draw: run it first")
        last_t = max(last_t, rows[-1].t)
        for row in trained:
            at = (row.t, row.scores.perplexity)
            axes.annotate(f"{at[1]:.3g}", at, textcoords="offset points", xytext=(6, 5), fontsize="small")
        axes.plot(
            [row.t for row in trained],
            [row.scores.perplexity for row in trained],
            label=label,
            marker="os^Dv"[number % 5],
            linestyle=["-", "--", ":", "-."][number % 4],
        )
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.set_xticks(range(1, last_t + 1))
    axes.set_xlim(0.8, last_t + 0.3)
    axes.set_xlabel("mega-batches arrived")
    axes.set_ylabel("test perplexity per token (log scale)")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    return picture
