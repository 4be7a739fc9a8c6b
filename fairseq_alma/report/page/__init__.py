"""Make index.html: a single file that contains data, scripts and styles, and works from disk without a network."""

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
"""JavaScript files of the page. They are joined in this order, so a later file can use the names of an earlier one."""
MAX_POINTS = 250_000
"""Maximum number of points in all curves of a comparison together, to limit the size of index.html.

Every curve of the comparison gets an equal part of this number.
"""
MIN_POINTS = 40
"""A curve may always have this many points, even if all curves together then have more than MAX_POINTS."""
MAX_ALTERNATIVES = 12
"""Maximum number of alternatives that the page shows for each run and each decision.

An alternative to a run is a finished run that differs from it in one decision, such as the wait (choice.alternatives).
"""
MAX_FILTER_VALUES = 20
"""The page has no filter for a setting that has more different values than this."""
INFINITE = "\0infinite"
"""Text that represents infinity, which JSON cannot express as a number. data.js converts this text to Infinity."""


def page(data: ReportData, reload_seconds: float | None = None) -> str:
    """Return the text of index.html.

    Args:
        data: the runs that were read, and an error message for each run that was skipped.
        reload_seconds: seconds after which the page reloads itself; None: the page does not reload itself.
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
    """Return the data of one comparison as JSON values, for the JavaScript of the page.

    Error rates are fractions between 0 and 1, not percent.
    """
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
    """Return the description of a group: label, appearance, folder, command, settings and state."""
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
    """Return the scalar results of a group as JSON values."""
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
    """Return the curve of a group: error rate or perplexity over the arrivals.

    If there are more than FEW_ARRIVALS arrivals, the curve contains only the first arrival, the last arrival, and the
    arrivals at which the value of at least one seed changed.

    Args:
        group: runs with equal settings.
        num_points: maximum number of points. A longer curve is reduced to evenly spaced points.

    Returns:
        Three lists with one entry per point: arrival t, mean over seeds, and standard error over seeds. For a
        single seed, the third list is None.
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
    """Return the settings that have a filter on the page, each with its values in display order."""
    filters = []
    for name in comparison.varied_settings:
        values = {setting_text(group.settings.get(name)): group.settings.get(name) for group in comparison.groups}
        if len(values) <= MAX_FILTER_VALUES:
            texts = sorted(values, key=lambda text: _sort_key(values[text]))
            filters.append({"name": name, "values": texts})
    return filters


def _sort_key(value: Any) -> tuple:
    """Return the sort key of a setting's value: numbers first, then learners in the paper's order, then other texts."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, value, "")
    return (1, learner_position(value) if isinstance(value, str) else 0, str(value))


def _best_alternatives(numbers: Sequence[Numbers], others: Sequence[tuple[Change, int]]) -> list[list[Any]]:
    """Return the alternatives with the best validation scores, at most MAX_ALTERNATIVES for each decision.

    Args:
        numbers: the results of each group of the comparison.
        others: the alternatives to one group, as (decision, index of the alternative in the comparison).

    Returns:
        A list of [decision, index of the alternative in the comparison].
    """

    def score(index: int) -> tuple[bool, float]:
        value = numbers[index].validation_score
        return (value is None, value or 0.0)

    best: list[list[Any]] = []
    for change in dict.fromkeys(change for change, _ in others):
        indices = sorted((index for other_change, index in others if other_change == change), key=score)
        best += [[change, index] for index in indices[:MAX_ALTERNATIVES]]
    return best


def json_in_script(value: Any) -> str:
    """Return JSON that is safe inside an HTML script element. It cannot end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def plotly_script() -> str:
    """Return the source code of plotly.js, which is included in the Python package plotly."""
    # Import here, because the import takes a second, and code that does not write a page does not need plotly.
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _estimate(estimate: Estimate | None) -> list[float | str | None] | None:
    """Return [mean, standard error] as JSON values; None if there is no estimate or the mean is NaN."""
    if estimate is None or math.isnan(estimate.mean):
        return None
    return [_exact(estimate.mean, 6), _rounded(estimate.stderr)]


def _exact(value: float | None, digits: int = 17) -> float | str | None:
    """Return `value` for JSON, rounded to `digits` significant digits. Infinity becomes INFINITE, NaN None.

    This function is for values that the page compares, for example with a budget. The default of 17 digits keeps the
    exact value.
    """
    if value is None or math.isnan(value):
        return None
    return INFINITE if math.isinf(value) else float(f"{value:.{digits}g}")


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Return `value` for JSON, rounded to `digits` significant digits; None if `value` is NaN or infinite.

    This function is for values that the page displays but does not compare.
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def setting_text(value: Any) -> str:
    """Return the value of a setting as text for the page."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    return str(value)
