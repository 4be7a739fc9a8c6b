"""index.html: one file with its data, scripts and styles. It opens from disk and needs no network."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fairseq_alma.core import catalogue
from fairseq_alma.report.appearance import FEW_ARRIVALS, appearance_of, plotly_dashes
from fairseq_alma.report.choice import Change, alternatives
from fairseq_alma.report.labels import group_label, learner_position
from fairseq_alma.report.numbers import Estimate, Numbers, all_numbers, standard_error
from fairseq_alma.report.runs import Comparison, ReportData, RunGroup
from fairseq_alma.report.tables import duration, state

FOLDER = Path(__file__).parent
SCRIPTS = ("data.js", "choice.js", "plots.js", "tables.js", "controls.js")
"""The scripts of the page. They share one scope, in this order."""
MAX_POINTS = 250_000
"""Maximum number of points in all curves together. With many runs each curve gets fewer: the page stays small."""
MIN_POINTS = 40
"""Minimum number of points in a curve, however many runs there are."""
MAX_ALTERNATIVES = 12
"""Maximum number of alternatives that the page shows for one run and one decision."""
MAX_FILTER_VALUES = 20
"""Maximum number of values of a setting that has a filter."""
INFINITE = "\0infinite"
"""Replaces infinity, for which JSON has no number. data.js turns it into a number again."""


def page(data: ReportData, reload_seconds: float | None = None) -> str:
    """Return the text of index.html.

    Args:
        data: what was read.
        reload_seconds: if given, the page reloads itself after this time.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_file("template.html.j2"))
    return template.render(
        style=_file("page.css"), script="\n".join(map(_file, SCRIPTS)), plotly=plotly_script(),
        data=json_in_script({"comparisons": [comparison_data(comparison) for comparison in data.comparisons]}),
        errors=data.errors, notes=data.notes, reload_seconds=reload_seconds,
        names=[comparison.name for comparison in data.comparisons],
    )  # fmt: skip


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return the data of one comparison for the scripts, as JSON values. Error rates are fractions."""
    groups, numbers = comparison.groups, all_numbers(comparison)
    num_points = max(MIN_POINTS, MAX_POINTS // max(1, len(groups)))
    waits = sorted({group.wait for group in groups})
    common_settings = {
        name: value
        for name, value in groups[0].settings.items()
        if name not in comparison.varied_settings and all(name in group.settings for group in groups)
    }
    return {
        "name": comparison.name,
        "vision": comparison.is_vision,
        "B": comparison.num_arrivals,
        "common_settings": {name: setting_text(value) for name, value in sorted(common_settings.items())},
        "filters": _filters(comparison),
        "groups": [
            {
                **_description(comparison, group, common_settings),
                **_results(group, result),
                **_curve_data(group, num_points),
                "dash": plotly_dashes(group.wait, waits),
                "alternatives": _best_alternatives(numbers, others),
            }
            for group, result, others in zip(groups, numbers, alternatives(comparison), strict=True)
        ],
    }


def _description(comparison: Comparison, group: RunGroup, common_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what names a group: label, appearance, folder, command and settings."""
    style = appearance_of(group.learner)
    own_settings = {
        name: setting_text(value)
        for name, value in sorted(group.settings.items())
        if name not in comparison.varied_settings and name not in common_settings
    }
    return {
        "label": group_label(group, comparison.varied_settings),
        "learner": catalogue.label_of(group.learner),
        "colour": style.colour,
        "symbol": style.symbol,
        "folder": str(group.folder),
        "command": group.command,
        "commit": str(group.runs[0].provenance.get("commit", "")),
        "settings": {name: setting_text(group.settings.get(name)) for name in comparison.varied_settings},
        "own_settings": own_settings,
        "state": state(group),
        "finished": group.is_finished,
        "seeds": [run.seed for run in group.counted_runs],
    }


