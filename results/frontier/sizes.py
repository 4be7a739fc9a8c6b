"""Compare the recipe with others at three widths of the model: how does each gain change with the size?

python results/frontier/sizes.py select --data FOLDER      choose the rates of the other widths: 18 runs on WikiText-2
python results/frontier/sizes.py run --data FOLDER         train what has no ledger, two runs at a time

The models are switch_lm_tiny with a width of 64, 128 and 256: 0.9, 2.7 and 9 million parameters. The streams are
books_1 (one pass over books) and sotu (speeches, ten periods) of results/frontier/rivals.py, whose runs are those of
the width 128. FOLDER and all settings are the same as there, but the rate: as the best rate of Adam falls about as 1
over the width, the grid of the rates does. The warm-up is the one that all these recipes have chosen at the width 128.

results/rebuild.py makes results/frontier/sizes.md of the committed ledgers.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import rivals  # noqa: E402
from _texts import mean_text, read_sizes, setting_of_width  # noqa: E402

from fairseq_alma.core.ledger import LedgerRow  # noqa: E402

WIDTH, OTHERS = 128, (64, 256)
"""The width of switch_lm_tiny, and the other ones."""
LR = (0.005, 0.0025, 0.01)
"""The rates that are tried at the width 128."""
NAMES = ("anytime", "sm", "sm_replay", "no_average", "no_replay")
AGAINST = {
    "sm": "SM",
    "sm_replay": "SM, `replay=0.5`",
    "no_average": "without the average",
    "no_replay": "without replay",
}
"""The recipe that anytime is compared with -> how the table names it."""
CORPORA = {"books_1": "books, one pass", "sotu": "speeches"}


def _recipes(width: int) -> dict[str, rivals.Recipe]:
    """Return the recipes at another width, by name."""
    grid = {"lr": tuple(f"{rate * WIDTH / width:g}" for rate in LR), "warmup": ("40",)}
    found = {}
    for name in NAMES:
        recipe = rivals.RECIPES[name]
        as_for = recipe.as_for and _name(width, recipe.as_for)
        settings = (*recipe.settings, setting_of_width(width))
        found[_name(width, name)] = replace(recipe, settings=settings, grid=grid, as_for=as_for)
    return found


def _name(width: int, name: str) -> str:
    return name if width == WIDTH else f"width_{width}_{name}"


class SizeStudy(rivals.RivalStudy):
    """The runs of the other widths on one stream."""

    recipes: ClassVar[Mapping[str, rivals.Recipe]] = {
        name: recipe for width in OTHERS for name, recipe in _recipes(width).items()
    }


def _study(study: rivals.RivalStudy, selected_on: SizeStudy | None = None) -> SizeStudy:
    known = {one.name: getattr(study, one.name) for one in fields(study)}
    return SizeStudy(**known | {"selected_on": selected_on})


SELECTED_ON = _study(rivals.SELECTED_ON)
STUDIES = tuple(_study(one, SELECTED_ON) for one in rivals.STUDIES if one.stream in CORPORA)


def tables() -> dict[str, str]:
    """Return file name -> the table; {} without ledgers of another width."""
    sizes = read_sizes(rivals.SIZES)
    lines = []
    for study in STUDIES:
        periods = sizes[study.stream] if study.has_periods else None
        found = {}
        for width in sorted((WIDTH, *OTHERS)):
            by_name = {name: study.rows_by_seed(f"{study.prefix}{_name(width, name)}") for name in NAMES}
            if by_name["anytime"]:
                found[width] = by_name
        if len(found) > 1:
            lines += _lines(CORPORA[study.stream], found, periods)
    if not lines:
        return {}
    names = ["corpus", "width", "parameters", *(f"against {text}" for text in AGAINST.values()), "seeds"]
    head = [f"| {' | '.join(names)} |", f"|:---|{'---:|' * (len(names) - 1)}"]
    note = (
        "Bits per byte of anytime relative to other recipes at the same width, in percent, averaged from t = 2 on over "
        "the text that has arrived; negative: anytime is better. Paired over seeds, with the standard error. The last "
        "line of a corpus is the slope of a straight line through the widths: by how many points the difference "
        "changes if a model has ten times the parameters."
    )
    return {"sizes.md": "\n".join(["# Gains by the size of the model", "", *head, *lines, "", note, ""])}


def _lines(
    corpus: str,
    found: Mapping[int, Mapping[str, Mapping[int, Sequence[LedgerRow]]]],
    periods: Sequence[Mapping] | None,
) -> list[str]:
    """Return the rows of a corpus, and the one with the slopes. `found`: width -> recipe -> seed -> ledger rows."""
    lines = []
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in AGAINST}
    for width, by_name in found.items():
        bits = {
            name: {seed: rivals.parts_of(rows, periods)["arrived"] for seed, rows in runs.items()}
            for name, runs in by_name.items()
        }
        parameters = next(iter(by_name["anytime"].values()))[-1].scores.num_params
        cells, seeds = [], set()
        for name in AGAINST:
            both = sorted(bits["anytime"].keys() & bits[name].keys())
            changes = [100 * (bits["anytime"][seed] / bits[name][seed] - 1) for seed in both]
            points[name] += [(math.log10(parameters), change) for change in changes]
            cells.append(mean_text(changes, signed=True))
            seeds |= {len(both)} - {0}
        numbers = "-".join(map(str, sorted({min(seeds), max(seeds)}))) if seeds else ""
        lines.append(f"| {corpus} | {width} | {parameters / 1e6:.1f}M | {' | '.join(cells)} | {numbers} |")
    slopes = [slope_text(found) for found in points.values()]
    return [*lines, f"| {corpus} | slope | | {' | '.join(slopes)} | |"]


def slope_text(points: Sequence[tuple[float, float]]) -> str:
    """Return the slope of the least-squares line through points (x, y), with its standard error; "" if there is none.

    The error assumes that the points scatter around the line by the same amount everywhere.
    """
    if len({x for x, _ in points}) < 2 or len(points) < 3:
        return ""
    xs, ys = zip(*points, strict=True)
    slope, start = statistics.linear_regression(xs, ys)
    rest = sum((y - start - slope * x) ** 2 for x, y in points)
    spread = sum((x - statistics.mean(xs)) ** 2 for x in xs)
    return f"{slope:+.1f} ± {math.sqrt(rest / (len(points) - 2) / spread):.1f}"


if __name__ == "__main__":
    for one in (SELECTED_ON,) if sys.argv[1:2] == ["select"] else STUDIES:
        one.main(__doc__, out="runs/rivals", subfolder=one.stream)
