"""The settings of preset=anytime, our recipe. Reports and tables call a run with exactly these settings *anytime*."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ANYTIME = "anytime"
"""Name of the preset, and of the runs with its settings."""
_ROOT = Path(__file__).parents[2]
_FILES = {
    "vision": _ROOT / f"vision/configs/preset/{ANYTIME}.yaml",
    "language model": _ROOT / f"fairseq_alma/lm/configs/preset/{ANYTIME}.yaml",
}


@cache
def anytime_settings(half: str) -> Mapping[str, Any]:
    """Return the settings that make the recipe, name -> value: those of the preset's file, and SM with wait 1.

    Args:
        half: "vision" for alma-vision, "language model" for alma-lm.
    """
    settings = yaml.safe_load(_FILES[half].read_text(encoding="utf-8"))
    own = {name: value for name, value in settings.items() if name not in ("defaults", "preset")}
    return {"learner": "sm", "wait": 1, **own}


def is_anytime(half: str, settings: Mapping[str, Any]) -> bool:
    """Return True if a run has all settings of the recipe, however they were given. Its other settings may differ.

    Args:
        half: "vision" for alma-vision, "language model" for alma-lm.
        settings: all settings of the run.
    """
    return all(settings.get(name) == value for name, value in anytime_settings(half).items())