def _results(group: RunGroup, numbers: Numbers) -> dict[str, Any]:
    """Return the scalar results of a group."""
    trained = np.flatnonzero(group.counted_runs[0].stage > 0)
    return {
        "quality": _estimate(numbers.quality),
        "after_first_stage": _estimate(numbers.after_first_stage),
        "final": _estimate(numbers.final),
        "final_validation": _estimate(numbers.final_validation),
        "score": _exact(numbers.validation_score),
        "first_trained_t": int(trained[0]) if len(trained) else None,
        "params": numbers.num_params,
        "forward_flops": numbers.forward_flops,
        "mem": numbers.mem,
        "comp": numbers.comp,
        "wall_seconds": _rounded(numbers.wall_seconds),
        "wall_text": duration(numbers.wall_seconds),
    }


def _curve_data(group: RunGroup, num_points: int) -> dict[str, Any]:
    t, mean, error = curve(group, num_points)
    return {"t": t, "mean": mean, "error": error}


def curve(group: RunGroup, num_points: int) -> tuple[list[int], list[float | None], list[float | None] | None]:
    """Return the curve of a group, without arrivals at which nothing changed.

    Args:
        group: the runs of one setting.
        num_points: of more changes than this, evenly spread ones are kept.

    Returns:
        t, mean quality over seeds and standard error at the first arrival, at each change and at the last arrival; for
        a short stream at every arrival. The standard errors are None for one seed.
    """
    values = group.column("quality")
    mean, error = values.mean(axis=0), standard_error(values)
    changes = np.flatnonzero((values[:, 1:] != values[:, :-1]).any(axis=0)) + 1
    times = np.unique([0, *changes, group.last_t]) if group.last_t > FEW_ARRIVALS else np.arange(group.last_t + 1)
    if len(times) > num_points:
        times = times[np.unique(np.linspace(0, len(times) - 1, num_points).round().astype(int))]
    return (
        times.tolist(),
        [_rounded(value) for value in mean[times].tolist()],
        None if error is None else [_rounded(value, 2) for value in error[times].tolist()],
    )


def _filters(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the settings by which the page can filter groups, with their values in order."""
    filters = []
    for name in comparison.varied_settings:
        values = {setting_text(group.settings.get(name)): group.settings.get(name) for group in comparison.groups}
        if len(values) <= MAX_FILTER_VALUES:
            texts = sorted(values, key=lambda text: _sort_key(values[text]))
            filters.append({"name": name, "values": texts})
    return filters


def _sort_key(value: Any) -> tuple:
    """Return the key that sorts the values of a setting: numbers, then learners in the paper's order, then texts."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, value, "")
    return (1, learner_position(value) if isinstance(value, str) else 0, str(value))


def _best_alternatives(numbers: Sequence[Numbers], others: Sequence[tuple[Change, int]]) -> list[list[Any]]:
    """Return [decision, index of the group] for the best alternatives by validation, MAX_ALTERNATIVES per decision."""

    def score(index: int) -> tuple[bool, float]:
        value = numbers[index].validation_score
        return (value is None, value or 0.0)

    best: list[list[Any]] = []
    for change in dict.fromkeys(change for change, _ in others):
        indices = sorted((index for other_change, index in others if other_change == change), key=score)
        best += [[change, index] for index in indices[:MAX_ALTERNATIVES]]
    return best


def json_in_script(value: Any) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def plotly_script() -> str:
    """Return the text of plotly.js, which the Python package of plotly contains."""
    # Imported here: it takes a second, and reading runs does not need it.
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _estimate(estimate: Estimate | None) -> list[float | str | None] | None:
    """Return [mean, standard error] as JSON values; None if there is no mean."""
    if estimate is None or math.isnan(estimate.mean):
        return None
    return [_exact(estimate.mean, 6), _rounded(estimate.stderr)]


def _exact(value: float | None, digits: int = 17) -> float | str | None:
    """Return a value by which runs are compared: it is not rounded by default, and may be INFINITE."""
    if value is None or math.isnan(value):
        return None
    return INFINITE if math.isinf(value) else float(f"{value:.{digits}g}")


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a value that is only shown, with this number of significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def setting_text(value: Any) -> str:
    """Return the value of a setting as the page shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    return str(value)
