"""Make index.html, the page of a report.

The file contains all data, scripts and styles, so a browser can open it from disk without a network. On the page, the
word "run" means a group of runs that differ only in the seed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fairseq_alma.core import catalogue
from fairseq_alma.report.alternatives import Alternatives, alternatives
from fairseq_alma.report.appearance import FEW_ARRIVALS, appearance_of, plotly_dashes
from fairseq_alma.report.choice import SAME_STEP, T_95, noise_of, same_results
from fairseq_alma.report.commands import Change
from fairseq_alma.report.glossary import glossary, key_of
from fairseq_alma.report.grouping import first_charged_arrival
from fairseq_alma.report.labels import group_label, learner_position
from fairseq_alma.report.numbers import Estimate, Numbers, all_numbers, standard_error
from fairseq_alma.report.objectives import (
    BIAS,
    DEFAULT,
    OBJECTIVES,
    explanation,
    objective_name,
    rule_of,
    score_name,
    score_scale,
    value_explanation,
)
from fairseq_alma.report.runs import Comparison, ReportData, RunGroup, waits_of
from fairseq_alma.report.tables import duration, state

FOLDER = Path(__file__).parent
SCRIPTS = (
    "data.js", "choice.js", "terms.js", "marks.js", "plots.js", "tables.js", "costs.js", "answer.js", "pair.js",
    "budget.js", "filters.js", "controls.js",
)  # fmt: skip
"""JavaScript files of the page, in the order in which they are joined.

A file can use functions and variables that are defined in the files before it in this list."""
MAX_POINTS = 250_000
"""Maximum total number of points in the curves of one comparison. This limits the size of index.html.

