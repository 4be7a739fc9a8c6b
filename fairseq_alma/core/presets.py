"""The settings of preset=anytime, our recipe. Reports and tables call a run with exactly these settings *anytime*."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ANYTIME = "anytime"
"""Name of the preset, and of the runs with its settings."""
_ROOT = Path(__file__).parents[2]
_FILES = {
    "vision": _ROOT / f"vision/configs/preset/{ANYTIME}.yaml",
    "language model": _ROOT / f"fairseq_alma/lm/configs/preset/{ANYTIME}.yaml",
}


@cache
def anytime_settings(program: str) -> Mapping[str, Any]:
    """Return the settings that make the recipe, name -> value: those of the preset's file, and SM with wait 1."""
    # This package uses the standard library only. The lines of the file are `name: value`, comments, and defaults.
    lines = _FILES[program].read_text(encoding="utf-8").splitlines()
    found = dict(line.split(": ", 1) for line in lines if ": " in line and line[0] not in "# ")
    own = {name: _value(text) for name, text in found.items() if name != "preset"}
    return {"learner": "sm", "wait": 1, **own}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_anytime(program: str, settings: Mapping[str, Any]) -> bool:
    """Return True if a run has all settings of the recipe, however they were given. Its other settings may differ."""
    return all(settings.get(name) == value for name, value in anytime_settings(program).items())
