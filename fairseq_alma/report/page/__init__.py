"""index.html: one file that holds its data, its scripts and its style, and opens from disk without a network."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fairseq_alma.report.choice import alternatives
from fairseq_alma.report.figures.style import FEW_ARRIVALS, colour_of
from fairseq_alma.report.numbers import Number, Numbers, all_numbers, standard_error
from fairseq_alma.report.runs import LEARNERS, Comparison, Found, Run, label_of
from fairseq_alma.report.tables import duration, state

HERE = Path(__file__).parent
MOST_POINTS = 250_000
"""Of all curves together: of more runs each has fewer, so that the page stays small."""
FEWEST_POINTS = 40
MOST_ALTERNATIVES = 12
"""Of one run and one decision."""
INFINITE = "\0infinite"
_SYMBOLS = {
    "sm": "circle", "ens": "square", "umix": "triangle-up", "gens": "diamond", "gmoe": "triangle-down", "ff": "cross",
    "moe": "x", "gmoe_flat": "triangle-left", "ens_moe": "triangle-right",
}  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def page(found: Found, reload_seconds: float | None = None) -> str:
    """The whole file. With `reload_seconds` it loads itself again when so much time has passed."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_file("template.html.j2"))
    data = {"comparisons": [comparison_data(one) for one in found.comparisons]}
    return template.render(
        style=_file("page.css"), script=_file("page.js"), plotly=plotly_script(), data=in_script(data),
        faults=found.faults, notes=found.notes, reload_seconds=reload_seconds,
        num_runs=sum(len(one.runs) for one in found.comparisons), names=[one.name for one in found.comparisons],
    )  # fmt: skip


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """What the scripts draw from, as JSON values. Perplexities and errors are as on disk, errors as fractions."""
    numbers = all_numbers(comparison)
    num_points = max(FEWEST_POINTS, MOST_POINTS // max(1, len(comparison.runs)))
    others = alternatives(comparison)
    waits = sorted({run.wait for run in comparison.runs})
    common = {
        name: value
        for name, value in comparison.runs[0].settings.items()
        if name not in comparison.varied and all(name in run.settings for run in comparison.runs)
    }
    return {
        "name": comparison.name,
        "vision": comparison.is_vision,
        "B": comparison.num_arrivals,
        "common": {name: _text(value) for name, value in sorted(common.items())},
        "varied": comparison.varied,
        "filters": _filters(comparison),
        "runs": [
            _run(comparison, run, one, num_points, waits, _few(comparison, numbers, index, others[index]), common)
            for index, (run, one) in enumerate(zip(comparison.runs, numbers, strict=True))
        ],
    }


def _run(
    comparison: Comparison, run: Run, one: Numbers, num_points: int, waits: Sequence[int], others: list, common: Mapping
) -> dict[str, Any]:
    t, mean, error = curve(run, num_points)
    return {
        "label": label_of(run, comparison.varied),
        "learner": LEARNERS.get(run.learner, run.learner),
        "colour": colour_of(run.learner),
        "symbol": _SYMBOLS.get(run.learner, "star"),
        "dash": _DASHES[waits.index(run.wait) % len(_DASHES)],
        "folder": str(run.folder),
        "command": run.command,
        "commit": str(run.seeds[0].provenance.get("commit", "")),
        "settings": {name: _text(run.settings.get(name)) for name in comparison.varied},
        "own": {
            name: _text(value)
            for name, value in sorted(run.settings.items())
            if name not in comparison.varied and name not in common
        },
        "state": state(run),
        "seeds": [seed.seed for seed in run.counted],
        "finished": run.is_finished,
        "quality": _number(one.quality),
        "after": _number(one.after_first_stage),
        "final": _number(one.final),
        "final_validation": _number(one.final_validation),
        "score": _exact(one.validation_score),
        "first": int(trained[0]) if len(trained := np.flatnonzero(run.counted[0].stage > 0)) else None,
        "params": one.num_params,
        "forward": one.forward_flops,
        "mem": one.mem,
        "comp": one.comp,
        "updates": one.num_updates,
        "wall": _rounded(one.wall_seconds),
        "wall_text": duration(one.wall_seconds),
        "t": t,
        "y": mean,
        "e": error,
        "others": others,
    }


def curve(run: Run, num_points: int) -> tuple[list[int], list[float | None], list[float | None] | None]:
    """(t, mean quality, standard error) where it changes, and the last: what lies between is as it was.

    Of more than `num_points` changes points evenly apart are kept. Standard errors are None for one seed.
    """
    values = run.stacked("quality")
    mean, error = values.mean(axis=0), standard_error(values)
    changes = np.flatnonzero((values[:, 1:] != values[:, :-1]).any(axis=0)) + 1
    times = np.unique([0, *changes, run.last_t]) if run.last_t > FEW_ARRIVALS else np.arange(run.last_t + 1)
    if len(times) > num_points:
        times = times[np.unique(np.linspace(0, len(times) - 1, num_points).round().astype(int))]
    return (
        times.tolist(),
        [_rounded(value) for value in mean[times].tolist()],
        None if error is None else [_rounded(value, 2) for value in error[times].tolist()],
    )


def _filters(comparison: Comparison) -> list[dict[str, Any]]:
    """By which settings runs are chosen on the page: those with a few values."""
    filters = []
    for name in comparison.varied:
        values = {_text(run.settings.get(name)): run.settings.get(name) for run in comparison.runs}
        if len(values) <= 20:
            texts = sorted(values, key=lambda text: _order(values[text]))
            filters.append({"name": name, "values": texts})
    return filters


def _order(value: Any) -> tuple:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return (
            1,
            0,
            (list(LEARNERS).index(value) if value in LEARNERS else 99) if isinstance(value, str) else 0,
            str(value),
        )
    return (0, value, 0, "")


def _few(
    comparison: Comparison, numbers: Sequence[Numbers], index: int, others: Sequence[tuple[str, int]]
) -> list[list[Any]]:  # fmt: skip
    """Of each decision the runs that are best by validation."""
    kept = []
    for change in dict.fromkeys(change for change, _ in others):
        mine = [other for one, other in others if one == change]
        mine.sort(key=lambda other: (numbers[other].validation_score is None, numbers[other].validation_score or 0.0))
        kept += [[change, other] for other in mine[:MOST_ALTERNATIVES]]
    return kept


def in_script(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def plotly_script() -> str:
    """plotly.js, as the package of plotly carries it."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@cache
def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _number(number: Number | None) -> list[float | str | None] | None:
    if number is None or math.isnan(number.mean):
        return None
    return [_exact(number.mean, 6), _rounded(number.stderr)]


def _exact(value: float | None, digits: int = 17) -> float | str | None:
    """What is chosen by is not rounded; what diverged is INFINITE, which JSON has no number for."""
    if value is None or math.isnan(value):
        return None
    return INFINITE if math.isinf(value) else float(f"{value:.{digits}g}")


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """To so many digits that count; what is no finite number is None, as JSON has no other."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    return str(value)