If a comparison has n curves, each curve may have MAX_POINTS / n points.
"""
MIN_POINTS = 40
"""Each curve may have at least this many points, even if all curves together then have more than MAX_POINTS."""
MAX_ALTERNATIVES = 4
"""Maximum number of alternatives that the page shows for each group of runs, decision and objective."""
MAX_FILTER_VALUES = 20
"""The page has a filter for a setting only if the setting has at most this many different values."""
INFINITE = "\0infinite"
"""Text that stands for infinity in JSON, because JSON has no such number. data.js converts this text to Infinity."""


def page(
    data: ReportData, reload_seconds: float | None = None, figures: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the text of index.html.

    Args:
        data: the runs that were read, and an error message for each run that was skipped.
        reload_seconds: time in seconds after which the browser loads index.html again; None: it never does.
        figures: the printed figures of each comparison, slug -> names, to which the page links.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_file("template.html.j2"))
    content = {
        "comparisons": [
            comparison_data(comparison) | {"figures": list((figures or {}).get(comparison.slug, []))}
            for comparison in data.comparisons
        ],
        "terms": glossary(),
        "constants": {"t95": T_95, "bias": BIAS, "same_step": SAME_STEP, "max_alternatives": MAX_ALTERNATIVES},
        "default_objective": DEFAULT,
    }
    return template.render(
        style=_file("page.css"), script="\n".join(map(_file, SCRIPTS)), plotly=plotly_script(),
        data=json_in_script(content), errors=data.errors, notes=data.notes, reload_seconds=reload_seconds,
        names=[comparison.name for comparison in data.comparisons],
    )  # fmt: skip


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return the data of one comparison (groups of runs on the same stream) as JSON values, for the page's JavaScript.

    Error rates are fractions between 0 and 1, not percent.
    """
    groups, numbers = comparison.groups, all_numbers(comparison)
    num_points = max(MIN_POINTS, MAX_POINTS // max(1, len(groups)))
    waits = waits_of(groups)
    series_numbers, twins = _series_numbers(comparison), same_results(comparison, numbers)
    series_settings = [name for name in comparison.varied_settings if name not in catalogue.WAIT_SETTINGS]
    common_settings = {
        name: value
        for name, value in groups[0].settings.items()
        if name not in comparison.varied_settings and all(name in group.settings for group in groups)
    }
    return {
        "name": comparison.name,
        "vision": comparison.is_vision,
        "B": comparison.num_arrivals,
        "slug": comparison.slug,
        "scale": score_scale(comparison),
        "cer_from": first_charged_arrival(groups[0].runs[0].settings),
        "terms": _terms(comparison),
        "objectives": {
            objective: {
                "name": objective_name(objective, comparison.is_vision),
                "score": score_name(comparison, objective),
                "explanation": explanation(comparison, objective),
                "biased": comparison.is_vision and rule_of(comparison, objective) == "validation",
                "noise": _exact(noise_of(numbers, objective)),
            }
            for objective in OBJECTIVES
        },
        "has_transfer": any(result.forgetting for result in numbers),
        "common_settings": {name: setting_text(value) for name, value in sorted(common_settings.items())},
        "filters": _filters(comparison),
        "groups": [
            {
                **_description(comparison, group, common_settings),
                **_results(group, result),
                **_curve_data(group, num_points),
                "dash": plotly_dashes(group.wait_text, waits),
                "series": series_numbers[index],
                "twin": twins[index],
                "series_label": group_label(group, series_settings),
                "alternatives": _alternatives(numbers, others),
            }
            for index, (group, result, others) in enumerate(
                zip(groups, numbers, alternatives(comparison, numbers), strict=True)
            )
        ],
    }


def _terms(comparison: Comparison) -> dict[str, str]:
    """Return explanations that are not in the glossary, or differ from it, because they depend on the comparison."""
    terms = {"run": glossary()[key_of("group of runs")]}
    for objective in OBJECTIVES:
        terms[key_of(objective_name(objective, comparison.is_vision))] = value_explanation(
            objective, comparison.is_vision
        )
        terms[key_of(score_name(comparison, objective))] = explanation(comparison, objective)
    if comparison.is_vision and first_charged_arrival(comparison.groups[0].runs[0].settings) == 0:
        terms["cer"] = (
            "Cumulative error rate, as in the first version of the paper: the test error rate, a fraction, summed over "
            "t = 0 to B. The untrained network (t = 0) counts, too (cer_from=0)."
        )
    return terms


def _description(comparison: Comparison, group: RunGroup, common_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a group of runs except its results: label, colour, folder, command, settings and state."""
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
        "wait": group.wait,
        "has_fixed_wait": group.has_fixed_wait,
        "settings": {name: setting_text(group.settings.get(name)) for name in comparison.varied_settings},
        "own_settings": own_settings,
        "state": state(group),
        "finished": group.is_finished,
        "seeds": [run.seeds for run in group.counted_runs],
    }


def _results(group: RunGroup, numbers: Numbers) -> dict[str, Any]:
    """Return the results of a group of runs as JSON values. The curve over the stream is not included."""
    trained = np.flatnonzero(group.counted_runs[0].stage > 0)
    return {
        "quality": _estimate(numbers.quality),
        "value": {name: _estimate(numbers.scores[name].value) for name in OBJECTIVES},
        "score": {name: _exact(numbers.scores[name].score) for name in OBJECTIVES},
        "test": {name: list(map(_exact, numbers.scores[name].test)) for name in OBJECTIVES},
        "validation": {name: list(map(_exact, numbers.scores[name].validation)) for name in OBJECTIVES},
        "final": _estimate(numbers.final),
        "final_validation": _estimate(numbers.final_validation),
        "forgetting": _estimate(numbers.forgetting),
        "backward_transfer": _estimate(numbers.backward_transfer),
        "forward_transfer": _estimate(numbers.forward_transfer),
        "first_trained_t": int(trained[0]) if len(trained) else None,
        "params": numbers.num_params,
        "forward_flops": numbers.forward_flops,
        "mem": numbers.mem,
        "comp": numbers.comp,
        "wall_seconds": _rounded(numbers.wall_seconds),
        "wall_text": duration(numbers.wall_seconds),
        "train_seconds": _rounded(numbers.train_seconds),
        "trained_together": group.is_trained_together,
        "by_seed": {
            "quality": list(map(_exact, numbers.quality_by_seed)),
            "comp": list(map(_exact, numbers.comp_by_seed)),
        },
        "machine": _machine(group),
    }


def _machine(group: RunGroup) -> str:
    """Return a description of the machine that made the first run, such as "2 CPU cores, x86_64"; or ""."""
    machine = group.runs[0].provenance.get("machine")
    if not isinstance(machine, Mapping):
        return ""
    words = [f"{machine['cpus']} CPU cores"] if machine.get("cpus") else []
    words += [str(machine[name]) for name in ("gpu", "processor") if machine.get(name)]
    return ", ".join(words)


def _curve_data(group: RunGroup, num_points: int) -> dict[str, Any]:
    """Return the three lists that `curve` returns, as a dictionary with the names that the page's JavaScript uses."""
    t, mean, error = curve(group, num_points)
    return {"t": t, "mean": mean, "error": error}


def curve(group: RunGroup, num_points: int) -> tuple[list[int], list[float | None], list[float | None] | None]:
    """Return the curve of a group of runs: test error rate or perplexity over the arrivals.

    If there are at most FEW_ARRIVALS arrivals, the curve contains all of them. Otherwise it contains the first arrival,
    the last arrival, and the arrivals at which the value of at least one seed changed.

    Args:
        group: runs with equal settings.
        num_points: maximum number of points. A longer curve is reduced to this many evenly spaced points.

    Returns:
        Three lists with one entry per point: arrival t, mean over seeds, and standard error over seeds. For a single
        seed, None is returned instead of the third list.
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
    """Return the settings for which the page has a filter.

    Each setting has a list of its values, in the order in which the page shows them.
    """
    filters = []
    for name in comparison.varied_settings:
        values = {setting_text(group.settings.get(name)): group.settings.get(name) for group in comparison.groups}
        if len(values) <= MAX_FILTER_VALUES:
            texts = sorted(values, key=lambda text: _sort_key(values[text]))
            filters.append({"name": name, "values": texts})
    return filters


def _sort_key(value: Any) -> tuple:
    """Return the sort key for a value of a setting.

    Numbers are sorted by value, learners in the order of the paper, and other values by their text.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, value, "")
    return (1, learner_position(value) if isinstance(value, str) else 0, str(value))


def _series_numbers(comparison: Comparison) -> list[int]:
    """Return a number for each group. Groups with equal numbers differ only in the wait and in what follows from it."""
    names = sorted({name for group in comparison.groups for name in group.settings} - set(catalogue.WAIT_SETTINGS))
    keys = [(group.repeat, *(setting_text(group.settings.get(name)) for name in names)) for group in comparison.groups]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _alternatives(numbers: Sequence[Numbers], others: Mapping[Change, Alternatives]) -> dict[str, dict[str, Any]]:
    """Return the alternatives to a group as JSON values: decision -> runs, or a reason, or a command.

    Of many runs, those with the best scores under each objective are kept.

    Args:
        numbers: the results of each group of the comparison.
        others: the alternatives to one group.
    """
    found: dict[str, dict[str, Any]] = {}
    for change, alternative in others.items():
        if alternative.reason:
            found[change] = {"reason": alternative.reason}
        elif not alternative.runs:
            found[change] = {"command": alternative.command}
        else:
            kept: set[int] = set()
            for objective in OBJECTIVES:
                scores = {index: numbers[index].scores[objective].score for index in alternative.runs}
                # Sort alternatives without a score last, because the page shows the best alternatives.
                order = sorted(scores, key=lambda index: (scores[index] is None, scores[index] or 0.0))
                kept |= set(order[:MAX_ALTERNATIVES])
            found[change] = {"runs": sorted(kept), "number": len(alternative.runs)}
    return found


def json_in_script(value: Any) -> str:
    """Return a value as JSON text for an HTML script element.

    The characters <, > and & are escaped, so the text cannot end the element or begin a comment.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def plotly_script() -> str:
    """Return the source code of plotly.js, which is included in the Python package plotly."""
    # Import plotly only when a page is written, because the import takes a second.
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@cache
def _file(name: str) -> str:
    """Return the content of a text file, such as page.css, in the folder of this module."""
    return (FOLDER / name).read_text(encoding="utf-8")


def _estimate(estimate: Estimate | None) -> list[float | str | None] | None:
    """Return [mean, standard error] as JSON values. Return None if `estimate` is None or its mean is NaN."""
    if estimate is None or math.isnan(estimate.mean):
        return None
    return [_exact(estimate.mean), _exact(estimate.stderr)]


def _exact(value: float | None, digits: int = 17) -> float | str | None:
    """Return `value` as a JSON value, rounded to `digits` significant digits. 17 digits keep the exact value.

    Infinity is replaced by the text INFINITE, and NaN by None. Use this function for values that the page compares, for
    example with a budget.
    """
    if value is None or math.isnan(value):
        return None
    return INFINITE if math.isinf(value) else float(f"{value:.{digits}g}")


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Return `value` as a JSON value, rounded to `digits` significant digits. NaN and infinity are replaced by None.

    Use this function for values that the page displays but does not compare.
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
