"""Make index.html, the page of a report.

The file contains all data, scripts and styles, so a browser can open it from disk without a network. Only the printed
figures are files beside it. On the page, the word "run" means a group of runs that differ only in the seed.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fairseq_alma.core import catalogue
from fairseq_alma.report.arrivals import last_arrivals
from fairseq_alma.report.figures.style import FEW_ARRIVALS, PLOTLY_DASHES, appearance_of, dashes_of
from fairseq_alma.report.grouping import first_charged_arrival
from fairseq_alma.report.numbers import Estimate, Numbers, all_numbers, ranking, standard_error
from fairseq_alma.report.objectives import (
    OBJECTIVES,
    explanation,
    objective_name,
    score_name,
    score_scale,
    value_explanation,
)
from fairseq_alma.report.runs import Comparison, ReportData, RunGroup, learner_position, waits_of
from fairseq_alma.report.tables import duration, state, summary

FOLDER = Path(__file__).parent
SCRIPTS = ("data.js", "plots.js", "page.js")
"""JavaScript files of the page, in the order in which they are joined. A file uses functions of those before it."""
GLOSSARY_ENTRY = re.compile(r"^(\S[^\n]*)\n:   (.*(?:\n(?:    .*|(?=\n    )))*)", re.MULTILINE)
MAX_POINTS = 250_000
"""Maximum total number of points in the curves of one comparison, which limits the size of index.html. Each of n curves
may have MAX_POINTS / n points."""
MIN_POINTS = 40
"""Each curve may have at least this many points, even if all curves together then have more than MAX_POINTS."""
MAX_FILTER_VALUES = 20
"""The page has a filter for a setting only if the setting has at most this many different values."""


def page(
    data: ReportData, reload_seconds: float | None = None, figures: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the text of index.html.

    Args:
        data: the runs that were read, and an error message for each run that was skipped.
        reload_seconds: time in seconds after which the browser loads index.html again; None: it never does.
        figures: the printed figures of each comparison, slug -> names, which the page shows.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_file("template.html.j2"))
    comparisons = [
        comparison_data(comparison) | {"figures": list((figures or {}).get(comparison.slug, []))}
        for comparison in data.comparisons
    ]
    terms = glossary()
    content = {"comparisons": comparisons, "terms": {key_of(term): text for term, text in terms.items()}}
    return template.render(
        style=_file("page.css"), script="\n".join(map(_file, SCRIPTS)), plotly=plotly_script(),
        data=json_in_script(content), errors=data.errors, notes=data.notes, reload_seconds=reload_seconds,
        names=[comparison.name for comparison in data.comparisons], terms=terms,
    )  # fmt: skip


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return the data of one comparison (groups of runs on the same stream) as JSON values, for the page's JavaScript.

    Error rates are fractions between 0 and 1, not percent.
    """
    groups, numbers = comparison.groups, all_numbers(comparison)
    num_points = max(MIN_POINTS, MAX_POINTS // max(1, len(groups)))
    waits, table = waits_of(groups), summary(comparison, numbers)
    # The page has columns of its own for the run and its score.
    is_shown = [not column.startswith(("run", "by validation", "prequential")) for column in table.columns]
    arrivals = last_arrivals(comparison)
    texts = [{name: setting_text(value) for name, value in sorted(group.settings.items())} for group in groups]
    common = dict(set.intersection(*(set(one.items()) for one in texts)))
    return {
        "name": comparison.name,
        "vision": comparison.is_vision,
        "B": comparison.num_arrivals,
        "few": comparison.num_arrivals <= FEW_ARRIVALS,
        "slug": comparison.slug,
        "scale": score_scale(comparison),
        "quality": _paper_name(comparison),
        "objectives": {
            objective: {
                "name": objective_name(objective, comparison.is_vision),
                "meaning": value_explanation(objective, comparison.is_vision),
                "score": score_name(comparison, objective),
                "explanation": explanation(comparison, objective),
                "ranking": ranking(numbers, objective),
            }
            for objective in OBJECTIVES
        },
        "arrivals": arrivals and {"columns": arrivals.columns, "rows": arrivals.rows, "note": arrivals.note},
        "common_settings": {name: common[name] for name in sorted(common)},
        "filters": _filters(comparison),
        "columns": [
            _paper_name(comparison) if name == "CER" else name
            for name, shown in zip(table.columns, is_shown, strict=True)
            if shown
        ],
        "groups": [
            {
                **_group_data(comparison, group, result),
                **curve(group, num_points),
                "dash": dashes_of(group.wait_text, waits, PLOTLY_DASHES),
                "settings": {name: text for name, text in settings.items() if name not in common},
                "cells": [cell for cell, shown in zip(row, is_shown, strict=True) if shown],
            }
            for group, result, settings, row in zip(groups, numbers, texts, table.rows, strict=True)
        ],
    }


def _paper_name(comparison: Comparison) -> str:
    """Return the name of the paper's measure of quality."""
    if not comparison.is_vision:
        return "average perplexity"
    return "CER" if first_charged_arrival(comparison.groups[0].runs[0].settings) else "CER from t = 0"


def _group_data(comparison: Comparison, group: RunGroup, numbers: Numbers) -> dict[str, Any]:
    """Return the data of a group of runs as JSON values, except its settings and its curve."""
    style, wall_text = appearance_of(group.learner), duration(numbers.wall_seconds)
    if len(group.counted_runs) > 1:
        together = f" for all {len(group.counted_runs)} seeds together"
        wall_text += together if group.is_trained_together else " per seed"
    return {
        "label": comparison.label_of(group),
        "learner": catalogue.label_of(group.learner),
        "colour": style.colour,
        "symbol": style.symbol,
        "folder": str(group.folder),
        "command": group.command,
        "commit": str(group.runs[0].provenance.get("commit", "")),
        "wait": group.wait,
        "state": state(group),
        "finished": group.is_finished,
        "seeds": [run.seed for run in group.counted_runs],
        "quality": _estimate(numbers.quality),
        "value": {name: _estimate(numbers.scores[name].value) for name in OBJECTIVES},
        "score": {name: _estimate(numbers.scores[name].validation_estimate) for name in OBJECTIVES},
        "params": _number(numbers.num_params),
        "forward_flops": _number(numbers.forward_flops),
        "mem": _number(numbers.mem),
        "comp": _number(numbers.comp),
        "wall_seconds": _number(numbers.wall_seconds),
        "wall_text": wall_text,
    }


def curve(group: RunGroup, num_points: int) -> dict[str, list | None]:
    """Return the curve of a group of runs: test error rate or perplexity over the arrivals.

    If there are at most FEW_ARRIVALS arrivals, the curve contains all of them. Otherwise it contains the first arrival,
    the last arrival, and the arrivals at which the value of at least one seed changed. A curve with more than
    `num_points` points is reduced to this many evenly spaced ones.

    The curve of a language model begins at its first stage. The perplexity of an untrained model is so large that
    differences between trained models would not be visible.

    Returns:
        Lists with one entry per point: arrivals "t", "mean" over seeds, and standard "error" over seeds; None for one
            seed.
    """
    values = group.column("quality")
    mean, error = values.mean(axis=0), standard_error(values)
    changes = np.flatnonzero((values[:, 1:] != values[:, :-1]).any(axis=0)) + 1
    times = np.unique([0, *changes, group.last_t]) if group.last_t > FEW_ARRIVALS else np.arange(group.last_t + 1)
    if group.program != "vision":
        times = times[group.counted_runs[0].stage[times] > 0]
    if len(times) > num_points:
        times = times[np.unique(np.linspace(0, len(times) - 1, num_points).round().astype(int))]
    return {
        "t": times.tolist(),
        "mean": [_number(value, 4) for value in mean[times].tolist()],
        "error": None if error is None else [_number(value, 2) for value in error[times].tolist()],
    }


def _filters(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the settings for which the page has a filter: name, and values in the order in which the page shows them.

    Numbers are sorted by value, learners in the order of the paper, and other values by their text.
    """

    def key(value: Any) -> tuple:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (0, value, "")
        return (1, learner_position(value) if isinstance(value, str) else 0, str(value))

    filters = []
    for name in comparison.varied_settings:
        values = {setting_text(group.settings.get(name)): group.settings.get(name) for group in comparison.groups}
        if len(values) <= MAX_FILTER_VALUES:
            filters.append({"name": name, "values": sorted(values, key=lambda text: key(values[text]))})
    return filters


def json_in_script(value: Any) -> str:
    """Return a value as JSON text for an HTML script element.

    The characters <, > and & are escaped, so the text cannot end the element or begin a comment.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def glossary() -> dict[str, str]:
    """Return the explanation of each term of the documentation's glossary, as text without Markdown.

    `glossary.md` is a link to docs/glossary.md. So the page and the documentation explain a term by the same words.
    """
    entries = GLOSSARY_ENTRY.finditer(_file("glossary.md"))
    return {_plain(term): _plain(match[2]) for match in entries for term in match[1].split(", ")}


def key_of(term: str) -> str:
    """Return the key of a term: its letters and digits in lower case. The page looks up `gmoe_flat` and `gMoE-flat`."""
    return re.sub(r"[^a-z0-9]+", "", term.lower())


def _plain(text: str) -> str:
    """Return Markdown as plain text in one line: without emphasis, code marks and links."""
    text = " ".join(text.replace("`", "").split())
    text = re.sub(r"\s*See \[[^\]]+\]\([^)]*\)\.", "", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\s*\(see [^()]*\)(?=\.)", "", text)
    return re.sub(r"\*\*([^*]+)\*\*|\*([^*]+)\*", lambda match: match[1] or match[2], text)


@cache
def plotly_script() -> str:
    """Return the source code of plotly.js, which is included in the Python package plotly."""
    # Import plotly only when a page is written, because the import takes a second.
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _estimate(estimate: Estimate | None) -> list[float | None]:
    """Return [mean, standard error] as JSON values; [None, None] if `estimate` is None."""
    return [None, None] if estimate is None else [_number(estimate.mean), _number(estimate.stderr)]


def _number(value: float | None, digits: int = 9) -> float | None:
    """Return `value` as a JSON value, rounded to `digits` significant digits. NaN and infinity are replaced by None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def setting_text(value: Any) -> str:
    """Return the value of a setting as text for the page."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    return str(value)
